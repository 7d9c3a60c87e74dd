//! Gradients and decompositions of `ops/index.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{
    Embedding, EmbeddingDenseBackward, Gather, Index, IndexAdd, IndexPut, IndexSelect, Scatter, ScatterAdd, Sort, TopK,
};
use crate::{GraphError, TensorType, ValueId};

impl GraphRules for Embedding {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let rows = cx.b.ty(cx.inputs[0]).shape[0];
        let op = EmbeddingDenseBackward { num_weights: rows, padding_idx: self.padding_idx };
        Ok(vec![cx.if_wanted(0, |cx| cx.b.op(op, &[g, cx.inputs[1]]))?, None])
    }
}

impl GraphRules for EmbeddingDenseBackward {}

impl GraphRules for IndexSelect {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let ty = cx.b.ty(cx.inputs[0]).clone();
        let zeros = cx.b.full(ty, 0.0)?;
        Ok(vec![Some(cx.b.op(IndexAdd { dim: self.dim }, &[zeros, cx.inputs[1], g])?), None])
    }
}

impl GraphRules for IndexAdd {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let ds = cx.if_wanted(2, |cx| cx.b.op(IndexSelect { dim: self.dim }, &[g, cx.inputs[1]]))?;
        Ok(vec![Some(g), None, ds])
    }
}

impl GraphRules for Gather {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let ty = cx.b.ty(cx.inputs[0]).clone();
        let zeros = cx.b.full(ty, 0.0)?;
        Ok(vec![Some(cx.b.op(ScatterAdd { dim: self.dim }, &[zeros, cx.inputs[1], g])?), None])
    }
}

impl GraphRules for ScatterAdd {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let ds = cx.if_wanted(2, |cx| cx.b.op(Gather { dim: self.dim }, &[g, cx.inputs[1]]))?;
        Ok(vec![Some(g), None, ds])
    }
}

impl GraphRules for Scatter {
    // As in PyTorch, the gradient is correct only if the index names no position twice.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let index = cx.inputs[1];
        let dx = cx.if_wanted(0, |cx| {
            let ty = TensorType::new(cx.b.ty(g).dtype, cx.b.ty(index).shape.clone());
            let zeros = cx.b.full(ty, 0.0)?;
            cx.b.op(*self, &[g, index, zeros])
        })?;
        let ds = cx.if_wanted(2, |cx| cx.b.op(Gather { dim: self.dim }, &[g, index]))?;
        Ok(vec![dx, None, ds])
    }
}

impl GraphRules for Index {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let ty = cx.b.ty(cx.inputs[0]).clone();
        let zeros = cx.b.full(ty, 0.0)?;
        let mut operands = vec![zeros, g];
        operands.extend(&cx.inputs[1..]);
        let mut grads = vec![None; cx.inputs.len()];
        grads[0] = Some(cx.b.op(IndexPut { indexed: self.indexed.clone(), accumulate: true }, &operands)?);
        Ok(grads)
    }
}

impl GraphRules for IndexPut {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let index = cx.inputs[2..].to_vec();
        let mut grads = vec![None; cx.inputs.len()];
        grads[0] = cx.if_wanted(0, |cx| {
            if self.accumulate {
                return Ok(g);
            }
            let ty = cx.b.ty(cx.inputs[1]).clone();
            let zeros = cx.b.full(ty, 0.0)?;
            let mut operands = vec![g, zeros];
            operands.extend(&index);
            cx.b.op(self.clone(), &operands)
        })?;
        grads[1] = cx.if_wanted(1, |cx| {
            let mut operands = vec![g];
            operands.extend(&index);
            cx.b.op(Index { indexed: self.indexed.clone() }, &operands)
        })?;
        Ok(grads)
    }
}

impl GraphRules for TopK {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        scatter_to_positions(cx, self.dim)
    }
}

impl GraphRules for Sort {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        scatter_to_positions(cx, self.dim)
    }
}

/// The gradient of values that were taken from the positions in result 1.
fn scatter_to_positions(cx: &mut Backward<'_>, dim: usize) -> Result<Vec<Option<ValueId>>, GraphError> {
    let g = cx.grad(0)?;
    let ty = cx.b.ty(cx.inputs[0]).clone();
    let zeros = cx.b.full(ty, 0.0)?;
    Ok(vec![Some(cx.b.op(ScatterAdd { dim }, &[zeros, cx.outputs[1], g])?)])
}
