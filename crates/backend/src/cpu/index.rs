//! Operators that address elements by integers, and those that order elements.

use fusionllm_graph::ops::EmbeddingDenseBackward;
use fusionllm_graph::{Op, TensorType};

use super::tensor::{Array, with_bits};
use super::{Ran, all, generic, one, with_float};
use crate::kernels::{self, Float};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    match op {
        Op::Embedding(_) => {
            let [table, ids] = all(inputs)?;
            with_bits!(out.dtype, T => {
                let (table, ids) = (table.contiguous(), ids.contiguous());
                let mut y = kernels::uninit::<T>(out.numel());
                kernels::embedding(&mut y, table.elements::<T>(), ids.elements(), table.shape[1])
                    .map_err(|e| e.to_string())?;
                one(Array::new(y, out))
            })
        }
        Op::EmbeddingDenseBackward(op) if out.dtype.is_float() && !inputs.iter().any(Array::is_empty) => {
            let [g, ids] = all(inputs)?;
            with_float!(out.dtype, T => one(embedding_backward::<T>(op, g, ids, out)?))
        }
        _ => generic(op, inputs, outputs),
    }
}

fn embedding_backward<T: Float>(
    op: &EmbeddingDenseBackward,
    grad: Array,
    ids: Array,
    out: &TensorType,
) -> Result<Array, String> {
    let (grad, ids) = (grad.contiguous(), ids.contiguous());
    let mut d = kernels::uninit::<T>(out.numel());
    kernels::embedding_backward(&mut d, grad.elements(), ids.elements(), out.shape[1], op.padding_idx)
        .map_err(|e| e.to_string())?;
    Ok(Array::new(d, out))
}
