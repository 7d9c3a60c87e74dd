//! Softmax and its logarithm along one dimension.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_dim, ensure_float};
use super::operator::{Cost, Operator, elements};
use crate::TensorType;

fn cost(inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
    Cost::memory(14.0 * elements(outputs), inputs, outputs)
}

/// The shape rule of both backward operators: gradient and result must have the same type.
fn infer_backward(dim: usize, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let [g, y] = args(inputs)?;
    ensure_float(y)?;
    ensure_dim(dim, y)?;
    ensure(g == y, || format!("the types of gradient {g} and result {y} differ"))?;
    Ok(vec![y.clone()])
}

/// An operator whose result has the type of its operand.
macro_rules! softmax {
    ($name:ident, $aten:literal, $doc:literal) => {
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
                ensure_float(x)?;
                ensure_dim(self.dim, x)?;
                Ok(vec![x.clone()])
            }

            fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
                cost(inputs, outputs)
            }
        }
    };
}

softmax!(Softmax, "_softmax", "`exp(x) / Σ exp(x)` along a dimension.");
softmax!(LogSoftmax, "_log_softmax", "`x - ln Σ exp(x)` along a dimension.");

/// Operands `(gradient, y)`, result `y (g - Σ g y)`: the gradient of the operand of a [`Softmax`] with result `y`.
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
}

/// Operands `(gradient, y)`, result `g - exp(y) Σ g`: the gradient of the operand of a [`LogSoftmax`] with result `y`.
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
}
