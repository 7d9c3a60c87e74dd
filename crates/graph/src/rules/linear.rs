//! Gradients and decompositions of `ops/linear.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{Linear, Matmul};
use crate::{Builder, GraphError, ValueId};

impl GraphRules for Matmul {
    // dA = G Bᵀ, dB = Aᵀ G, summed over broadcast leading dimensions.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (a, b, g) = (cx.inputs[0], cx.inputs[1], cx.grad(0)?);
        let da = cx.if_wanted(0, |cx| {
            let bt = cx.b.transpose(b)?;
            let d = cx.b.matmul(g, bt)?;
            cx.b.sum_to(d, a)
        })?;
        let db = cx.if_wanted(1, |cx| {
            // All leading dimensions share the matrix: one product over all rows replaces one product each and a sum.
            if cx.b.ty(b).rank() == 2 && cx.b.ty(a).rank() > 2 {
                let a2 = cx.b.flatten_leading(a)?;
                let g2 = cx.b.flatten_leading(g)?;
                let at = cx.b.transpose(a2)?;
                return cx.b.matmul(at, g2);
            }
            let at = cx.b.transpose(a)?;
            let d = cx.b.matmul(at, g)?;
            cx.b.sum_to(d, b)
        })?;
        Ok(vec![da, db])
    }
}

impl GraphRules for Linear {
    // dX = G W, dW = Gᵀ X, db = Σ G, over all leading dimensions.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, w, g) = (cx.inputs[0], cx.inputs[1], cx.grad(0)?);
        let g2 = cx.b.flatten_leading(g)?;
        let dx = cx.if_wanted(0, |cx| {
            let d = cx.b.matmul(g2, w)?;
            let shape = cx.b.ty(x).shape.clone();
            cx.b.reshape(d, shape)
        })?;
        let dw = cx.if_wanted(1, |cx| {
            let gt = cx.b.transpose(g2)?;
            let x2 = cx.b.flatten_leading(x)?;
            cx.b.matmul(gt, x2)
        })?;
        let db = cx.if_wanted(2, |cx| cx.b.sum(g2, &[0], false))?;
        Ok(if cx.inputs.len() == 3 { vec![dx, dw, db] } else { vec![dx, dw] })
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x2 = b.flatten_leading(inputs[0])?;
        let wt = b.transpose(inputs[1])?;
        let mut y = b.matmul(x2, wt)?;
        if let Some(&bias) = inputs.get(2) {
            y = b.add(y, bias)?;
        }
        let mut shape = b.ty(inputs[0]).shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = b.ty(inputs[1]).shape[0];
        }
        Ok(Some(vec![b.reshape(y, shape)?]))
    }
}
