//! Kernels: the trait a tensor framework implements to take part, its implementations, and the suite that holds them to one meaning.
//!
//! A backend runs one operator on tensors and moves tensors in and out; it knows nothing of graphs, peers or gradients. [`open`] chooses one at run time.

pub mod burn;
#[cfg(feature = "candle")]
pub mod candle;
pub mod conformance;
mod error;
mod fallback;
pub mod host;
mod interpret;
mod machine;
mod tensor;

use std::sync::Arc;

use fusionllm_graph::{HostTensor, Op, TensorType};

pub use error::BackendError;
pub use interpret::{interpret, run_decomposed};
pub use tensor::Tensor;

/// What a backend runs on.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// As its maker calls it.
    pub name: String,
    /// Threads it computes with, for processors.
    pub threads: Option<usize>,
    /// Bytes of memory in all, where known.
    pub memory_bytes: Option<u64>,
}

/// One tensor framework on one device.
///
/// Results are a function of the operands alone: the same bits again for the same bits, whatever the number of threads.
pub trait Backend: Send + Sync {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// What it runs on.
    fn device(&self) -> Device;

    /// Copies a tensor to the device.
    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError>;

    /// Copies a tensor to the host, row-major.
    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError>;

    /// Runs an operator. `outputs` are the types that [`Op::infer`] gives for the operands.
    ///
    /// An operand given here and held nowhere else may be overwritten with the result. Indices are checked: one that points outside is an error, never a panic.
    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError>;

    /// Waits until all that was started is done. Where kernels run as they are called, this does nothing.
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Bytes of device memory held by tensors now, where the framework tells.
    fn memory_in_use(&self) -> Option<u64> {
        None
    }
}

/// The names [`open`] knows in this build, the default first.
pub fn names() -> &'static [&'static str] {
    &[
        "burn-cpu",
        #[cfg(feature = "candle")]
        candle::Candle::NAME,
    ]
}

/// Opens a backend by name.
pub fn open(name: &str) -> Result<Arc<dyn Backend>, BackendError> {
    match name {
        "burn-cpu" => Ok(Arc::new(burn::BurnCpu)),
        #[cfg(feature = "candle")]
        candle::Candle::NAME => Ok(Arc::new(candle::Candle)),
        _ => Err(BackendError::Unknown { name: name.into(), known: names().join(", ") }),
    }
}
