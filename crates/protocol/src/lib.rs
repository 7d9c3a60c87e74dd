//! Messages and the broker and peer state machines, without I/O.
