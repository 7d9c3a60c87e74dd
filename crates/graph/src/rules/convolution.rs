//! Gradients and decompositions of `ops/convolution.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad};
use crate::{GraphError, ValueId};

impl GraphRules for Conv2d {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, w, g) = (cx.inputs[0], cx.inputs[1], cx.grad(0)?);
        let dx = cx.if_wanted(0, |cx| {
            let input = cx.b.ty(x).shape.clone();
            cx.b.op(Conv2dInputGrad { conv: *self, input: [input[2], input[3]] }, &[g, w])
        })?;
        let dw = cx.if_wanted(1, |cx| {
            let kernel = cx.b.ty(w).shape.clone();
            cx.b.op(Conv2dWeightGrad { conv: *self, kernel: [kernel[2], kernel[3]] }, &[g, x])
        })?;
        let db = cx.if_wanted(2, |cx| cx.b.sum(g, &[0, 2, 3], false))?;
        Ok(if cx.inputs.len() == 3 { vec![dx, dw, db] } else { vec![dx, dw] })
    }
}

impl GraphRules for Conv2dInputGrad {
    // Linear in both operands. For the gradient d of the result, dg = conv(d, w), and dw is the weight gradient of (g,
    // d).
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (g, w, d) = (cx.inputs[0], cx.inputs[1], cx.grad(0)?);
        let dg = cx.if_wanted(0, |cx| cx.b.op(self.conv, &[d, w]))?;
        let dw = cx.if_wanted(1, |cx| {
            let kernel = cx.b.ty(w).shape.clone();
            cx.b.op(Conv2dWeightGrad { conv: self.conv, kernel: [kernel[2], kernel[3]] }, &[g, d])
        })?;
        Ok(vec![dg, dw])
    }
}

impl GraphRules for Conv2dWeightGrad {}
