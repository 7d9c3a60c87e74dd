//! Dropout with a counter-based generator: the mask depends on key, stream and element, never on the peer.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_dtype, ensure_float, ensure_shape};
use super::operator::Operator;
use crate::{DType, TensorType};

/// Operands `(x, key)`, results `(y, mask)`. The key is an i64 scalar that identifies seed, step and micro-batch.
///
/// Element `i` in row-major order is kept if [`CounterRng::new(key).uniform(i, stream)`](crate::CounterRng::uniform)
/// is at least `p`, and scaled by `1 / (1 - p)`. Otherwise it becomes 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// The probability of dropping an element, in [0, 1).
    pub p: f64,
    /// Distinguishes the dropouts of a graph.
    pub stream: u64,
}

impl Operator for Dropout {
    fn name(&self) -> &'static str {
        "native_dropout"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, key] = args(inputs)?;
        ensure_float(x)?;
        ensure_dtype(key, DType::I64, "the key")?;
        ensure_shape(key, &[], "the key")?;
        ensure((0.0..1.0).contains(&self.p), || format!("the probability must lie in [0, 1), got {}", self.p))?;
        Ok(vec![x.clone(), TensorType::new(DType::Bool, x.shape.clone())])
    }
}

/// Operands `(gradient, mask)`: the gradient times `scale` where the mask is true, else 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DropoutBackward {
    /// `1 / (1 - p)`
    pub scale: f64,
}

impl Operator for DropoutBackward {
    fn name(&self) -> &'static str {
        "native_dropout_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, mask] = args(inputs)?;
        ensure_float(g)?;
        ensure_dtype(mask, DType::Bool, "the mask")?;
        ensure_shape(mask, &g.shape, "the mask")?;
        Ok(vec![g.clone()])
    }
}
