//! The media where tensors are while they are not in the device's memory.

use std::sync::Arc;

use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_program::Medium;

use crate::ExecError;

/// A medium that takes tensors, such as a disk.
pub trait Storage: Send + Sync {
    /// Keeps a tensor until the last reference to it is dropped.
    ///
    /// # Errors
    ///
    /// The medium has no room for it, or is broken.
    fn store(&self, tensor: HostTensor) -> Result<Arc<dyn Stored>, ExecError>;
}

/// A tensor on a medium. It never changes.
pub trait Stored: Send + Sync {
    /// The tensor's type.
    fn ty(&self) -> &TensorType;

    /// The tensor's content.
    ///
    /// # Errors
    ///
    /// The medium cannot be read.
    fn load(&self) -> Result<HostTensor, ExecError>;
}

/// The host's memory as a medium.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory;

impl Storage for HostMemory {
    fn store(&self, tensor: HostTensor) -> Result<Arc<dyn Stored>, ExecError> {
        Ok(Arc::new(tensor))
    }
}

impl Stored for HostTensor {
    fn ty(&self) -> &TensorType {
        self.ty()
    }

    fn load(&self) -> Result<HostTensor, ExecError> {
        Ok(self.clone())
    }
}

/// The media that an executor can offload to.
#[derive(Default)]
pub(crate) struct Media {
    pub(crate) disk: Option<Arc<dyn Storage>>,
}

impl Media {
    /// Keeps a tensor on a medium.
    pub(crate) fn store(&self, medium: Medium, tensor: HostTensor) -> Result<Arc<dyn Stored>, ExecError> {
        match (medium, &self.disk) {
            (Medium::Host, _) => HostMemory.store(tensor),
            (Medium::Disk, Some(disk)) => disk.store(tensor),
            (Medium::Disk, None) => Err(ExecError::State("this peer has no disk to offload tensors to".into())),
        }
    }
}
