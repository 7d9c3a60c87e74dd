//! Runs whole graphs on one backend, for decompositions, tests, and work without peers.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use fusionllm_graph::{Builder, Graph, Op, TensorType, ValueId};

use crate::{Backend, BackendError, Prepared, Segment, Tensor};

/// Runs the nodes that `targets` depend on and returns those values.
///
/// `sources` are the values from outside the graph. Every tensor is dropped at its last use.
pub fn interpret(
    backend: &dyn Backend,
    graph: &Graph,
    mut sources: BTreeMap<ValueId, Tensor>,
    targets: &[ValueId],
) -> Result<Vec<Tensor>, BackendError> {
    // A caller may have tensors for a larger graph that this one is a part of.
    sources.retain(|v, _| v.index() < graph.values.len());
    let (ids, tensors): (Vec<ValueId>, Vec<Tensor>) = sources.into_iter().unzip();
    let segment = Prepared::new(Segment::of_graph(graph, &ids, targets)?, ());
    segment.run_each(backend, tensors, &mut |_| ControlFlow::Continue(()))
}

/// The decomposition of an operator for operands of these types: a segment with the operands as inputs. `None` if it
/// has none.
pub(crate) fn decomposition(op: &Op, operands: &[&TensorType]) -> Result<Option<Segment>, BackendError> {
    let mut b = Builder::new(op.name());
    let mut ids = Vec::with_capacity(operands.len());
    for (i, ty) in operands.iter().enumerate() {
        ids.push(b.input(&format!("operand{i}"), ty.dtype, ty.shape.clone())?);
    }
    let results = op.decompose(&mut b, &ids)?;
    results.map(|results| Segment::of_graph(b.graph(), &ids, &results)).transpose()
}

/// Runs an operator by its decomposition. Returns `None` if it has none.
pub fn run_decomposed(
    backend: &dyn Backend,
    op: &Op,
    inputs: Vec<Tensor>,
) -> Result<Option<Vec<Tensor>>, BackendError> {
    let segment = decomposition(op, &inputs.iter().map(Tensor::ty).collect::<Vec<_>>())?;
    let run = |segment| Prepared::new(segment, ()).run_each(backend, inputs, &mut |_| ControlFlow::Continue(()));
    segment.map(run).transpose()
}
