//! Backends on burn's kernels. All but [`BurnCpu`] itself is generic over burn's backend trait, so that the same code reaches
//! its other devices.

mod cpu;
mod elementwise;
mod index;
mod ops;
mod reduce;
mod spatial;
mod tensor;
mod view;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_flex::{Flex, FlexDevice};
use fusionllm_graph::{HostTensor, Op, TensorType};

use crate::{Backend, BackendError, Device, Tensor, run_decomposed};
use tensor::Data;

/// burn on this machine's processor (its `flex` backend).
#[derive(Debug, Clone, Copy, Default)]
pub struct BurnCpu;

const NAME: &str = "burn-cpu";

impl Backend for BurnCpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self) -> Device {
        crate::machine::processor()
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        let data = guarded(|| Ok(Data::<Flex>::from_host(tensor, &FlexDevice))).map_err(not_moved)?;
        Ok(Tensor::new(tensor.ty().clone(), data))
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        let data = tensor.get::<Data<Flex>>().ok_or_else(|| foreign(tensor))?.clone();
        guarded(|| data.into_host(tensor.ty())).map_err(not_moved)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        run::<Flex>(&FlexDevice, NAME, op, inputs, outputs).and_then(|ran| match ran {
            Ran::Done(results) => Ok(results),
            Ran::Decompose(inputs) => match run_decomposed(self, op, inputs)? {
                Some(results) => Ok(results),
                None => Err(BackendError::Operator {
                    backend: NAME,
                    op: op.name().into(),
                    reason: "has neither a kernel nor a decomposition here".into(),
                    operands: Vec::new(),
                }),
            },
        })
    }
}

/// What a burn backend adds to the trait, on which everything here is generic.
trait Framework: burn_backend::Backend {
    /// Runs `op` by a kernel of our own, taking the operands; `None`, leaving them, if there is none for these operands.
    fn fused(
        _op: &Op,
        _inputs: &mut Vec<Data<Self>>,
        _types: &[TensorType],
        _outputs: &[TensorType],
    ) -> Option<Result<Vec<Data<Self>>, String>> {
        None
    }
}

impl Framework for Flex {
    fn fused(
        op: &Op,
        inputs: &mut Vec<Data<Self>>,
        types: &[TensorType],
        outputs: &[TensorType],
    ) -> Option<Result<Vec<Data<Self>>, String>> {
        cpu::run(op, inputs, types, outputs)
    }
}

enum Ran {
    Done(Vec<Tensor>),
    /// There is no kernel: the operands, to be run by the decomposition.
    Decompose(Vec<Tensor>),
}

fn run<B: Framework>(
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
        data.push(
            tensor
                .into_inner::<Data<B>>()
                .ok_or_else(|| BackendError::Tensor { backend, reason: format!("{ty} belongs to another backend") })?,
        );
    }
    let wrap = |types: &[TensorType], data: Vec<Data<B>>| -> Vec<Tensor> {
        types.iter().zip(data).map(|(ty, d)| Tensor::new(ty.clone(), d)).collect()
    };
    let ran = guarded(|| {
        if outputs.iter().all(|t| t.numel() == 0) {
            return Ok(Some(outputs.iter().map(|t| Data::empty(t, device)).collect()));
        }
        match B::fused(op, &mut data, &types, outputs) {
            Some(results) => results.map(Some),
            None => ops::run::<B>(device, op, &mut data, &types, outputs),
        }
    });
    match ran {
        Ok(Some(results)) => {
            debug_assert!(results.iter().zip(outputs).all(|(d, t)| d.shape() == t.shape), "{op:?}: {results:?}");
            Ok(Ran::Done(wrap(outputs, results)))
        }
        Ok(None) => Ok(Ran::Decompose(wrap(&types, data))),
        Err(reason) => Err(BackendError::Operator { backend, op: op.name().into(), reason, operands: types }),
    }
}

/// burn panics where it cannot go on. Operands are checked beforehand; what slips through becomes an error all the same.
fn guarded<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
        Err(format!("burn panicked: {}", text.as_deref().unwrap_or("for no stated reason")))
    })
}

fn not_moved(reason: String) -> BackendError {
    BackendError::Tensor { backend: NAME, reason }
}

fn foreign(tensor: &Tensor) -> BackendError {
    not_moved(format!("{} belongs to another backend", tensor.ty()))
}
