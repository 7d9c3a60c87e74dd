//! Cross-entropy fused with its softmax. Other losses are built from simpler operators.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_dtype, ensure_float, ensure_same_dtype, ensure_shape};
use super::operator::{Cost, Operator};
use crate::{DType, TensorType};

/// Operands `(logits [N, C], target [N])`, results `(loss, lse [N])`. Targets are `i64`.
///
/// The loss is the mean of `lse - logits[target]`, where `lse` is `ln Σ exp(logits)`. Targets equal to `ignore_index`
/// do not count. As in PyTorch, the loss is NaN if no target counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropy {
    /// The value of targets that do not count. Other targets must lie in `0 .. C`.
    pub ignore_index: i64,
}

fn operands(logits: &TensorType, target: &TensorType) -> Result<usize, String> {
    ensure_float(logits)?;
    ensure_dtype(target, DType::I64, "the target")?;
    let &[n, c] = &logits.shape[..] else {
        return Err(format!("needs logits of two dimensions, got {logits}"));
    };
    ensure(c > 0, || format!("needs at least one class, got {logits}"))?;
    ensure_shape(target, &[n], "the target")?;
    Ok(n)
}

impl Operator for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy_loss"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [logits, target] = args(inputs)?;
        let n = operands(logits, target)?;
        Ok(vec![TensorType::new(logits.dtype, []), TensorType::new(logits.dtype, [n])])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(12.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}

/// Operands `(gradient, logits, target, lse)`, result: the gradient of the logits of a [`CrossEntropy`].
///
/// The gradient is `(softmax - one-hot) gradient / number of targets that count`, and 0 in rows whose target does not
/// count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropyBackward {
    /// The `ignore_index` of the forward operator.
    pub ignore_index: i64,
}

impl Operator for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        "cross_entropy_loss_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, logits, target, lse] = args(inputs)?;
        let n = operands(logits, target)?;
        ensure_same_dtype(g, logits)?;
        ensure_same_dtype(lse, logits)?;
        ensure_shape(g, &[], "the gradient")?;
        ensure_shape(lse, &[n], "the lse")?;
        Ok(vec![logits.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(12.0 * inputs[1].numel() as f64, inputs, outputs)
    }
}
