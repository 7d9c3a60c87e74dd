//! Gradients and decompositions of `ops/softmax.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{LogSoftmax, LogSoftmaxBackward, Softmax, SoftmaxBackward, Unary};
use crate::{Builder, GraphError, ValueId};

/// The shifted operand `x - max x`, its exponentials and their sum.
struct Exponentials {
    shifted: ValueId,
    exp: ValueId,
    sum: ValueId,
}

/// Subtracts the maximum first, so that no exponential overflows.
fn exponentials(b: &mut Builder, x: ValueId, dim: usize) -> Result<Exponentials, GraphError> {
    let max = b.amax(x, &[dim], true)?;
    let shifted = b.sub(x, max)?;
    let exp = b.unary(Unary::Exp, shifted)?;
    let sum = b.sum(exp, &[dim], true)?;
    Ok(Exponentials { shifted, exp, sum })
}

impl GraphRules for Softmax {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.op(SoftmaxBackward { dim: self.dim }, &[g, cx.outputs[0]])?)])
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        if b.ty(inputs[0]).numel() == 0 {
            return Ok(Some(vec![b.mul_scalar(inputs[0], 1.0)?]));
        }
        let e = exponentials(b, inputs[0], self.dim)?;
        Ok(Some(vec![b.div(e.exp, e.sum)?]))
    }
}

impl GraphRules for LogSoftmax {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.op(LogSoftmaxBackward { dim: self.dim }, &[g, cx.outputs[0]])?)])
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        if b.ty(inputs[0]).numel() == 0 {
            return Ok(Some(vec![b.mul_scalar(inputs[0], 1.0)?]));
        }
        let e = exponentials(b, inputs[0], self.dim)?;
        let log = b.unary(Unary::Log, e.sum)?;
        Ok(Some(vec![b.sub(e.shifted, log)?]))
    }
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
