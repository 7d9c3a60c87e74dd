//! Facts about the exported graph before it is translated: names, places, liveness, unsupported operators.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::aten;
use crate::decompositions::decomposes;
use crate::error::{UnsupportedOperator, is_assignment_to_data};
use crate::schema::{self, Argument, KEYWORD, Node, OptionalTensor, OutputSpec, SymBool, SymFloat, SymInt};

/// `aten.add.Tensor` of `torch.ops.aten.add.Tensor`.
pub(crate) fn short(target: &str) -> &str {
    target.strip_prefix("torch.ops.").unwrap_or(target)
}

/// The library, the name and the overload of a node's operator.
pub(crate) fn parts(node: &Node) -> (&str, &str, &str) {
    let mut parts = short(&node.target).splitn(3, '.');
    let mut part = || parts.next().unwrap_or_default();
    (part(), part(), part())
}

/// The longest name of a module, in bytes. One node of the file may become many, and each of their names begins with
/// the module's name. So a longer name would make the graph grow with the square of the file.
const MAX_MODULE_BYTES: usize = 256;

/// The name of the module that a node belongs to, in the user's model. A long name is cut.
pub(crate) fn module(node: &Node) -> &str {
    let last = node.metadata.nn_module_stack.rsplit(';').next().unwrap_or_default();
    let name = last.split(',').nth(1).unwrap_or_default();
    let name = name.split('@').next().unwrap_or_default();
    &name[..name.floor_char_boundary(MAX_MODULE_BYTES)]
}

/// The number of nodes of a graph and of all graphs inside it.
pub(crate) fn node_count(graph: &schema::Graph) -> usize {
    let inner = graph.nodes.iter().flat_map(|n| &n.inputs).filter_map(|i| match &i.arg {
        Argument::AsGraph(g) => Some(node_count(&g.graph)),
        _ => None,
    });
    graph.nodes.len() + inner.sum::<usize>()
}

/// The place of a node in the user's model, such as ` in layer1.0.conv1, model.py:12`.
pub(crate) fn place(node: &Node) -> String {
    let mut at = String::new();
    if !module(node).is_empty() {
        at = format!(" in {}", module(node));
    }
    let line = node.metadata.stack_trace.lines().rev().find_map(|l| l.trim().strip_prefix("File \""));
    if let Some((file, rest)) = line.and_then(|l| l.split_once("\", line ")) {
        let file = file.rsplit(['/', '\\']).next().unwrap_or(file);
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        at += &format!(", {file}:{number}");
    }
    at
}

pub(crate) fn output_name(argument: &Argument) -> Option<&str> {
    argument_names(argument).into_iter().next()
}

/// The names in an argument or a result.
pub(crate) fn argument_names(argument: &Argument) -> Vec<&str> {
    match argument {
        Argument::AsTensor(t) | Argument::AsOptionalTensor(OptionalTensor::AsTensor(t)) => vec![&t.name],
        Argument::AsTensors(all) => all.iter().map(|t| t.name.as_str()).collect(),
        Argument::AsOptionalTensors(all) => all
            .iter()
            .filter_map(|t| match t {
                OptionalTensor::AsTensor(t) => Some(t.name.as_str()),
                OptionalTensor::AsNone(_) => None,
            })
            .collect(),
        Argument::AsSymInt(SymInt::AsName(n))
        | Argument::AsSymFloat(SymFloat::AsName(n))
        | Argument::AsSymBool(SymBool::AsName(n)) => vec![n],
        Argument::AsSymInts(all) => all
            .iter()
            .filter_map(|n| match n {
                SymInt::AsName(n) => Some(n.as_str()),
                SymInt::AsInt(_) => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// Whether a node may do more than compute its results: it may change a value that has another name.
fn has_effects(node: &Node) -> bool {
    let (library, name, _) = parts(node);
    let in_place = name.ends_with('_') && !name.ends_with("__") || name.starts_with("__i") && name.ends_with("__");
    // An operator writes to a tensor that is given by keyword, such as `out`.
    let out = node.inputs.iter().any(|i| i.kind == Some(KEYWORD) && matches!(i.arg, Argument::AsTensor(_)));
    let unknown = library != "aten" && aten::OTHERS.iter().all(|(known, _)| *known != library);
    in_place || out || unknown || name.contains("batch_norm") || is_assignment_to_data(&node.target)
}

/// The names of the results of the model, and of the new values of its buffers.
pub(crate) fn outputs<'g>(graph: &'g schema::Graph, signature: &'g schema::Signature) -> Vec<&'g str> {
    let named = signature.output_specs.iter().filter_map(|spec| match spec {
        OutputSpec::UserOutput { arg } => output_name(arg),
        OutputSpec::LossOutput { arg } | OutputSpec::BufferMutation { arg, .. } => Some(&arg.name),
        _ => None,
    });
    named.chain(graph.outputs.iter().flat_map(argument_names)).collect()
}

/// By node, whether the results depend on it. Nodes with effects always count.
pub(crate) fn live(graph: &schema::Graph, results: &[&str]) -> Vec<bool> {
    let mut needed: HashSet<&str> = results.iter().copied().collect();
    let mut live = vec![false; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().rev() {
        live[i] = has_effects(node) || node.outputs.iter().flat_map(argument_names).any(|n| needed.contains(n));
        if live[i] {
            needed.extend(node.inputs.iter().flat_map(|input| argument_names(&input.arg)));
        }
    }
    live
}

/// All operators that the importer does not support, sorted by name, with the nodes that use them.
pub(crate) fn unsupported_operators(graph: &schema::Graph, signature: &schema::Signature) -> Vec<UnsupportedOperator> {
    fn collect(graph: &schema::Graph, live: &[bool], found: &mut BTreeMap<String, Vec<String>>) {
        for (node, _) in graph.nodes.iter().zip(live).filter(|(_, live)| **live) {
            let graphs = node.inputs.iter().filter_map(|i| match &i.arg {
                Argument::AsGraph(g) => Some(&g.graph),
                _ => None,
            });
            let higher = node.target.strip_prefix("torch.ops.higher_order.");
            let known = match higher {
                Some(name) => INLINED_CALLS.contains(&name),
                None => {
                    let (library, name, overload) = parts(node);
                    aten::find(library, name, overload).is_some()
                }
            };
            if !known {
                let name = node.outputs.iter().find_map(output_name).unwrap_or("no result");
                found.entry(short(&node.target).to_owned()).or_default().push(format!("{name}{}", place(node)));
            }
            for inner in graphs {
                let results: Vec<&str> = inner.outputs.iter().flat_map(argument_names).collect();
                collect(inner, &self::live(inner, &results), found);
            }
        }
    }
    let mut found = BTreeMap::new();
    collect(graph, &live(graph, &outputs(graph, signature)), &mut found);
    let operator = |(target, uses): (String, Vec<String>)| {
        let decomposes = decomposes(&target);
        UnsupportedOperator { target, uses, decomposes }
    };
    found.into_iter().map(operator).collect()
}

/// Calls of subgraphs that can be replaced by the nodes of the subgraph.
pub(crate) const INLINED_CALLS: &[&str] =
    &["wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "invoke_subgraph", "wrap"];

/// The names of the buffers that the signature calls updated. Only an archive after `run_decompositions()` has them.
pub(crate) fn updated_buffers(signature: &schema::Signature) -> BTreeSet<String> {
    let updated = signature.output_specs.iter().filter_map(|spec| match spec {
        OutputSpec::BufferMutation { buffer_name, .. } => Some(buffer_name.clone()),
        _ => None,
    });
    updated.collect()
}
