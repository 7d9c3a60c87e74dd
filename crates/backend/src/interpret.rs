//! Runs whole graphs on one backend, for decompositions, tests, and work without peers.

use std::collections::BTreeMap;

use fusionllm_graph::{Builder, Graph, Op, TensorType, ValueId};

use crate::{Backend, BackendError, Tensor};

/// Runs the nodes that `targets` depend on and returns those values.
///
/// `sources` are the values from outside the graph. Every tensor is dropped at its last use.
pub fn interpret(
    backend: &dyn Backend,
    graph: &Graph,
    mut sources: BTreeMap<ValueId, Tensor>,
    targets: &[ValueId],
) -> Result<Vec<Tensor>, BackendError> {
    let live = graph.ancestors(targets.iter().copied());
    let mut uses = vec![0usize; graph.values.len()];
    for n in graph.node_ids().filter(|n| live[n.index()]) {
        for v in &graph.node(n).inputs {
            uses[v.index()] += 1;
        }
    }
    for v in targets {
        uses[v.index()] += 1;
    }
    let mut values: Vec<Option<Tensor>> = vec![None; graph.values.len()];
    for (i, slot) in values.iter_mut().enumerate() {
        *slot = sources.remove(&ValueId(i as u32)).filter(|_| uses[i] > 0);
    }
    let mut take = |values: &mut Vec<Option<Tensor>>, v: ValueId| {
        let i = v.index();
        uses[i] -= 1;
        let tensor = if uses[i] == 0 { values[i].take() } else { values[i].clone() };
        tensor.ok_or_else(|| BackendError::Tensor {
            backend: backend.name(),
            reason: format!("no tensor was given for {:?}", graph.value(v).name),
        })
    };
    for n in graph.node_ids().filter(|n| live[n.index()]) {
        let node = graph.node(n);
        let inputs = node.inputs.iter().map(|v| take(&mut values, *v)).collect::<Result<Vec<_>, _>>()?;
        let types: Vec<TensorType> = node.outputs.iter().map(|v| graph.ty(*v).clone()).collect();
        for (v, tensor) in node.outputs.iter().zip(backend.run(&node.op, inputs, &types)?) {
            values[v.index()] = Some(tensor);
        }
    }
    targets.iter().map(|v| take(&mut values, *v)).collect()
}

/// Runs an operator by its decomposition. Returns `None` if it has none.
pub fn run_decomposed(
    backend: &dyn Backend,
    op: &Op,
    inputs: Vec<Tensor>,
) -> Result<Option<Vec<Tensor>>, BackendError> {
    let mut b = Builder::new(op.name());
    let mut sources = BTreeMap::new();
    let mut ids = Vec::with_capacity(inputs.len());
    for (i, tensor) in inputs.into_iter().enumerate() {
        let ty = tensor.ty();
        let id = b.input(&format!("operand{i}"), ty.dtype, ty.shape.clone())?;
        sources.insert(id, tensor);
        ids.push(id);
    }
    match op.decompose(&mut b, &ids)? {
        None => Ok(None),
        Some(results) => interpret(backend, b.graph(), sources, &results).map(Some),
    }
}
