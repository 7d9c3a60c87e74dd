//! `graph show`: a model's operators, parameters and costs.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use fusionllm_graph::units::counted;
use fusionllm_graph::{Graph, GraphError, Node, Phase, TensorType, ValueId, ValueKind, autodiff};
use fusionllm_import::ImportOptions;
use fusionllm_workbench::WorkbenchError;
use fusionllm_workbench::model::forward;
use fusionllm_workbench::model::imported::ImportedModel;
use fusionllm_workspace::config::Network;
use serde::Serialize;

use crate::args::ShowArgs;
use crate::failure::Failure;
use crate::output;
use crate::table::{Table, width, wrap};
use crate::units::{bytes, count};

/// Prints what `path` leads to.
pub(crate) fn show(args: &ShowArgs, json: bool) -> Result<(), Failure> {
    let forward = open(&args.path)?;
    let listing = Listing::new(&forward).map_err(|e| refused(&args.path, &e))?;
    if json { output::print_json(&listing.shown(args.backward)) } else { output::print(&listing.text(args.backward)) }
}

fn open(path: &Path) -> Result<Graph, Failure> {
    if path.extension().is_some_and(|e| e == "pt2") {
        return Ok(ImportedModel::open(path, None, ImportOptions::default())?.into_imported().graph);
    }
    let file = if path.is_dir() { path.join("graph.json") } else { path.to_owned() };
    let is_graph_file = |text: &str| text.contains("\"fusionllm_graph\"");
    match std::fs::read_to_string(&file) {
        Ok(text) if file.extension().is_some_and(|e| e == "json") && is_graph_file(&text) => {
            return Graph::from_json(&text).map_err(|e| refused(&file, &e));
        }
        Ok(text) if text.contains("\"fusionllm_plan\"") => {
            let hint = "give the job that the plan is for, such as the job.toml beside it";
            return Err(Failure::input(format!("{}: this is a plan, not a graph", path.display())).hint(hint));
        }
        // The kind of the file is told below.
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {}
        Err(e) if !path.is_dir() => {
            let hint =
                "give a graph file, a .pt2 archive, a job file, a run directory, or a config.json from Hugging Face";
            return Err(Failure::input(format!("{}: cannot be read", path.display())).because(&e).hint(hint));
        }
        _ => {}
    }
    let network = Network::at(path)?;
    forward(&network.family, network.micro_batch, network.context).map_err(|e| match e {
        WorkbenchError::Graph(e) => refused(path, &e),
        e => e.into(),
    })
}

fn refused(path: &Path, error: &GraphError) -> Failure {
    let failure = Failure::input(format!("{}: {error}", path.display()));
    let hint = match error {
        GraphError::Operand { .. } | GraphError::Structure { .. } => {
            "mend the operator named there, or write the graph anew"
        }
        GraphError::File(_) => "write the graph anew; this file is damaged or of another kind",
        _ => return failure,
    };
    failure.hint(hint)
}

/// A graph with its backward operators, where it has a loss to differentiate.
struct Listing {
    graph: Graph,
    /// The number of values without backward operators.
    given: usize,
    totals: Totals,
}

/// The work and memory of one micro-batch.
#[derive(Debug, Clone, Copy, Serialize)]
struct Totals {
    forward_nodes: usize,
    /// This and the next two are unknown where there is nothing to differentiate.
    backward_nodes: Option<usize>,
    parameters: usize,
    parameter_bytes: usize,
    forward_flops: f64,
    backward_flops: Option<f64>,
    /// Results of forward operators that backward ones read, views with what they view.
    activation_bytes: Option<usize>,
}

impl Listing {
    fn new(given: &Graph) -> Result<Self, GraphError> {
        let has_backward = given.nodes.iter().any(|n| n.phase != Phase::Forward);
        let loss = given.outputs.get("loss").filter(|_| !has_backward);
        let graph = match loss.map(|loss| autodiff::differentiate(given, *loss)) {
            Some(Ok(train)) => train.graph,
            // An evaluation form or a part of a network: there is nothing to train, but enough to look at.
            Some(Err(GraphError::NotDifferentiable { .. } | GraphError::Structure { .. })) | None => given.clone(),
            Some(Err(e)) => return Err(e),
        };
        let (forward, backward): (Vec<&Node>, Vec<&Node>) = graph.nodes.iter().partition(|n| n.phase == Phase::Forward);
        let flops = |nodes: &[&Node]| nodes.iter().map(|n| flops(&graph, n)).sum();
        let parameters: Vec<&TensorType> = graph.parameters().map(|v| graph.ty(v)).collect();
        let trained = !backward.is_empty();
        let totals = Totals {
            forward_nodes: forward.len(),
            backward_nodes: trained.then_some(backward.len()),
            parameters: parameters.iter().map(|t| t.numel()).sum(),
            parameter_bytes: parameters.iter().map(|t| t.bytes()).sum(),
            forward_flops: flops(&forward),
            backward_flops: trained.then(|| flops(&backward)),
            activation_bytes: trained.then(|| kept(&graph).values().sum()),
        };
        Ok(Self { graph, given: given.values.len(), totals })
    }

