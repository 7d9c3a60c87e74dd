//! Softmax and its logarithm along one dimension.

use serde::{Deserialize, Serialize};

use super::{Backward, Cost, Operator, args, float, in_rank, want};
use crate::{Builder, GraphError, TensorType, ValueId};

use super::elementwise::Unary;

fn cost(inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
    Cost::memory(14.0 * outputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
}

/// What the backward operators share: `(gradient, result)`, alike.
fn infer_backward(dim: usize, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let [g, y] = args(inputs)?;
    float(y)?;
    in_rank(dim, y)?;
    want(g == y, || format!("gradient {g} and result {y} differ"))?;
    Ok(vec![y.clone()])
}

macro_rules! forward {
    ($name:ident, $aten:literal, $backward:ident, $doc:literal, $decompose:expr) => {
        #[doc = $doc]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub struct $name {
            /// The dimension.
            pub dim: usize,
        }

        impl Operator for $name {
            fn name(&self) -> &'static str {
                $aten
            }

            fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
                let [x] = args(inputs)?;
                float(x)?;
                in_rank(self.dim, x)?;
                Ok(vec![x.clone()])
            }

            fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
                let g = cx.grad(0)?;
                Ok(vec![Some(cx.b.op($backward { dim: self.dim }, &[g, cx.outputs[0]])?)])
            }

            fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
                cost(inputs, outputs)
            }

            fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
                if b.ty(inputs[0]).numel() == 0 {
                    return Ok(Some(vec![b.mul_scalar(inputs[0], 1.0)?]));
                }
                // The maximum is taken away first, so that no exponential overflows.
                let max = b.amax(inputs[0], &[self.dim], true)?;
                let x = b.sub(inputs[0], max)?;
                let e = b.unary(Unary::Exp, x)?;
                let sum = b.sum(e, &[self.dim], true)?;
                let finish: fn(&mut Builder, ValueId, ValueId, ValueId) -> Result<ValueId, GraphError> = $decompose;
                Ok(Some(vec![finish(b, x, e, sum)?]))
            }
        }
    };
}

forward!(Softmax, "_softmax", SoftmaxBackward, "`exp(x) / Σ exp(x)` along a dimension.", |b, _, e, sum| b.div(e, sum));
forward!(LogSoftmax, "_log_softmax", LogSoftmaxBackward, "`x - ln Σ exp(x)` along a dimension.", |b, x, _, sum| {
    let l = b.unary(Unary::Log, sum)?;
    b.sub(x, l)
});

/// `(gradient, y)`: `y (g - Σ g y)`, the gradient of a [`Softmax`] with result `y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoftmaxBackward {
    /// The dimension.
    pub dim: usize,
}

impl Operator for SoftmaxBackward {
    fn name(&self) -> &'static str {
        "_softmax_backward_data"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        infer_backward(self.dim, inputs)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let gy = b.mul(inputs[0], inputs[1])?;
        let s = b.sum(gy, &[self.dim], true)?;
        let d = b.sub(inputs[0], s)?;
        Ok(Some(vec![b.mul(inputs[1], d)?]))
    }
}

/// `(gradient, y)`: `g - exp(y) Σ g`, the gradient of a [`LogSoftmax`] with result `y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSoftmaxBackward {
    /// The dimension.
    pub dim: usize,
}

impl Operator for LogSoftmaxBackward {
    fn name(&self) -> &'static str {
        "_log_softmax_backward_data"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        infer_backward(self.dim, inputs)
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        cost(inputs, outputs)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let s = b.sum(inputs[0], &[self.dim], true)?;
        let e = b.unary(Unary::Exp, inputs[1])?;
        let t = b.mul(e, s)?;
        Ok(Some(vec![b.sub(inputs[0], t)?]))
    }
}
