//! Dropout by a counter-based generator: the mask is a function of (key, stream, element), never of the peer.

use serde::{Deserialize, Serialize};

use super::{Backward, Operator, args, float, of_shape, of_type, want};
use crate::{DType, GraphError, TensorType, ValueId};

/// `(x, key: i64 scalar)`: `(y, mask: bool)`. Element `i` (row-major) stays, scaled by `1 / (1 - p)`, where
/// [`CounterRng::new(key).uniform(i, stream)`](crate::CounterRng::uniform) is at least `p`; else it becomes 0. The key stands for (seed, step, micro-batch).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// Probability to drop, in [0, 1).
    pub p: f64,
    /// Tells this dropout apart from the others of its graph.
    pub stream: u64,
}

impl Operator for Dropout {
    fn name(&self) -> &'static str {
        "native_dropout"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, key] = args(inputs)?;
        float(x)?;
        of_type(key, DType::I64, "the key")?;
        of_shape(key, &[], "the key")?;
        want((0.0..1.0).contains(&self.p), || format!("the probability must lie in [0, 1), got {}", self.p))?;
        Ok(vec![x.clone(), TensorType::new(DType::Bool, x.shape.clone())])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let op = DropoutBackward { scale: 1.0 / (1.0 - self.p) };
        Ok(vec![Some(cx.b.op(op, &[g, cx.outputs[1]])?), None])
    }
}

/// `(gradient, mask)`: the gradient times `scale` where the mask is true, else 0.
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
        float(g)?;
        of_type(mask, DType::Bool, "the mask")?;
        of_shape(mask, &g.shape, "the mask")?;
        Ok(vec![g.clone()])
    }

    fn decompose(&self, b: &mut crate::Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let scaled = b.mul_scalar(inputs[0], self.scale)?;
        let zero = b.zero_like_scalar(inputs[0])?;
        Ok(Some(vec![b.where_(inputs[1], scaled, zero)?]))
    }
}
