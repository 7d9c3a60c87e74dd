//! Gradients and decompositions of `ops/view.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{
    Arange, Cat, ConstantPad, Detach, Expand, Flip, Full, Permute, Reshape, Slice, SliceBackward, Split, Triangle,
};
use crate::{GraphError, ValueId};

impl GraphRules for Reshape {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (g, shape) = (cx.grad(0)?, cx.b.ty(cx.inputs[0]).shape.clone());
        Ok(vec![Some(cx.b.reshape(g, shape)?)])
    }
}

impl GraphRules for Permute {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let mut inverse = vec![0; self.dims.len()];
        for (i, &d) in self.dims.iter().enumerate() {
            inverse[d] = i;
        }
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.permute(g, &inverse)?)])
    }
}

impl GraphRules for Expand {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.sum_to(g, cx.inputs[0])?)])
    }
}

impl GraphRules for Detach {
    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None])
    }
}

impl GraphRules for Slice {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let size = cx.b.ty(cx.inputs[0]).shape[self.dim];
        Ok(vec![Some(cx.b.op(SliceBackward { slice: self.clone(), size }, &[g])?)])
    }
}

impl GraphRules for SliceBackward {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.op(self.slice.clone(), &[g])?)])
    }
}

impl GraphRules for Cat {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let mut start = 0;
        let mut grads = Vec::with_capacity(cx.inputs.len());
        for i in 0..cx.inputs.len() {
            let end = start + cx.b.ty(cx.inputs[i]).shape[self.dim];
            grads.push(cx.if_wanted(i, |cx| cx.b.slice(g, self.dim, start, end, 1))?);
            start = end;
        }
        Ok(grads)
    }
}

impl GraphRules for Split {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let grads = (0..self.sizes.len()).map(|i| cx.grad(i)).collect::<Result<Vec<_>, _>>()?;
        Ok(vec![Some(cx.b.cat(&grads, self.dim)?)])
    }
}

impl GraphRules for Flip {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.flip(g, &self.dims)?)])
    }
}

impl GraphRules for ConstantPad {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let mut g = cx.grad(0)?;
        let shape = cx.b.ty(cx.inputs[0]).shape.clone();
        for (d, (&n, &[before, after])) in shape.iter().zip(&self.pads).enumerate() {
            if before + after > 0 {
                g = cx.b.slice(g, d, before, before + n, 1)?;
            }
        }
        Ok(vec![Some(g)])
    }
}

impl GraphRules for Triangle {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.op(self.clone(), &[g])?)])
    }
}

impl GraphRules for Full {
    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![])
    }
}

impl GraphRules for Arange {
    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![])
    }
}
