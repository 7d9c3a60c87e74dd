//! Tensors and kernels: the trait that a tensor framework implements, its implementations, and the suite that tests
//! them all.
//!
//! A backend runs one operator on tensors, and copies tensors to its device and back. It knows nothing of graphs,
//! peers or gradients. [`open`] chooses a backend by name.

#[cfg(feature = "burn")]
pub mod burn;
#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "conformance")]
pub mod conformance;
mod cpu;
mod error;
mod guard;
mod interpret;
mod kernels;
mod machine;
mod tensor;

use std::sync::Arc;

use fusionllm_graph::{HostTensor, Op, TensorType};

pub use cpu::Cpu;
pub use error::BackendError;
pub use interpret::{interpret, run_decomposed};
pub use tensor::Tensor;

/// The device that a backend computes on.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceInfo {
    /// The maker's name for it.
    pub name: String,
    /// Number of threads; `None` for a device other than a processor.
    pub threads: Option<usize>,
    /// Total memory in bytes, where known.
    pub memory_bytes: Option<u64>,
}

/// One tensor framework on one device.
///
/// Results depend on the operands alone: the same operands give the same bits, with any number of threads.
pub trait Backend: Send + Sync {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// The device it computes on.
    fn device(&self) -> DeviceInfo;

    /// Copies a tensor to the device.
    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError>;

    /// Copies a tensor to the host, in row-major order.
    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError>;

    /// Runs an operator. `outputs` are the types that [`Op::infer`] gives for the operands.
    ///
    /// The backend may overwrite an operand that nothing else holds. An index out of range is an error, never a panic.
    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError>;

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
        #[cfg(feature = "candle")]
        candle::Candle::NAME,
    ]
}

/// Opens a backend by name.
pub fn open(name: &str) -> Result<Arc<dyn Backend>, BackendError> {
    match name {
        Cpu::NAME => Ok(Arc::new(Cpu)),
        #[cfg(feature = "burn")]
        burn::Burn::NAME => Ok(Arc::new(burn::Burn)),
        #[cfg(feature = "candle")]
        candle::Candle::NAME => Ok(Arc::new(candle::Candle)),
        _ => Err(BackendError::Unknown { name: name.into(), known: names().join(", ") }),
    }
}
