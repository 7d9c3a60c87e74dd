//! Gradients and decompositions of `ops/reduce.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{ArgReduce, Compare, CumSum, Reduce, ReduceKind};
use crate::{GraphError, ValueId};

impl GraphRules for Reduce {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, y, g) = (cx.inputs[0], cx.outputs[0], cx.grad(0)?);
        let b = &mut *cx.b;
        let shape = b.ty(x).shape.clone();
        let mut kept = shape.clone();
        for &d in &self.dims {
            kept[d] = 1;
        }
        let g = b.reshape(g, kept.clone())?;
        let spread = match self.kind {
            ReduceKind::Sum => b.expand(g, shape)?,
            ReduceKind::Mean => {
                let n: usize = self.dims.iter().map(|&d| shape[d]).product();
                let g = b.div_scalar(g, n as f64)?;
                b.expand(g, shape)?
            }
            // Equal extrema share the gradient evenly, as in ATen.
            ReduceKind::Amax | ReduceKind::Amin => {
                let y = b.reshape(y, kept)?;
                let hit = b.op(Compare::Eq, &[x, y])?;
                let dtype = b.ty(x).dtype;
                let hit = b.cast(hit, dtype)?;
                let count = b.sum(hit, &self.dims, true)?;
                let share = b.div(g, count)?;
                b.mul(hit, share)?
            }
            // The product of the other elements is y / x, unless x is zero.
            ReduceKind::Prod => {
                let y = b.reshape(y, kept)?;
                let p = b.mul(g, y)?;
                b.div(p, x)?
            }
            ReduceKind::Any | ReduceKind::All => return Ok(vec![None]),
        };
        Ok(vec![Some(spread)])
    }
}

impl GraphRules for ArgReduce {
    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None])
    }
}

impl GraphRules for CumSum {
    // dx_i = Σ_{j ≥ i} g_j: a running sum from the end.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let b = &mut *cx.b;
        let f = b.flip(g, &[self.dim])?;
        let s = b.op(self.clone(), &[f])?;
        Ok(vec![Some(b.flip(s, &[self.dim])?)])
    }
}