    fn text(&self, backward: bool) -> String {
        let (graph, totals) = (&self.graph, &self.totals);
        let mut out = format!("{}: {}, {}\n", graph.name, counted(totals.forward_nodes, "operator"), self.parameters());
        out += &self.operators(|phase| phase == Phase::Forward);
        if backward && totals.backward_nodes.is_some() {
            out += "\nbackward\n";
            out += &self.operators(|phase| phase != Phase::Forward);
        }
        for (title, ids) in [
            ("inputs", self.inputs(backward).collect::<Vec<_>>()),
            ("parameters", graph.parameters().collect()),
            ("buffers", graph.buffers().collect()),
        ] {
            if ids.is_empty() {
                continue;
            }
            let mut table = Table::new(["name", "type", "elements", "bytes"], [2, 3]);
            for v in ids {
                let (value, ty) = (graph.value(v), graph.ty(v));
                table.row([value.name.clone(), ty.to_string(), count(ty.numel() as f64), bytes(ty.bytes() as u64)]);
            }
            out += &format!("\n{title}\n\n{table}");
        }
        out += "\noutputs\n\n";
        let mut table = Table::new(["name", "value", "type"], []);
        for (name, v) in &graph.outputs {
            table.row([name.clone(), self.operand(*v), graph.ty(*v).to_string()]);
        }
        out += &table.to_string();
        out + &self.summary()
    }

    /// The operators of these phases, under the modules that they belong to, or the operators that they differentiate.
    fn operators(&self, shown: impl Fn(Phase) -> bool) -> String {
        let graph = &self.graph;
        let mut out = String::new();
        let mut last = None;
        for (id, node) in graph.nodes.iter().enumerate().filter(|(_, node)| shown(node.phase)) {
            let module = node.name.rsplit_once('.').map_or("", |(module, _)| module);
            let heading = match (node.phase, node.origin) {
                (Phase::WeightGrad, Some(origin)) => format!("weight gradient of {origin}"),
                (Phase::InputGrad, Some(origin)) => format!("gradient of {origin}"),
                _ if module.is_empty() => graph.name.clone(),
                _ => module.to_owned(),
            };
            if last.as_ref() != Some(&heading) {
                let _ = writeln!(out, "\n{heading}");
                last = Some(heading);
            }
            let operand = |v: &ValueId| {
                let name = self.operand(*v);
                let inside = name.strip_prefix(module).and_then(|rest| rest.strip_prefix('.'));
                inside.filter(|_| !module.is_empty()).map_or(name.clone(), String::from)
            };
            let reads: Vec<String> = node.inputs.iter().map(operand).collect();
            let cost = flops(graph, node);
            let cost = if cost == 0.0 { "-".into() } else { count(cost) };
            let call = format!("{}({}) -> {}", node.op.name(), reads.join(", "), types(graph, &node.outputs));
            out += &entry(id, &call, &cost);
        }
        out
    }

    /// The inputs. Those that only backward operators read are left out, unless backward operators are listed.
    fn inputs(&self, backward: bool) -> impl Iterator<Item = ValueId> {
        self.graph.inputs().filter(move |v| backward || v.index() < self.given)
    }

    fn parameters(&self) -> String {
        let Totals { parameters, parameter_bytes, .. } = self.totals;
        format!("{} parameters ({})", count(parameters as f64), bytes(parameter_bytes as u64))
    }

    fn summary(&self) -> String {
        let t = &self.totals;
        let mut out = String::from("\ntotals of a micro-batch\n\n");
        let mut line = |name: &str, forward: String, backward: Option<String>| {
            let backward = backward.map_or(String::new(), |b| format!(", {b} backward"));
            // Writing to a string does not fail.
            let _ = writeln!(out, "  {name:<13}{forward} forward{backward}");
        };
        line("operators", t.forward_nodes.to_string(), t.backward_nodes.map(|n| n.to_string()));
        line("FLOPs", count(t.forward_flops), t.backward_flops.map(count));
        if let Some(kept) = t.activation_bytes {
            out += &format!("  {:<13}{} kept from forward to backward\n", "activations", bytes(kept as u64));
        }
        out + &format!("  {:<13}{} ({})\n", "parameters", count(t.parameters as f64), bytes(t.parameter_bytes as u64))
    }

