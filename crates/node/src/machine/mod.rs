//! The memory, disk and threads that this machine gives to a run, until its user asks to stop.

pub(crate) mod disk;
pub(crate) mod interrupts;
pub mod memory;

use crate::NodeError;

/// The threads that kernels compute on: one per core, or a single one where pacing counts processor time.
pub(crate) fn compute_threads(slowdown: f64) -> Result<rayon::ThreadPool, NodeError> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(usize::from(slowdown > 1.0)).build();
    threads.map_err(|e| NodeError::State(format!("cannot start threads: {e}")))
}
