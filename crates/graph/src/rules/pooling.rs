//! Gradients and decompositions of `ops/pooling.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{
    AdaptiveAvgPool2d, AdaptiveAvgPool2dBackward, AvgPool2d, AvgPool2dBackward, MaxPool2d, MaxPool2dBackward,
};
use crate::{GraphError, ValueId};

impl GraphRules for MaxPool2d {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (g, shape) = (cx.grad(0)?, cx.b.ty(cx.inputs[0]).shape.clone());
        Ok(vec![Some(cx.b.op(MaxPool2dBackward { input: [shape[2], shape[3]] }, &[g, cx.outputs[1]])?)])
    }
}

impl GraphRules for MaxPool2dBackward {}

impl GraphRules for AvgPool2d {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (g, shape) = (cx.grad(0)?, cx.b.ty(cx.inputs[0]).shape.clone());
        Ok(vec![Some(cx.b.op(AvgPool2dBackward { pool: *self, input: [shape[2], shape[3]] }, &[g])?)])
    }
}

impl GraphRules for AvgPool2dBackward {}

impl GraphRules for AdaptiveAvgPool2d {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (g, shape) = (cx.grad(0)?, cx.b.ty(cx.inputs[0]).shape.clone());
        Ok(vec![Some(cx.b.op(AdaptiveAvgPool2dBackward { input: [shape[2], shape[3]] }, &[g])?)])
    }
}

impl GraphRules for AdaptiveAvgPool2dBackward {}
