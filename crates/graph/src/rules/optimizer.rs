//! Gradients and decompositions of `ops/optimizer.rs`.

use super::context::GraphRules;
use crate::ops::{AdamwStep, SgdStep, SquaredNorm, Unary};
use crate::{Builder, DType, GraphError, ValueId};

/// Element `i` of `hyper` as a scalar of type `dtype`.
fn hyper(b: &mut Builder, h: ValueId, i: usize, dtype: DType) -> Result<ValueId, GraphError> {
    let s = b.slice(h, 0, i, i + 1, 1)?;
    let s = b.reshape(s, [])?;
    b.cast(s, dtype)
}

impl GraphRules for AdamwStep {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [p, g, m, v, h] = [inputs[0], inputs[1], inputs[2], inputs[3], inputs[4]];
        let dtype = b.ty(p).dtype;
        let [lr, c1, c2, factor] =
            [hyper(b, h, 0, dtype)?, hyper(b, h, 1, dtype)?, hyper(b, h, 2, dtype)?, hyper(b, h, 3, dtype)?];
        let g = b.mul(g, factor)?;
        let decay = b.mul_scalar(lr, self.weight_decay)?;
        let keep = b.scalar_sub(1.0, decay)?;
        let p = b.mul(p, keep)?;
        let m = b.mul_scalar(m, self.beta1)?;
        let gm = b.mul_scalar(g, 1.0 - self.beta1)?;
        let m = b.add(m, gm)?;
        let v = b.mul_scalar(v, self.beta2)?;
        let g2 = b.mul(g, g)?;
        let g2 = b.mul_scalar(g2, 1.0 - self.beta2)?;
        let v = b.add(v, g2)?;
        let root = b.unary(Unary::Sqrt, v)?;
        let c2 = b.unary(Unary::Sqrt, c2)?;
        let root = b.div(root, c2)?;
        let root = b.add_scalar(root, self.eps)?;
        let size = b.div(lr, c1)?;
        let step = b.div(m, root)?;
        let step = b.mul(step, size)?;
        let p = b.sub(p, step)?;
        Ok(Some(vec![p, m, v]))
    }
}

impl GraphRules for SgdStep {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [p, g, m, h] = [inputs[0], inputs[1], inputs[2], inputs[3]];
        let dtype = b.ty(p).dtype;
        let (lr, factor) = (hyper(b, h, 0, dtype)?, hyper(b, h, 1, dtype)?);
        let g = b.mul(g, factor)?;
        let d = b.mul_scalar(p, self.weight_decay)?;
        let g = b.add(g, d)?;
        let m = b.mul_scalar(m, self.momentum)?;
        let m = b.add(m, g)?;
        let mut step = m;
        if self.nesterov {
            let s = b.mul_scalar(m, self.momentum)?;
            step = b.add(g, s)?;
        }
        let step = b.mul(step, lr)?;
        Ok(Some(vec![b.sub(p, step)?, m]))
    }
}

impl GraphRules for SquaredNorm {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x = b.cast(inputs[0], DType::F64)?;
        let x2 = b.mul(x, x)?;
        let dims: Vec<usize> = (0..b.ty(x2).rank()).collect();
        Ok(Some(vec![b.sum(x2, &dims, false)?]))
    }
}
