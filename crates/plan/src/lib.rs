//! Plans and Programs: who runs which operators, and in which order.
