//! Gradients and decompositions of `ops/random.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{Dropout, DropoutBackward};
use crate::{GraphError, ValueId};

impl GraphRules for Dropout {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let op = DropoutBackward { scale: 1.0 / (1.0 - self.p) };
        Ok(vec![Some(cx.b.op(op, &[g, cx.outputs[1]])?), None])
    }
}

impl GraphRules for DropoutBackward {
    fn decompose(&self, b: &mut crate::Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let scaled = b.mul_scalar(inputs[0], self.scale)?;
        let zero = b.zero_like_scalar(inputs[0])?;
        Ok(Some(vec![b.where_(inputs[1], scaled, zero)?]))
    }
}
