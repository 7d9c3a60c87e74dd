//! What this machine gives to a run: its memory, its threads, and its user's wish to stop.

pub mod memory;
mod signals;

pub(crate) use signals::interrupts;

use crate::NodeError;

/// The threads that kernels compute on: one per core, or a single one where pacing counts processor time.
pub(crate) fn compute_threads(slowdown: f64) -> Result<rayon::ThreadPool, NodeError> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(usize::from(slowdown > 1.0)).build();
    threads.map_err(|e| NodeError::State(format!("cannot start threads: {e}")))
}
