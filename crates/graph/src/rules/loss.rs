//! Gradients and decompositions of `ops/loss.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{Compare, CrossEntropy, CrossEntropyBackward, Unary};
use crate::{Builder, DType, GraphError, TensorType, ValueId};

impl CrossEntropy {
    /// Three values: whether each target counts (1 or 0, `[N]`), the targets with 0 in the place of those that do not
    /// count (`[N]`), and the number of targets that count.
    fn counted(
        &self,
        b: &mut Builder,
        logits: ValueId,
        target: ValueId,
    ) -> Result<(ValueId, ValueId, ValueId), GraphError> {
        let dtype = b.ty(logits).dtype;
        let counts = b.compare_scalar(Compare::Ne, target, self.ignore_index as f64)?;
        let zero = b.zero_like_scalar(target)?;
        let index = b.where_(counts, target, zero)?;
        let counts = b.cast(counts, dtype)?;
        let total = b.sum(counts, &[0], false)?;
        Ok((counts, index, total))
    }
}

impl GraphRules for CrossEntropy {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        if cx.grads[1].is_some() {
            return Err(cx.not_differentiable("a gradient reaches its lse"));
        }
        let g = cx.grad(0)?;
        let op = CrossEntropyBackward { ignore_index: self.ignore_index };
        Ok(vec![Some(cx.b.op(op, &[g, cx.inputs[0], cx.inputs[1], cx.outputs[1]])?), None])
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let (logits, target) = (inputs[0], inputs[1]);
        let n = b.ty(target).shape[0];
        if n == 0 {
            let nan = b.full(TensorType::new(b.ty(logits).dtype, []), f64::NAN)?;
            let lse = b.full(TensorType::new(b.ty(logits).dtype, [0]), 0.0)?;
            return Ok(Some(vec![nan, lse]));
        }
        let max = b.amax(logits, &[1], true)?;
        let shifted = b.sub(logits, max)?;
        let e = b.unary(Unary::Exp, shifted)?;
        let sum = b.sum(e, &[1], false)?;
        let log = b.unary(Unary::Log, sum)?;
        let max = b.reshape(max, [n])?;
        let lse = b.add(log, max)?;
        let (counts, index, total) = self.counted(b, logits, target)?;
        let index = b.reshape(index, [n, 1])?;
        let picked = b.gather(logits, 1, index)?;
        let picked = b.reshape(picked, [n])?;
        let each = b.sub(lse, picked)?;
        // `where`, not a product: a logit of an ignored row may be infinite.
        let counted = b.cast(counts, DType::Bool)?;
        let zero = b.zero_like_scalar(each)?;
        let each = b.where_(counted, each, zero)?;
        let sum = b.sum(each, &[0], false)?;
        Ok(Some(vec![b.div(sum, total)?, lse]))
    }
}

impl GraphRules for CrossEntropyBackward {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let (g, logits, target, lse) = (inputs[0], inputs[1], inputs[2], inputs[3]);
        let (n, c) = (b.ty(logits).shape[0], b.ty(logits).shape[1]);
        let forward = CrossEntropy { ignore_index: self.ignore_index };
        let (counts, index, total) = forward.counted(b, logits, target)?;
        let lse = b.reshape(lse, [n, 1])?;
        let shifted = b.sub(logits, lse)?;
        let p = b.unary(Unary::Exp, shifted)?;
        let classes = b.arange(DType::I64, 0.0, 1.0, c)?;
        let index = b.reshape(index, [n, 1])?;
        let hot = b.op(Compare::Eq, &[classes, index])?;
        let dtype = b.ty(logits).dtype;
        let hot = b.cast(hot, dtype)?;
        let d = b.sub(p, hot)?;
        let weight = b.div(g, total)?;
        // `where`, not a product: if no target counts, the weight is infinite, but the gradient must be 0.
        let counted = b.cast(counts, DType::Bool)?;
        let zero = b.zero_like_scalar(weight)?;
        let weight = b.where_(counted, weight, zero)?;
        let weight = b.reshape(weight, [n, 1])?;
        Ok(Some(vec![b.mul(d, weight)?]))
    }
}
