//! The trait of gradient and decomposition rules, and the input of a gradient rule.

use crate::{Builder, GraphError, NodeId, ValueId};

/// The rules of an operator that write other operators into a graph.
pub(crate) trait GraphRules {
    /// Adds the operators that compute the gradients of the operands, and returns one gradient per operand.
    ///
    /// A gradient is `None` where none is wanted and where the derivative is zero everywhere.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Err(cx.not_differentiable("no derivative is defined"))
    }

    /// Adds simpler operators that compute the same results. Backends without a kernel for the operator run these.
    fn decompose(&self, _b: &mut Builder, _inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        Ok(None)
    }
}

/// The input of a gradient rule: the forward operands and results, and the gradients of the results.
pub(crate) struct Backward<'a> {
    /// The graph being extended.
    pub(crate) b: &'a mut Builder,
    /// Forward operands.
    pub(crate) inputs: &'a [ValueId],
    /// Forward results.
    pub(crate) outputs: &'a [ValueId],
    /// The gradient of the loss with respect to each result; `None` for a result that the loss does not depend on.
    pub(crate) grads: &'a [Option<ValueId>],
    /// Whether a gradient is wanted, per operand.
    pub(crate) wanted: &'a [bool],
    /// The forward operator's ATen name, for errors.
    pub(crate) op: &'static str,
    /// The forward node's name, for errors.
    pub(crate) node_name: &'a str,
    /// The forward node, for errors.
    pub(crate) node: NodeId,
}

impl Backward<'_> {
    /// The gradient of result `i`, as zeros where the loss does not depend on it.
    pub(crate) fn grad(&mut self, i: usize) -> Result<ValueId, GraphError> {
        match self.grads[i] {
            Some(g) => Ok(g),
            None => {
                let ty = self.b.ty(self.outputs[i]).clone();
                self.b.full(ty, 0.0)
            }
        }
    }

    /// Calls `f` if the gradient of operand `i` is wanted.
    pub(crate) fn if_wanted(
        &mut self,
        i: usize,
        f: impl FnOnce(&mut Self) -> Result<ValueId, GraphError>,
    ) -> Result<Option<ValueId>, GraphError> {
        if self.wanted.get(i).copied().unwrap_or(false) { f(self).map(Some) } else { Ok(None) }
    }

    /// The error of a rule that cannot differentiate this node.
    pub(crate) fn not_differentiable(&self, reason: &str) -> GraphError {
        GraphError::NotDifferentiable {
            op: self.op.into(),
            name: self.node_name.into(),
            node: self.node,
            reason: reason.into(),
        }
    }
}
