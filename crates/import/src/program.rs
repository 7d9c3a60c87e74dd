//! The translation of an archive into a graph.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Seek, Write};

use fusionllm_graph::{DType, Graph, HostTensor, Op, TensorType, ValueId};

use crate::ImportError;
use crate::analysis::{
    argument_names, live, module, node_count, output_name, outputs, parts, place, short, unsupported_operators,
    updated_buffers,
};
use crate::archive::{Archive, StoredTensor, plain_size};
use crate::aten;
use crate::call::{Call, Item, Names, Output};
use crate::context::{Context, Evaluate, TensorId};
use crate::decompositions::decomposes;
use crate::error::TranslationError;
use crate::loss::{CORRECT, add_correct_output, targets};
use crate::prune::pruned;
use crate::scalars::{LossChoice, output_keys};
use crate::schema::{self, Argument, GraphArgument, InputSpec, Node, OutputSpec, Size, SizeExpression, SymInt};

mod outputs;
mod stored;

/// Differences between the graph and the model as it was exported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// The batch size, for a model with a dynamic batch dimension. By default that of the export.
    pub batch_size: Option<usize>,
    /// The element type of the model's single-precision tensors.
    pub float_type: FloatType,
    /// The position or the name of the output that is the loss. By default it is one that parameters have a gradient of.
    pub loss: Option<String>,
    /// Whether the graph has the other results of the model as outputs, too. Training reads none of them.
    pub results: bool,
}

/// The element type that replaces single precision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FloatType {
    /// `f32`, as exported.
    #[default]
    Single,
    /// `f64`, to compare with a reference in double precision.
    Double,
}

/// A model, translated into a graph.
#[derive(Debug)]
pub struct Imported {
    /// The graph. Parameters and buffers have their names in the module's `state_dict`. The loss is the output `loss`.
    /// Without one that can be trained, the outputs have the names of their nodes.
    pub graph: Graph,
    loss: LossChoice,
    /// The archive's name in messages.
    archive: String,
    /// Tied parameters share one tensor of the graph: further names, and the name in the graph.
    pub tied: BTreeMap<String, String>,
    /// The rest of the module's `state_dict`. It does not change in training, because it is constant or nothing reads
    /// it, and it is no value of the graph.
    pub kept: BTreeMap<String, HostTensor>,
    /// By name in the graph: the tensor in the archive, and its element type in the graph.
    tensors: BTreeMap<String, (StoredTensor, DType)>,
}

impl Imported {
    /// A sentence about the output that is the loss, if the model returns several single numbers.
    pub fn choice_of_loss(&self) -> Option<String> {
        self.loss.sentence().map(|text| format!("{}: {text}", self.archive))
    }

    /// The error for a model that cannot be trained, because it returns no number that parameters have a gradient of.
    pub fn without_loss(&self) -> Option<ImportError> {
        let reason = self.loss.refusal()?;
        Some(ImportError::Loss { archive: self.archive.clone(), reason, others: String::new() })
    }
}

/// The first pass finds the buffers that are updated. The second pass takes only the other buffers for constants.
const MAX_PASSES: usize = 2;

/// The key in [`Graph::metadata`] of the input that has the targets of the loss.
pub const TARGETS_KEY: &str = "targets";

impl Archive {
    /// Translates the model into a graph. `evaluate` computes values that depend on constants alone.
    ///
    /// # Errors
    ///
    /// All unsupported operators at once; a node that cannot be translated, with its place in the model; damage.
    pub fn import(&mut self, options: ImportOptions, evaluate: Evaluate<'_>) -> Result<Imported, ImportError> {
        let program = std::mem::take(&mut self.program.graph_module);
        let result = Import::run(self, &program, options, evaluate);
        self.program.graph_module = program;
        result
    }

