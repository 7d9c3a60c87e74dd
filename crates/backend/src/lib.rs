//! Tensors and kernels: the trait that a tensor framework implements, its implementations, and the suite that tests
//! them all.
//!
//! A backend runs operators on tensors, one by one or as a [`Segment`], and copies tensors to its device and back. It
//! knows nothing of graphs, peers or gradients. [`open`] chooses a backend by name. [`worker`] lets another process
//! compute.

#[cfg(any(feature = "burn", feature = "wgpu"))]
pub mod burn;
#[cfg(feature = "conformance")]
pub mod conformance;
mod cpu;
mod error;
mod guard;
mod interpret;
mod kernels;
pub mod machine;
mod segment;
mod tensor;
pub mod worker;

use std::sync::Arc;

use fusionllm_graph::{HostTensor, Op, TensorType};

pub use cpu::Cpu;
pub use error::BackendError;
pub use interpret::{interpret, run_decomposed};
pub use segment::{Done, Prepared, Segment, SegmentNode};
pub use tensor::Tensor;

/// The device that a backend computes on.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceInfo {
    /// The maker's name for it.
    pub name: String,
    /// Number of threads of this process; `None` if another device, or another process, computes and has the tensors.
    pub threads: Option<usize>,
    /// Total memory in bytes, where known.
    pub memory_bytes: Option<u64>,
}

/// One tensor framework on one device.
///
/// Results depend on the operands alone: the same operands give the same bits, with any number of threads.
pub trait Backend: Send + Sync {
    /// The name by which users choose it.
    fn name(&self) -> &str;

    /// The device it computes on.
    fn device(&self) -> DeviceInfo;

    /// Whether the device says that it computes in bf16 no faster than in f32. Then converting operands costs time for
    /// nothing.
    fn slow_bf16(&self) -> bool {
        false
    }

    /// Copies a tensor to the device.
    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError>;

    /// Copies a tensor to the host, in row-major order.
    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError>;

    /// Runs an operator. `outputs` are the types that [`Op::infer`] gives for the operands.
    ///
    /// The backend may overwrite an operand that nothing else holds. An index out of range is an error, never a panic.
    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError>;

    /// Gets ready to run a segment many times. The default is for backends that run operators one by one.
    fn prepare(&self, segment: Segment) -> Result<Prepared, BackendError> {
        Ok(Prepared::new(segment, ()))
    }

    /// Runs a segment that this backend has prepared. `inputs` have the types that it states.
    ///
    /// The backend may overwrite an input that nothing else holds. It tells `done` of each node that has run, as soon
    /// as it knows.
    ///
    /// # Errors
    ///
    /// An operator failed, or [`BackendError::Stopped`] if `done` said so.
    fn run_segment(
        &self,
        segment: &Prepared,
        inputs: Vec<Tensor>,
        done: Done<'_>,
    ) -> Result<Vec<Tensor>, BackendError> {
        segment.run_each(self, inputs, done)
    }

    /// Whether a segment runs as a whole, so that its operators take another time in it than alone.
    fn runs_segments_whole(&self) -> bool {
        false
    }

    /// Waits until all started work is done. The default is for backends whose kernels have finished when `run`
    /// returns.
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Bytes of device memory in use by tensors, where the framework counts them.
    fn memory_in_use(&self) -> Option<u64> {
        None
    }
}

/// The names that [`open`] knows in this build, the default first.
pub fn names() -> &'static [&'static str] {
    &[
        Cpu::NAME,
        #[cfg(feature = "burn")]
        burn::Burn::NAME,
        #[cfg(feature = "wgpu")]
        burn::Wgpu::NAME,
    ]
}

/// The name of the backend that runs a worker with this command line.
pub fn worker_name(command: &str) -> String {
    format!("{WORKER}{command}")
}

/// The prefix of a backend's name whose rest is the command line of a worker.
const WORKER: &str = "worker:";

/// Opens a backend by name, or starts a worker by a [`worker_name`].
pub fn open(name: &str) -> Result<Arc<dyn Backend>, BackendError> {
    if let Some(command) = name.strip_prefix(WORKER) {
        return Ok(Arc::new(worker::Worker::start(command)?));
    }
    let (framework, device) =
        name.split_once(':').map_or((name, None), |(framework, device)| (framework, Some(device)));
    match (framework, device) {
        (Cpu::NAME, None) => Ok(Arc::new(Cpu)),
        #[cfg(feature = "burn")]
        (burn::Burn::NAME, None) => Ok(Arc::new(burn::Burn)),
        #[cfg(feature = "wgpu")]
        (burn::Wgpu::NAME, device) => Ok(Arc::new(burn::Wgpu::open(device)?)),
        _ => Err(BackendError::Unknown { name: name.into(), known: names().join(", ") }),
    }
}
