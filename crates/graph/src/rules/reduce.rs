//! Gradients and decompositions of `ops/reduce.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{ArgReduce, Compare, CumSum, Reduce, ReduceKind};
use crate::{Builder, GraphError, TensorType, ValueId};

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
            ReduceKind::Prod => {
                let others = product_of_others(b, x, &self.dims)?;
                b.mul(g, others)?
            }
            ReduceKind::Any | ReduceKind::All => return Ok(vec![None]),
        };
        Ok(vec![Some(spread)])
    }
}

/// For each element the product of the others along `dims`: 0 if one of them is 0, else the product of all elements
/// that are not 0, over the element itself.
fn product_of_others(b: &mut Builder, x: ValueId, dims: &[usize]) -> Result<ValueId, GraphError> {
    let dtype = b.ty(x).dtype;
    let zero = b.compare_scalar(Compare::Eq, x, 0.0)?;
    let one = b.full(TensorType::new(dtype, []), 1.0)?;
    let factors = b.where_(zero, one, x)?;
    let product = b.op(Reduce { kind: ReduceKind::Prod, dims: dims.to_vec(), keepdim: true }, &[factors])?;
    let others = b.div(product, factors)?;
    let zeros = b.cast(zero, dtype)?;
    let count = b.sum(zeros, dims, true)?;
    let other_zeros = b.sub(count, zeros)?;
    let none = b.compare_scalar(Compare::Eq, other_zeros, 0.0)?;
    let nil = b.zero_like_scalar(others)?;
    b.where_(none, others, nil)
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