    /// The content of a parameter or buffer, converted to its type in the graph.
    ///
    /// # Errors
    ///
    /// The model has no such tensor, or the file is damaged or can no longer be read.
    pub fn load(&mut self, imported: &Imported, name: &str) -> Result<HostTensor, ImportError> {
        let missing = |reason: &str| ImportError::Model { archive: self.name.clone(), reason: reason.into() };
        let found = imported.tensors.get(name).cloned();
        let (stored, dtype) = found.ok_or_else(|| missing(&format!("the model has no tensor {name:?}")))?;
        let tensor = self.tensor(&stored)?;
        tensor.cast(dtype).map_err(|source| ImportError::Graph { archive: self.name.clone(), source })
    }

    /// Writes the archive without the content of the model's parameters, trained or not.
    ///
    /// # Errors
    ///
    /// The archive is damaged, or the result cannot be written.
    pub fn write_without_parameters(&mut self, imported: &Imported, to: impl Write + Seek) -> Result<(), ImportError> {
        let graph = &imported.graph;
        let parameters: BTreeSet<&str> =
            graph.parameters().chain(graph.frozen()).map(|v| graph.value(v).name.as_str()).collect();
        let is_parameter = |name: &str| {
            parameters.contains(name) || imported.tied.get(name).is_some_and(|own| parameters.contains(own.as_str()))
        };
        self.write_without(is_parameter, to)
    }
}

struct Import<'a> {
    archive: &'a mut Archive,
    program: &'a schema::GraphModule,
    cx: Context<'a>,
    /// The sizes of dynamic dimensions, by symbol.
    symbols: HashMap<String, i64>,
    tensors: BTreeMap<String, (StoredTensor, DType)>,
    tied: BTreeMap<String, String>,
    /// Buffers that the forward pass updates: their tensor, and their value before the update.
    state: BTreeMap<String, (TensorId, ValueId)>,
    /// Buffers that are constants, because they are never updated.
    constants: BTreeMap<String, TensorId>,
}

