//! The disk that this machine gives to a run, until its user asks to stop.

pub(crate) mod disk;
pub(crate) mod interrupts;
