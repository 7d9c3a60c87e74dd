//! The backend on [burn](https://burn.dev) and its own kernels, on the processor.
//!
//! All code but [`Burn`] itself is generic over burn's backend trait, so it also fits burn's other devices. Operators
//! that burn lacks run by their decomposition or by a generic kernel of this crate.

mod elementwise;
mod index;
mod ops;
mod reduce;
mod spatial;
mod tensor;
mod view;

use burn_flex::{Flex, FlexDevice};
use fusionllm_graph::{HostTensor, Op, TensorType};

use crate::guard::guarded;
use crate::{Backend, BackendError, DeviceInfo, Tensor, run_decomposed};
use tensor::Data;

/// burn on this machine's processor, by its `flex` backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct Burn;

impl Burn {
    /// The name by which users choose it.
    pub const NAME: &str = "burn";
}

const NAME: &str = Burn::NAME;

impl Backend for Burn {
    fn name(&self) -> &str {
        NAME
    }

    fn device(&self) -> DeviceInfo {
        crate::machine::processor()
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        let data = guarded(NAME, || Ok(Data::<Flex>::from_host(tensor, &FlexDevice))).map_err(not_moved)?;
        Ok(Tensor::new(tensor.ty().clone(), data))
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        let data = tensor.get::<Data<Flex>>().ok_or_else(|| foreign(tensor))?.clone();
        guarded(NAME, || data.into_host(tensor.ty())).map_err(not_moved)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        run::<Flex>(&FlexDevice, NAME, op, inputs, outputs).and_then(|ran| match ran {
            Ran::Done(results) => Ok(results),
            Ran::Decompose(inputs) => match run_decomposed(self, op, inputs)? {
                Some(results) => Ok(results),
                None => Err(BackendError::Operator {
                    backend: NAME.into(),
                    op: op.name().into(),
                    reason: "has neither a kernel nor a decomposition".into(),
                    operands: Vec::new(),
                }),
            },
        })
    }
}

enum Ran {
    Done(Vec<Tensor>),
    /// The operands, if only the decomposition can run the operator.
    Decompose(Vec<Tensor>),
}

fn run<B: burn_backend::Backend>(
    device: &B::Device,
    backend: &'static str,
    op: &Op,
    inputs: Vec<Tensor>,
    outputs: &[TensorType],
) -> Result<Ran, BackendError> {
    let types: Vec<TensorType> = inputs.iter().map(|t| t.ty().clone()).collect();
    let mut data = Vec::with_capacity(inputs.len());
    for tensor in inputs {
        let ty = tensor.ty().clone();
        data.push(tensor.into_inner::<Data<B>>().ok_or_else(|| BackendError::Tensor {
            backend: backend.into(),
            reason: format!("{ty} belongs to another backend"),
        })?);
    }
    let wrap = |types: &[TensorType], data: Vec<Data<B>>| -> Vec<Tensor> {
        types.iter().zip(data).map(|(ty, d)| Tensor::new(ty.clone(), d)).collect()
    };
    let ran = guarded(NAME, || {
        if outputs.iter().all(|t| t.numel() == 0) {
            return Ok(Some(outputs.iter().map(|t| Data::empty(t, device)).collect()));
        }
        ops::run::<B>(device, op, &mut data, &types, outputs)
    });
    match ran {
        Ok(Some(results)) => {
            debug_assert!(results.iter().zip(outputs).all(|(d, t)| d.shape() == t.shape), "{op:?}: {results:?}");
            Ok(Ran::Done(wrap(outputs, results)))
        }
        Ok(None) => Ok(Ran::Decompose(wrap(&types, data))),
        Err(reason) => {
            Err(BackendError::Operator { backend: backend.into(), op: op.name().into(), reason, operands: types })
        }
    }
}

fn not_moved(reason: String) -> BackendError {
    BackendError::Tensor { backend: NAME.into(), reason }
}

fn foreign(tensor: &Tensor) -> BackendError {
    not_moved(format!("{} belongs to another backend", tensor.ty()))
}