impl Import<'_> {
    fn run(
        archive: &mut Archive,
        program: &schema::GraphModule,
        options: ImportOptions,
        evaluate: Evaluate<'_>,
    ) -> Result<Imported, ImportError> {
        let name = archive.name.clone();
        let stem = std::path::Path::new(&name).file_stem().map_or("model".into(), |s| s.to_string_lossy().into_owned());
        let mut operators = unsupported_operators(&program.graph, &program.signature);
        if !operators.is_empty() {
            let again = archive.is_decomposed();
            operators.iter_mut().for_each(|operator| operator.decomposes &= !again);
            return Err(ImportError::UnsupportedOperators { archive: name, operators });
        }
        let single = match options.float_type {
            FloatType::Single => DType::F32,
            FloatType::Double => DType::F64,
        };
        let mut updated = updated_buffers(&program.signature);
        for _ in 0..MAX_PASSES {
            let mut import = Import {
                archive: &mut *archive,
                program,
                cx: Context::new(&stem, single, node_count(&program.graph), evaluate),
                symbols: HashMap::new(),
                tensors: BTreeMap::new(),
                tied: BTreeMap::new(),
                state: BTreeMap::new(),
                constants: BTreeMap::new(),
            };
            import.cx.torch = import.archive.torch_release().unwrap_or(import.cx.torch);
            let mut names = Names::new();
            import.bind_symbols(options.batch_size)?;
            import.cx.has_dynamic_sizes = !import.symbols.is_empty();
            let read = import.archive.bytes_read();
            import.inputs(&updated, &mut names)?;
            let graph = &import.program.graph;
            import.nodes(graph, &mut names, &live(graph, &outputs(graph, &import.program.signature)))?;
            let written: Vec<String> = import.written_constants().map(str::to_owned).collect();
            if written.is_empty() {
                return import.finish(&names, &options);
            }
            import.archive.forget_reads_after(read);
            updated.extend(written);
        }
        let reason = "which buffers its forward pass updates depends on their content";
        Err(ImportError::Model { archive: name, reason: reason.into() })
    }

    /// The names of buffers that were taken for constants, and that some node overwrites.
    fn written_constants(&self) -> impl Iterator<Item = &str> {
        self.constants.iter().filter(|(_, tensor)| self.cx.is_written(**tensor)).map(|(name, _)| name.as_str())
    }

    fn model_error(&self, reason: TranslationError) -> ImportError {
        ImportError::Model { archive: self.archive.name.clone(), reason: reason.0 }
    }

    fn graph_error(&self, source: fusionllm_graph::GraphError) -> ImportError {
        ImportError::Graph { archive: self.archive.name.clone(), source }
    }

    /// Determines the size of every symbol in the shapes of the inputs. The first dimension is the batch.
    fn bind_symbols(&mut self, batch_size: Option<usize>) -> Result<(), ImportError> {
        let requested = batch_size.map(|n| i64::try_from(n).unwrap_or(i64::MAX));
        let mut dynamic = false;
        let mut exported = None;
        for spec in &self.program.signature.input_specs {
            let InputSpec::UserInput { arg: Argument::AsTensor(t) } = spec else { continue };
            let Some(meta) = self.program.graph.tensor_values.get(&t.name) else { continue };
            for (d, size) in meta.sizes.iter().enumerate() {
                match size {
                    Size::AsInt(n) if d == 0 => exported = Some(*n),
                    Size::AsInt(_) => {}
                    Size::AsExpr(e) => {
                        dynamic |= d == 0;
                        let wanted = requested.filter(|_| d == 0);
                        self.bind(e, wanted, &t.name).map_err(|r| self.model_error(r))?;
                    }
                }
            }
        }
        match (batch_size, exported.and_then(|n| usize::try_from(n).ok())) {
            (Some(requested), Some(exported)) if !dynamic && exported != requested => {
                Err(ImportError::BatchSize { archive: self.archive.name.clone(), exported, requested })
            }
            _ => Ok(()),
        }
    }

    /// Gives a symbol the wanted size, or else the size of the export.
    fn bind(&mut self, size: &SizeExpression, wanted: Option<i64>, input: &str) -> Result<(), TranslationError> {
        let hint = match size.hint {
            Some(schema::Hint::AsInt(n)) => Some(n),
            _ => None,
        };
        let symbol = &size.expr_str;
        let number = wanted.or(hint).ok_or_else(|| {
            TranslationError(format!("the size {symbol} of input {input:?} is unknown: give the batch size"))
        })?;
        let bound = *self.symbols.entry(symbol.clone()).or_insert(number);
        if bound != number {
            return Err(format!("the size {symbol} of input {input:?} is both {bound} and {number}").into());
        }
        Ok(())
    }

    fn size(&self, size: &Size) -> Result<usize, TranslationError> {
        match size {
            Size::AsExpr(e) => {
                let n = self
                    .symbols
                    .get(&e.expr_str)
                    .ok_or_else(|| TranslationError(format!("the size {} is unknown", e.expr_str)))?;
                Ok(usize::try_from(*n).map_err(|_| format!("{n} is not a size"))?)
            }
            size => Ok(plain_size(size)?),
        }
    }

    fn declared_type(&self, name: &str) -> Result<TensorType, TranslationError> {
        let meta = self.program.graph.tensor_values.get(name);
        let meta = meta.ok_or_else(|| TranslationError(format!("the file does not declare the type of {name:?}")))?;
        let shape = meta.sizes.iter().map(|s| self.size(s)).collect::<Result<Vec<_>, _>>()?;
        Ok(TensorType::new(self.cx.element_type(meta.dtype)?, shape))
    }

    fn node_error(&self, node: &Node, reason: TranslationError) -> ImportError {
        let target = short(&node.target);
        let (_, name, _) = parts(node);
        ImportError::Node {
            archive: self.archive.name.clone(),
            target: target.into(),
            // If a write is wrong, decomposing the operator would only hide that.
            decomposes: !name.ends_with('_') && decomposes(target) && !self.archive.is_decomposed(),
            node: node.outputs.iter().find_map(output_name).unwrap_or("no result").into(),
            place: place(node).into(),
            reason: reason.0,
        }
    }

    /// Translates the live nodes of a graph, in order.
    fn nodes(&mut self, graph: &schema::Graph, names: &mut Names, live: &[bool]) -> Result<(), ImportError> {
        for (node, _) in graph.nodes.iter().zip(live).filter(|(_, live)| **live) {
            self.cx.builder.set_scope(module(node));
            let outs = match node.target.strip_prefix("torch.ops.higher_order.") {
                Some(_) => self.inlined(node, names)?,
                None => self.node(node, graph, names).map_err(|r| self.node_error(node, r))?,
            };
            let call = call(node, graph, names);
            let targets = call.outputs();
            let mut items = Vec::new();
            for (target, out) in targets.into_iter().zip(outs) {
                let Some(target) = target else { continue };
                let item = match out {
                    Output::Value(value) => self.cx.new_result(value).map(Item::Tensor),
                    Output::Alias(tensor) => Ok(Item::Tensor(tensor)),
                    Output::View(tensor, steps) => self.cx.view(tensor, steps).map(Item::Tensor),
                    Output::Detached(tensor) => self.cx.detached(tensor).map(Item::Tensor),
                    Output::Item(item) => Ok(item),
                    Output::Unavailable => continue,
                };
                let item = item.map_err(|r| self.node_error(node, r))?;
                if let Item::Tensor(tensor) = item {
                    self.check_result(graph, target, tensor).map_err(|r| self.node_error(node, r))?;
                }
                items.push((target.to_owned(), item));
            }
            names.extend(items);
        }
        Ok(())
    }

    /// Compares the type of a result with the type in the file, if that has a fixed shape.
    fn check_result(&mut self, graph: &schema::Graph, name: &str, tensor: TensorId) -> Result<(), TranslationError> {
        let Some(meta) = graph.tensor_values.get(name) else { return Ok(()) };
        let value = self.cx.read(tensor)?;
        let ty = self.cx.ty(value).clone();
        let declared: Option<Vec<usize>> = meta.sizes.iter().map(|s| plain_size(s).ok()).collect();
        let dtype = self.cx.element_type(meta.dtype)?;
        match declared {
            Some(shape) if shape != ty.shape || dtype != ty.dtype => {
                Err(format!("its result {name:?} is {ty}, but the file declares {}", TensorType::new(dtype, shape))
                    .into())
            }
            _ => Ok(()),
        }
    }

    fn node(&mut self, node: &Node, graph: &schema::Graph, names: &Names) -> Result<Vec<Output>, TranslationError> {
        let mut call = call(node, graph, names);
        let (entry, in_place) = aten::find(call.library, call.name, call.overload)
            .ok_or_else(|| TranslationError("is not supported".into()))?;
        call.name = entry.name;
        let outs = (entry.translate)(&mut self.cx, &call)?;
        if !in_place {
            return Ok(outs);
        }
        let tensor = call.first_tensor()?;
        // A number to fill with is read before anything is written.
        let read = if entry.name == "fill" { &[] } else { node.inputs.get(1..).unwrap_or_default() };
        let operands = read.iter().flat_map(|input| argument_names(&input.arg));
        for operand in operands.filter_map(|name| names.get(name)) {
            if let Item::Tensor(operand) = operand {
                self.cx.check_overlap(tensor, *operand, aten::works_by_element(entry))?;
            }
        }
        // PyTorch's autograd does not see these.
        let unseen = entry.name.starts_with("logical_");
        let gradients = self.cx.gradients;
        self.cx.gradients &= !unseen;
        let written = self.overwritten(tensor, outs);
        self.cx.gradients = gradients;
        written
    }

    /// Overwrites a tensor with the first result of an operator, for its in-place form.
    fn overwritten(&mut self, tensor: TensorId, outs: Vec<Output>) -> Result<Vec<Output>, TranslationError> {
        match outs.into_iter().next() {
            Some(Output::Value(value)) => self.cx.write(tensor, value)?,
            // A dropout that is off returns its operand.
            Some(Output::Alias(other)) if other == tensor => {}
            Some(Output::Alias(other)) => {
                let value = self.cx.read(other)?;
                self.cx.write(tensor, value)?;
            }
            // `unsqueeze_`, `detach_` and their kin change how the tensor sees its memory, and write nothing.
            Some(seen @ (Output::View(..) | Output::Detached(_))) => return Ok(vec![seen]),
            _ => return Err("it has no in-place form".into()),
        }
        Ok(vec![Output::Alias(tensor)])
    }

    /// Translates a call of a subgraph: its nodes replace the call.
    fn inlined(&mut self, node: &Node, names: &Names) -> Result<Vec<Output>, ImportError> {
        let refused = |import: &Self, reason: &str| import.node_error(node, reason.into());
        let place = node.inputs.iter().position(|i| matches!(i.arg, Argument::AsGraph(_)));
        let Some((place, Argument::AsGraph(GraphArgument { graph }))) = place.map(|p| (p, &node.inputs[p].arg)) else {
            return Err(refused(self, "it has no subgraph"));
        };
        let gradients = match node.inputs.first().map(|i| &i.arg) {
            Some(Argument::AsBool(enabled)) if node.target.ends_with("wrap_with_set_grad_enabled") => *enabled,
            _ if node.target.ends_with("wrap_with_set_grad_enabled") => {
                return Err(refused(self, "it does not say whether gradients are on"));
            }
            _ => self.cx.gradients,
        };
        let given = &node.inputs[place + 1..];
        if given.len() < graph.inputs.len() {
            return Err(refused(self, "its subgraph takes more operands than the call has"));
        }
        let mut inner = Names::new();
        for (parameter, given) in graph.inputs.iter().zip(given) {
            let Some(parameter) = output_name(parameter) else { continue };
            let item = match &given.arg {
                Argument::AsTensor(t) => names.get(&t.name).cloned(),
                Argument::AsInt(n) | Argument::AsSymInt(SymInt::AsInt(n)) => Some(Item::Int(*n)),
                Argument::AsSymInt(SymInt::AsName(n)) => names.get(n).cloned(),
                Argument::AsBool(b) => Some(Item::Bool(*b)),
                Argument::AsFloat(x) => Some(Item::Float(x.0)),
                _ => Some(Item::Unused),
            };
            let item = item.ok_or_else(|| refused(self, "it reads a value that no earlier node computed"))?;
            inner.insert(parameter.to_owned(), item);
        }
        let results: Vec<&str> = graph.outputs.iter().flat_map(argument_names).collect();
        let outside = std::mem::replace(&mut self.cx.gradients, gradients);
        self.nodes(graph, &mut inner, &live(graph, &results))?;
        self.cx.gradients = outside;
        let missing = || refused(self, "its subgraph returns a value that no node computed");
        results.into_iter().map(|result| inner.get(result).cloned().map(Output::Item).ok_or_else(missing)).collect()
    }

    /// Completes the graph. `loss` is the output that is wanted as the loss.
    fn finish(mut self, names: &Names, options: &ImportOptions) -> Result<Imported, ImportError> {
        self.cx.builder.set_scope("");
        let mut results = Vec::new();
        let mut position = 0;
        for spec in &self.program.signature.output_specs {
            match spec {
                OutputSpec::UserOutput { arg: Argument::AsTensor(t) } | OutputSpec::LossOutput { arg: t } => {
                    if let Some(Item::Tensor(tensor)) = names.get(&t.name) {
                        let value = self.cx.read(*tensor).map_err(|r| self.model_error(r))?;
                        results.push((position, t.name.clone(), value));
                    }
                    position += 1;
                }
                OutputSpec::UserOutput { .. } => position += 1,
                OutputSpec::BufferMutation { arg, buffer_name } => {
                    let (Some((buffer, _)), Some(Item::Tensor(tensor))) =
                        (self.state.get(buffer_name), names.get(&arg.name))
                    else {
                        continue;
                    };
                    let written = self.cx.read(*tensor).and_then(|v| self.cx.write(*buffer, v));
                    written.map_err(|r| self.model_error(r))?;
                }
                OutputSpec::ParameterMutation(_) => {
                    return Err(
                        self.model_error("its forward pass overwrites a parameter, which is not supported".into())
                    );
                }
                _ => {}
            }
        }
        let (loss, id) = self.choose_loss(&results, options.loss.as_deref())?;
        if let Some(id) = id {
            self.cx.builder.output("loss", id).map_err(|e| self.graph_error(e))?;
        }
        if id.is_none() || options.results {
            let keys = output_keys(self.program);
            for (position, node, value) in results {
                let name = keys.get(position).cloned().flatten().filter(|_| options.results).unwrap_or(node);
                // The name of an output that is added below, or that is there.
                if id.is_some() && (name == CORRECT || self.cx.builder.graph().outputs.contains_key(&name)) {
                    continue;
                }
                let id = self.cx.materialize(value).map_err(|r| self.model_error(r))?;
                self.cx.builder.output(&name, id).map_err(|e| self.graph_error(e))?;
            }
        }
        add_correct_output(&mut self.cx.builder).map_err(|e| self.graph_error(e))?;
        for (tensor, id) in self.state.clone().into_values() {
            let value = self.cx.read(tensor).and_then(|v| self.cx.materialize(v)).map_err(|r| self.model_error(r))?;
            let value = undetached(self.cx.builder.graph(), value);
            if value != id {
                self.cx.builder.update_buffer(id, value).map_err(|e| self.graph_error(e))?;
            }
        }
        self.cx.builder.metadata("source", "torch.export".into());
        if let Some(version) = self.archive.torch_version() {
            self.cx.builder.metadata("torch_version", version.into());
        }
        let kept = self.kept()?;
        let graph = self.cx.builder.finish();
        let mut graph = graph
            .and_then(|g| pruned(&g))
            .map_err(|source| ImportError::Graph { archive: self.archive.name.clone(), source })?;
        if let Some((input, ignore_index)) = targets(&graph) {
            graph
                .metadata
                .insert(TARGETS_KEY.into(), serde_json::json!({"input": input, "ignore_index": ignore_index}));
        }
        let archive = self.archive.name.clone();
        Ok(Imported { graph, loss, archive, tied: self.tied, kept, tensors: self.tensors })
    }

    /// The tensors of the module's `state_dict` that are no values of the graph.
    fn kept(&mut self) -> Result<BTreeMap<String, HostTensor>, ImportError> {
        let is_kept = |name: &str| !self.tensors.contains_key(name) && !self.tied.contains_key(name);
        let weights: Vec<_> =
            self.archive.weights.iter().filter(|(n, _)| is_kept(n)).map(|(n, s)| (n.clone(), s.clone())).collect();
        let mut kept = BTreeMap::new();
        for (name, stored) in weights {
            let folded = self.constants.get(&name).copied();
            let folded = folded.map(|tensor| self.cx.read(tensor)).transpose().map_err(|r| self.model_error(r))?;
            let tensor = match folded.and_then(|value| self.cx.constant_tensor(value)) {
                Some(tensor) => tensor.clone(),
                None => self.archive.tensor(&stored)?,
            };
            kept.insert(name, tensor);
        }
        Ok(kept)
    }
}

/// The same numbers as a value, from the operator that made them. The new value of a buffer need not be detached.
fn undetached(graph: &Graph, value: ValueId) -> ValueId {
    match graph.producer(value).map(|node| graph.node(node)) {
        Some(node) if matches!(node.op, Op::Detach(_)) => node.inputs[0],
        _ => value,
    }
}

fn call<'b>(node: &'b Node, graph: &'b schema::Graph, names: &'b Names) -> Call<'b> {
    let (library, name, overload) = parts(node);
    Call { node, library, name, overload, names, metas: &graph.tensor_values }
}
