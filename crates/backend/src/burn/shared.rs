//! Code that the backends on burn share: tensors to and from a device of burn, and operators there.

use fusionllm_graph::{HostTensor, Op, TensorType};

use super::ops;
use super::tensor::{Data, Framework, shape};
use crate::guard::guarded;
use crate::{Backend, BackendError, Tensor, run_decomposed};

pub(super) fn upload<B: Framework>(
    backend: &dyn Backend,
    device: &B::Device,
    tensor: &HostTensor,
) -> Result<Tensor, BackendError> {
    let moved = guarded(backend.name(), || Ok(Data::<B>::from_host(tensor, device)));
    Ok(Tensor::new(tensor.ty().clone(), moved.map_err(|reason| unusable(backend, reason))?))
}

pub(super) fn download<B: Framework>(backend: &dyn Backend, tensor: &Tensor) -> Result<HostTensor, BackendError> {
    let data = tensor.get::<Data<B>>().ok_or_else(|| unusable(backend, foreign(tensor.ty())))?.clone();
    guarded(backend.name(), || data.into_host(tensor.ty())).map_err(|reason| unusable(backend, reason))
}

/// Runs an operator whose operands are tensors of burn backend `B`.
pub(super) fn run<B: Framework>(
    backend: &dyn Backend,
    device: &B::Device,
    op: &Op,
    inputs: Vec<Tensor>,
    outputs: &[TensorType],
) -> Result<Vec<Tensor>, BackendError> {
    let types: Vec<TensorType> = inputs.iter().map(|t| t.ty().clone()).collect();
    let mut data = Vec::with_capacity(inputs.len());
    for (tensor, ty) in inputs.into_iter().zip(&types) {
        data.push(tensor.into_inner::<Data<B>>().ok_or_else(|| unusable(backend, foreign(ty)))?);
    }
    let wrap = |types: &[TensorType], data: Vec<Data<B>>| -> Vec<Tensor> {
        types.iter().zip(data).map(|(ty, d)| Tensor::new(ty.clone(), d)).collect()
    };
    let ran = guarded(backend.name(), || {
        if outputs.iter().all(|t| t.numel() == 0) {
            return Ok(Some(outputs.iter().map(|t| Data::empty(t, device)).collect()));
        }
        ops::run::<B>(device, op, &mut data, &types, outputs)
    });
    match ran {
        Ok(Some(results)) => {
            let stored = |ty: &TensorType| shape(&ty.shape).to_vec();
            debug_assert!(results.iter().zip(outputs).all(|(d, t)| d.shape() == stored(t)), "{op:?}: {results:?}");
            Ok(wrap(outputs, results))
        }
        Ok(None) => decomposed(backend, op, wrap(&types, data)),
        Err(reason) => Err(failed(backend, op, reason, types)),
    }
}

/// Runs an operator by its decomposition.
pub(super) fn decomposed(backend: &dyn Backend, op: &Op, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, BackendError> {
    let types = inputs.iter().map(|t| t.ty().clone()).collect();
    run_decomposed(backend, op, inputs)?
        .ok_or_else(|| failed(backend, op, "has neither a kernel nor a decomposition".into(), types))
}

fn failed(backend: &dyn Backend, op: &Op, reason: String, operands: Vec<TensorType>) -> BackendError {
    BackendError::Operator { backend: backend.name().into(), op: op.name().into(), reason, operands }
}

fn unusable(backend: &dyn Backend, reason: String) -> BackendError {
    BackendError::Tensor { backend: backend.name().into(), reason }
}

fn foreign(ty: &TensorType) -> String {
    format!("{ty} belongs to another backend")
}
