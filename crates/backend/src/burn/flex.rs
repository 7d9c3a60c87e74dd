use burn_backend::BoolDType;
use burn_flex::{Flex, FlexDevice};
use fusionllm_graph::{HostTensor, Op, TensorType};

use super::shared;
use super::tensor::{Data, Framework};
use crate::{Backend, BackendError, DeviceInfo, Tensor};

/// burn on this machine's processor, by its `flex` backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct Burn;

impl Burn {
    /// The name by which users choose it.
    pub const NAME: &str = "burn";
}

impl Framework for Flex {
    const BOOL: BoolDType = BoolDType::Native;

    fn contiguous(x: Data<Self>) -> Data<Self> {
        // burn copies a tensor that is not contiguous before it reshapes it, even to the same shape.
        let dims = x.shape();
        x.reshape(&dims)
    }
}

impl Backend for Burn {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn device(&self) -> DeviceInfo {
        crate::machine::processor()
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        shared::upload::<Flex>(self, &FlexDevice, tensor)
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        shared::download::<Flex>(self, tensor)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        shared::run::<Flex>(self, &FlexDevice, op, inputs, outputs)
    }
}
