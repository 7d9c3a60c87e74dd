//! The memory and threads that this machine gives to a run.

pub mod memory;
pub mod pool;
mod threads;

pub use threads::{compute_threads, take_long_turns};
