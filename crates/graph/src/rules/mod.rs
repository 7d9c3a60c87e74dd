//! Gradients and decompositions: the rules of each operator that write other operators.
//!
//! The rules need the builder, and the builder needs the definitions in `ops/`. So rules and definitions are in
//! separate folders.

mod attention;
mod context;
mod convolution;
mod elementwise;
mod index;
mod linear;
mod loss;
mod normalization;
mod optimizer;
mod pooling;
mod random;
mod reduce;
mod softmax;
mod view;

use crate::ops::with_operators;
use crate::{Builder, GraphError, Op, ValueId};

pub(crate) use context::Backward;
use context::GraphRules;

macro_rules! define_rules {
    ($($variant:ident,)*) => {
        fn rules(op: &Op) -> &dyn GraphRules {
            match op {
                $(Op::$variant(op) => op,)*
            }
        }
    };
}

with_operators!(define_rules);

impl Op {
    /// Adds the operators that compute the gradients of the operands; see [`GraphRules::backward`].
    pub(crate) fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        rules(self).backward(cx)
    }

    /// Adds simpler operators that compute the same results, and returns these results. `None` if the operator has no
    /// decomposition, so that every backend has a kernel for it.
    pub fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        rules(self).decompose(b, inputs)
    }
}
