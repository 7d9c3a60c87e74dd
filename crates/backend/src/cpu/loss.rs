//! Cross-entropy.

use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all, generic, one, with_float};
use crate::kernels::{self, Float};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let dtype = outputs[0].dtype;
    match op {
        Op::CrossEntropy(op) => {
            let inputs = all(inputs)?;
            with_float!(dtype, T => cross_entropy::<T>(op.ignore_index, inputs, outputs))
        }
        Op::CrossEntropyBackward(op) => {
            let inputs = all(inputs)?;
            with_float!(dtype, T => cross_entropy_backward::<T>(op.ignore_index, inputs))
        }
        _ => generic(op, inputs, outputs),
    }
}

fn cross_entropy<T: Float>(ignore: i64, [logits, target]: [Array; 2], outputs: &[TensorType]) -> Ran {
    let (logits, target) = (logits.contiguous(), target.contiguous());
    let classes = logits.shape[1];
    let mut lse = kernels::uninit::<T>(outputs[1].numel());
    let loss = kernels::cross_entropy(&mut lse, logits.elements(), target.elements(), classes, ignore);
    let loss = loss.map_err(|e| e.to_string())?;
    Ok(vec![Array::new(vec![loss], &outputs[0]), Array::new(lse, &outputs[1])])
}

fn cross_entropy_backward<T: Float>(ignore: i64, [grad, logits, target, lse]: [Array; 4]) -> Ran {
    let (target, lse) = (target.contiguous(), lse.contiguous());
    let classes = logits.shape[1];
    let grad = grad.contiguous().elements::<T>()[0];
    let mut outcome = Ok(());
    let d = logits.overwrite::<T>(|out, source| {
        let (target, lse) = (target.elements(), lse.elements());
        outcome = kernels::cross_entropy_backward(out, source, grad, target, lse, classes, ignore);
    });
    outcome.map_err(|e| e.to_string())?;
    one(d)
}
