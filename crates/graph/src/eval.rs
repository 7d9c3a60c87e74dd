//! The evaluation form of a graph: without dropout and state updates, and with batch normalisation by running
//! statistics.

use crate::ops::Unary;
use crate::{Builder, Graph, GraphError, NodeId, Op, ValueId, ValueKind};

impl Graph {
    /// The evaluation form of the graph. Inputs, parameters, buffers and constants keep their names. The origin of each
    /// node is the node of this graph that it replaces.
    pub fn evaluation(&self) -> Result<Graph, GraphError> {
        let mut b = Builder::new(format!("{}.eval", self.name));
        let mut map: Vec<Option<ValueId>> = vec![None; self.values.len()];
        // Nodes that no output depends on are dropped, such as the update of running statistics.
        let live = self.ancestors(self.outputs.values().copied());
        for (i, v) in self.values.iter().enumerate() {
            map[i] = match v.kind {
                ValueKind::RngKey | ValueKind::Result { .. } => None,
                _ => Some(b.copy_source(self, ValueId(i as u32), v.ty.clone())?),
            };
        }
        for (n, node) in self.nodes.iter().enumerate().filter(|(n, _)| live[*n]) {
            b.tag(crate::Phase::Forward, Some(NodeId(n as u32)));
            let operand = |i: usize| {
                map[node.inputs[i].index()].ok_or_else(|| GraphError::Structure {
                    graph: self.name.clone(),
                    reason: format!("node {:?} reads a value that exists only in training", node.name),
                })
            };
            let outputs: Vec<Option<ValueId>> = match &node.op {
                Op::Dropout(_) => vec![Some(operand(0)?), None],
                Op::BatchNorm(op) => {
                    let (x, w, bias, mean, var) = (operand(0)?, operand(1)?, operand(2)?, operand(3)?, operand(4)?);
                    let y = b.scope(&node.name, |b| inference_batch_norm(b, x, w, bias, mean, var, op.eps))?;
                    // Evaluation leaves the running statistics as they are, also for a later call of the same module.
                    vec![Some(y), None, None, Some(mean), Some(var)]
                }
                op => {
                    let operands = (0..node.inputs.len()).map(operand).collect::<Result<Vec<_>, _>>()?;
                    let scope = node.name.rsplit_once('.').map_or("", |(s, _)| s);
                    b.scope(scope, |b| b.apply(op.clone(), &operands))?.into_iter().map(Some).collect()
                }
            };
            for (v, new) in node.outputs.iter().zip(outputs) {
                map[v.index()] = new;
            }
        }
        for (name, v) in &self.outputs {
            let value = map[v.index()].ok_or_else(|| GraphError::Structure {
                graph: self.name.clone(),
                reason: format!("output {name:?} exists only in training"),
            })?;
            b.output(name, value)?;
        }
        for (k, v) in &self.metadata {
            b.metadata(k, v.clone());
        }
        b.finish()
    }
}

/// `(x - mean) / √(var + eps) · weight + bias`, computed as one factor and one offset per channel.
fn inference_batch_norm(
    b: &mut Builder,
    x: ValueId,
    weight: ValueId,
    bias: ValueId,
    mean: ValueId,
    var: ValueId,
    eps: f64,
) -> Result<ValueId, GraphError> {
    let v = b.add_scalar(var, eps)?;
    let rstd = b.unary(Unary::Rsqrt, v)?;
    let factor = b.mul(rstd, weight)?;
    let shift = b.mul(mean, factor)?;
    let offset = b.sub(bias, shift)?;
    let mut along = vec![1; b.ty(x).rank()];
    along[1] = b.ty(factor).numel();
    let factor = b.reshape(factor, along.clone())?;
    let offset = b.reshape(offset, along)?;
    let y = b.mul(x, factor)?;
    b.add(y, offset)
}
