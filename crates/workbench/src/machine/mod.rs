//! The memory and threads that this machine gives to a run.

pub mod memory;
pub mod pool;

use crate::WorkbenchError;

/// The threads that kernels compute on: one per core, or a single one where pacing counts processor time.
///
/// # Errors
///
/// The system starts no more threads.
pub fn compute_threads(slowdown: f64) -> Result<rayon::ThreadPool, WorkbenchError> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(usize::from(slowdown > 1.0)).build();
    threads.map_err(|e| WorkbenchError::State(format!("cannot start threads: {e}")))
}
