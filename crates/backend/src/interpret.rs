//! Runs whole graphs on one backend, for decompositions, tests, and work without peers.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use fusionllm_graph::{Graph, Op, ValueId};

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

/// Runs an operator by its decomposition. Returns `None` if it has none.
pub fn run_decomposed(
    backend: &dyn Backend,
    op: &Op,
    inputs: Vec<Tensor>,
) -> Result<Option<Vec<Tensor>>, BackendError> {
    let segment = Segment::of_decomposition(op, &inputs.iter().map(Tensor::ty).collect::<Vec<_>>())?;
    let run = |segment| Prepared::new(segment, ()).run_each(backend, inputs, &mut |_| ControlFlow::Continue(()));
    segment.map(run).transpose()
}
