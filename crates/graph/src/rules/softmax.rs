//! Gradients and decompositions of `ops/softmax.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{LogSoftmaxBackward, SoftmaxBackward, Unary};
use crate::{Builder, GraphError, TensorType, ValueId};

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

impl GraphRules for SoftmaxBackward {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let gy = b.mul(inputs[0], inputs[1])?;
        let s = b.sum(gy, &[self.dim], true)?;
        let d = b.sub(inputs[0], s)?;
        Ok(Some(vec![b.mul(inputs[1], d)?]))
    }
}

impl GraphRules for LogSoftmaxBackward {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let s = b.sum(inputs[0], &[self.dim], true)?;
        let e = b.unary(Unary::Exp, inputs[1])?;
        let t = b.mul(e, s)?;
        Ok(Some(vec![b.sub(inputs[0], t)?]))
    }
}