    /// `#12`, or `#12.1` for a result other than the first, or the name of a value that comes from outside.
    fn operand(&self, v: ValueId) -> String {
        let value = self.graph.value(v);
        match value.kind {
            ValueKind::Result { node, index: 0 } => node.to_string(),
            ValueKind::Result { node, index } => format!("{node}.{index}"),
            _ => value.name.clone(),
        }
    }

    fn shown(&self, backward: bool) -> Shown<'_> {
        let graph = &self.graph;
        let typed = |v: ValueId| Typed { name: &graph.value(v).name, ty: graph.ty(v) };
        let nodes = graph.nodes.iter().enumerate().filter(|(_, n)| backward || n.phase == Phase::Forward);
        Shown {
            name: &graph.name,
            totals: self.totals,
            nodes: nodes
                .map(|(id, node)| {
                    let cost = node.op.cost(&graph.types(&node.inputs), &graph.types(&node.outputs));
                    ShownNode {
                        id,
                        name: &node.name,
                        op: node.op.name(),
                        phase: node.phase,
                        origin: node.origin.map(|o| o.0),
                        reads: node.inputs.iter().map(|v| graph.value(*v).name.as_str()).collect(),
                        results: node.outputs.iter().map(|v| typed(*v)).collect(),
                        flops: cost.flops,
                        bytes: cost.bytes,
                    }
                })
                .collect(),
            inputs: self.inputs(backward).map(typed).collect(),
            parameters: graph.parameters().map(typed).collect(),
            buffers: graph.buffers().map(typed).collect(),
            outputs: graph.outputs.iter().map(|(name, v)| (name.as_str(), graph.value(*v).name.as_str())).collect(),
        }
    }
}

/// The listing as one JSON object. Values are named; figures are of one micro-batch, in operations and bytes.
#[derive(Serialize)]
struct Shown<'a> {
    name: &'a str,
    totals: Totals,
    nodes: Vec<ShownNode<'a>>,
    inputs: Vec<Typed<'a>>,
    parameters: Vec<Typed<'a>>,
    buffers: Vec<Typed<'a>>,
    outputs: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct ShownNode<'a> {
    id: usize,
    name: &'a str,
    op: &'a str,
    phase: Phase,
    origin: Option<u32>,
    reads: Vec<&'a str>,
    results: Vec<Typed<'a>>,
    flops: f64,
    bytes: f64,
}

#[derive(Serialize)]
struct Typed<'a> {
    name: &'a str,
    #[serde(flatten)]
    ty: &'a TensorType,
}

/// A number, a text in as many lines as it takes, and a figure at the right margin of the last one.
fn entry(number: usize, text: &str, figure: &str) -> String {
    let text_width = width() - 17;
    let lines = wrap(text, text_width);
    let (mut out, last) = (String::new(), lines.len() - 1);
    for (i, line) in lines.iter().enumerate() {
        let number = if i == 0 { number.to_string() } else { String::new() };
        let figure = if i == last { figure } else { "" };
        let line = format!("{number:>5}  {line:<text_width$}  {figure:>8}");
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

fn flops(graph: &Graph, node: &Node) -> f64 {
    node.op.cost(&graph.types(&node.inputs), &graph.types(&node.outputs)).flops
}

/// `f32[2, 64], 2 x f32[2]`.
fn types(graph: &Graph, values: &[ValueId]) -> String {
    let types: Vec<&TensorType> = graph.types(values);
    let shown = types.chunk_by(|a, b| a == b).map(|same| match same {
        [one] => one.to_string(),
        several => format!("{} x {}", several.len(), several[0]),
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// Bytes of the forward results that stay until backward reads them. A view keeps what it views, once.
fn kept(graph: &Graph) -> BTreeMap<ValueId, usize> {
    let mut kept = BTreeMap::new();
    for node in graph.nodes.iter().filter(|n| n.phase != Phase::Forward) {
        for v in &node.inputs {
            let mut v = *v;
            while let Some(producer) = graph.producer(v).map(|p| graph.node(p)) {
                if producer.phase != Phase::Forward {
                    break;
                }
                match producer.inputs.as_slice() {
                    [viewed] if producer.op.view().is_some() => v = *viewed,
                    _ => {
                        kept.insert(v, graph.ty(v).bytes());
                        break;
                    }
                }
            }
        }
    }
    kept
}
