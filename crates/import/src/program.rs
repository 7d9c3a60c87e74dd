//! From an archive to a graph.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use fusionllm_graph::ops::Compare;
use fusionllm_graph::{DType, Graph, HostTensor, Init, Op, TensorType, ValueId, ValueKind};

use crate::ImportError;
use crate::archive::{Archive, Stored, plain_size};
use crate::aten;
use crate::call::{Call, Item, Names, Out};
use crate::context::{Context, Evaluate, Val};
use crate::error::{Missing, Refused};
use crate::prune::pruned;
use crate::schema::{self, Argument, GraphArgument, InputSpec, Node, OutputSpec, Size, SymInt};

/// What may differ from how the model was exported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Samples at once, for a model with a dynamic batch dimension; left out, as many as it was exported with.
    pub samples: Option<usize>,
    /// Double precision wherever the model has single.
    pub double: bool,
}

/// A model as a graph.
#[derive(Debug)]
pub struct Imported {
    /// The graph. Parameters and buffers bear the names of the module's `state_dict`; its loss is the output `loss`.
    pub graph: Graph,
    /// Other names of parameters, and the name in the graph: tied ones share one tensor.
    pub tied: BTreeMap<String, String>,
    tensors: BTreeMap<String, Stored>,
}

/// The key of [`Graph::metadata`] under which an imported graph says which input holds the targets that its loss is the mean of.
pub const TARGETS: &str = "targets";

impl Archive {
    /// The model as a graph. `evaluate` computes what depends on constants alone.
    ///
    /// # Errors
    ///
    /// Operators that are not known here, all of them at once; anything that cannot be translated, by its place in the model; damage.
    pub fn import(&mut self, options: Options, evaluate: Evaluate<'_>) -> Result<Imported, ImportError> {
        let program = std::mem::take(&mut self.program.graph_module);
        let result = Import::run(self, &program, options, evaluate);
        self.program.graph_module = program;
        result
    }

    /// The content of a parameter or buffer, in the type it has in the graph.
    ///
    /// # Errors
    ///
    /// The file can no longer be read or is damaged, or the model has no such tensor.
    pub fn load(&mut self, imported: &Imported, name: &str) -> Result<HostTensor, ImportError> {
        let missing = |reason: &str| ImportError::Model { archive: self.name.clone(), reason: reason.into() };
        let stored = imported.tensors.get(name).ok_or_else(|| missing(&format!("it has no tensor {name:?}")))?.clone();
        let value = imported.graph.find(name).ok_or_else(|| missing(&format!("its graph has no value {name:?}")))?;
        let dtype = imported.graph.ty(value).dtype;
        let tensor = self.tensor(&stored)?;
        tensor.cast(dtype).map_err(|source| ImportError::Graph { archive: self.name.clone(), source })
    }

    /// Names of the tensors that the module's `state_dict` has.
    pub fn state_dict(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// The tensor of a name in the module's `state_dict`, as it was saved.
    ///
    /// # Errors
    ///
    /// There is none, or the file can no longer be read or is damaged.
    pub fn saved(&mut self, name: &str) -> Result<HostTensor, ImportError> {
        match self.weights.get(name).cloned() {
            Some(stored) => self.tensor(&stored),
            None => Err(ImportError::Model {
                archive: self.name.clone(),
                reason: format!("its state_dict has no {name:?}"),
            }),
        }
    }
}

struct Import<'a> {
    archive: &'a mut Archive,
    program: &'a schema::GraphModule,
    cx: Context<'a>,
    /// Sizes by symbol.
    symbols: HashMap<String, i64>,
    tensors: BTreeMap<String, Stored>,
    tied: BTreeMap<String, String>,
    /// Buffers that forward changes: their tensor and the value they come in as.
    state: BTreeMap<String, (usize, ValueId)>,
}

impl<'a> Import<'a> {
    fn run(
        archive: &'a mut Archive,
        program: &'a schema::GraphModule,
        options: Options,
        evaluate: Evaluate<'a>,
    ) -> Result<Imported, ImportError> {
        let name = archive.name.clone();
        let stem = std::path::Path::new(&name).file_stem().map_or("model".into(), |s| s.to_string_lossy().into_owned());
        let missing = missing(&program.graph, &program.signature);
        if !missing.is_empty() {
            return Err(ImportError::Missing { archive: name, missing });
        }
        let single = if options.double { DType::F64 } else { DType::F32 };
        let mut import = Self {
            archive,
            program,
            cx: Context::new(&stem, single, evaluate),
            symbols: HashMap::new(),
            tensors: BTreeMap::new(),
            tied: BTreeMap::new(),
            state: BTreeMap::new(),
        };
        let mut names = Names::new();
        import.bind(options.samples).map_err(|r| import.model(r))?;
        import.inputs(&mut names)?;
        let graph = &import.program.graph;
        import.nodes(graph, &mut names, &live(graph, &outputs(graph, &import.program.signature)))?;
        import.finish(&names)
    }

    fn model(&self, reason: Refused) -> ImportError {
        ImportError::Model { archive: self.archive.name.clone(), reason: reason.0 }
    }

    fn graph_error(&self, source: fusionllm_graph::GraphError) -> ImportError {
        ImportError::Graph { archive: self.archive.name.clone(), source }
    }

    /// Gives every symbol of the inputs' shapes its number: the first dimension's is the batch.
    fn bind(&mut self, samples: Option<usize>) -> Result<(), Refused> {
        let mut dynamic = false;
        let mut fixed = None;
        for spec in &self.program.signature.input_specs {
            let InputSpec::UserInput { arg: Argument::AsTensor(t) } = spec else { continue };
            let Some(meta) = self.program.graph.tensor_values.get(&t.name) else { continue };
            for (d, size) in meta.sizes.iter().enumerate() {
                match size {
                    Size::AsInt(n) if d == 0 => fixed = Some(*n),
                    Size::AsInt(_) => {}
                    Size::AsExpr(e) => {
                        let hint = match e.hint {
                            Some(schema::Hint::AsInt(n)) => Some(n),
                            _ => None,
                        };
                        let wanted = samples.filter(|_| d == 0).map(|n| n as i64);
                        dynamic |= d == 0;
                        let number = wanted.or(hint).ok_or_else(|| {
                            Refused(format!(
                                "the size {} of input {:?} is not known: give the number of samples",
                                e.expr_str, t.name
                            ))
                        })?;
                        let bound = *self.symbols.entry(e.expr_str.clone()).or_insert(number);
                        if bound != number {
                            return Err(format!(
                                "the size {} of input {:?} would have to be {bound} and {number}",
                                e.expr_str, t.name
                            )
                            .into());
                        }
                    }
                }
            }
        }
        match (samples, fixed) {
            (Some(n), Some(exported)) if !dynamic && exported != n as i64 => Err(format!(
                "it was exported for {exported} samples at once, and {n} are asked for\n  hint: set train.micro_batch = {exported}, or export it with a dynamic batch dimension"
            )
            .into()),
            _ => Ok(()),
        }
    }

    fn size(&self, size: &Size) -> Result<usize, Refused> {
        match size {
            Size::AsExpr(e) => {
                let n = self
                    .symbols
                    .get(&e.expr_str)
                    .ok_or_else(|| Refused(format!("the size {} is not known", e.expr_str)))?;
                Ok(usize::try_from(*n).map_err(|_| format!("{n} is no size"))?)
            }
            size => Ok(plain_size(size)?),
        }
    }

    fn declared(&self, name: &str) -> Result<TensorType, Refused> {
        let meta = self.program.graph.tensor_values.get(name);
        let meta = meta.ok_or_else(|| Refused(format!("the file does not describe {name:?}")))?;
        let shape = meta.sizes.iter().map(|s| self.size(s)).collect::<Result<Vec<_>, _>>()?;
        Ok(TensorType::new(self.cx.element_type(meta.dtype)?, shape))
    }

    /// What comes in: batches, parameters, buffers and constants.
    fn inputs(&mut self, names: &mut Names) -> Result<(), ImportError> {
        let changed = changed_buffers(self.program);
        let mut owners: BTreeMap<Stored, String> = BTreeMap::new();
        for spec in &self.program.signature.input_specs {
            let (name, item) = match spec {
                InputSpec::UserInput { arg: Argument::AsTensor(t) } => {
                    let ty = self.declared(&t.name).map_err(|r| self.model(r))?;
                    let id = self.cx.builder.input(&t.name, ty.dtype, ty.shape).map_err(|e| self.graph_error(e))?;
                    (&t.name, Item::Tensor(self.cx.fresh(Val::Node(id))))
                }
                InputSpec::UserInput { arg: Argument::AsSymInt(SymInt::AsName(n)) } => {
                    return Err(self.model(format!("its input {n:?} is a number, not a tensor").into()));
                }
                InputSpec::Parameter { arg, parameter_name } => {
                    (&arg.name, Item::Tensor(self.parameter(parameter_name, &mut owners)?))
                }
                InputSpec::Buffer { arg, buffer_name } => {
                    (&arg.name, Item::Tensor(self.buffer(buffer_name, changed.contains(&arg.name))?))
                }
                InputSpec::TensorConstant { arg, tensor_constant_name } => {
                    (&arg.name, Item::Tensor(self.buffer(tensor_constant_name, false)?))
                }
                InputSpec::ConstantInput { name } => (name, Item::Nothing),
                _ => continue,
            };
            names.insert(name.clone(), item);
        }
        Ok(())
    }

    fn stored(&self, name: &str) -> Result<Stored, ImportError> {
        let found = self.archive.weights.get(name).or_else(|| self.archive.constants.get(name));
        found.cloned().ok_or_else(|| self.model(format!("the archive does not hold the tensor {name:?}").into()))
    }

    fn type_of(&self, stored: &Stored) -> Result<TensorType, ImportError> {
        let ty = stored.ty().map_err(|r| self.archive.damaged(&stored.member, r))?;
        let dtype = if ty.dtype == DType::F32 { self.cx.single } else { ty.dtype };
        Ok(TensorType::new(dtype, ty.shape))
    }

    fn parameter(&mut self, name: &str, owners: &mut BTreeMap<Stored, String>) -> Result<usize, ImportError> {
        let stored = self.stored(name)?;
        if let Some(owner) = owners.get(&stored) {
            self.tied.insert(name.into(), owner.clone());
            let id =
                self.cx.builder.graph().find(owner).ok_or_else(|| self.model("a tied parameter is lost".into()))?;
            return Ok(self.cx.fresh(Val::Node(id)));
        }
        if let Some((_, owner)) = owners.iter().find(|(s, _)| s.member == stored.member) {
            return Err(self.model(format!("the parameters {owner:?} and {name:?} share memory in part or in another form, which is not supported").into()));
        }
        let ty = self.type_of(&stored)?;
        let trained = ty.dtype.is_float() && stored.requires_grad;
        let unset = Init::Constant(0.0);
        let id = match trained {
            true => self.cx.builder.parameter(name, ty.dtype, ty.shape, unset),
            // Frozen: there, but never changed.
            false => self.cx.builder.buffer(name, ty.dtype, ty.shape, unset),
        };
        let id = id.map_err(|e| self.graph_error(e))?;
        self.tensors.insert(name.into(), stored.clone());
        owners.insert(stored, name.into());
        Ok(self.cx.fresh(Val::Node(id)))
    }

    /// State that forward changes comes in; anything else is known now.
    fn buffer(&mut self, name: &str, changed: bool) -> Result<usize, ImportError> {
        let stored = self.stored(name)?;
        let ty = self.type_of(&stored)?;
        if !changed && ty.bytes() <= crate::context::LARGEST_CONSTANT {
            let tensor = self.archive.tensor(&stored)?.cast(ty.dtype).map_err(|e| self.graph_error(e))?;
            let value = self.cx.constant(tensor);
            return Ok(self.cx.fresh(value));
        }
        let id = self.cx.builder.buffer(name, ty.dtype, ty.shape, Init::Constant(0.0));
        let id = id.map_err(|e| self.graph_error(e))?;
        self.tensors.insert(name.into(), stored);
        let tensor = self.cx.fresh(Val::Node(id));
        if changed {
            self.state.insert(name.into(), (tensor, id));
        }
        Ok(tensor)
    }

    fn at(&self, node: &Node, reason: Refused) -> ImportError {
        ImportError::Node {
            archive: self.archive.name.clone(),
            target: short(&node.target).into(),
            node: node.outputs.iter().find_map(output_name).unwrap_or("no result").into(),
            at: place(node).into(),
            reason: reason.0,
        }
    }

    /// Translates the nodes of a graph that are needed, in order.
    fn nodes(&mut self, graph: &schema::Graph, names: &mut Names, live: &[bool]) -> Result<(), ImportError> {
        for (node, _) in graph.nodes.iter().zip(live).filter(|(_, live)| **live) {
            self.cx.builder.set_scope(module(node));
            let outs = match node.target.strip_prefix("torch.ops.higher_order.") {
                Some(_) => self.inlined(node, names)?,
                None => self.node(node, graph, names).map_err(|r| self.at(node, r))?,
            };
            let call = call(node, graph, names);
            let targets = call.outputs();
            let mut items = Vec::new();
            for (target, out) in targets.into_iter().zip(outs) {
                let Some(target) = target else { continue };
                let item = match out {
                    Out::Value(value) => Item::Tensor(self.cx.fresh(value)),
                    Out::Same(tensor) => Item::Tensor(tensor),
                    Out::View(tensor, ops) => Item::Tensor(self.cx.view(tensor, ops).map_err(|r| self.at(node, r))?),
                    Out::Item(item) => item,
                    Out::Nothing => continue,
                };
                if let Item::Tensor(tensor) = item {
                    self.check(graph, target, tensor).map_err(|r| self.at(node, r))?;
                }
                items.push((target.to_owned(), item));
            }
            names.extend(items);
        }
        Ok(())
    }

    /// Holds a result against what the file says of it, where that is a fixed shape.
    fn check(&mut self, graph: &schema::Graph, name: &str, tensor: usize) -> Result<(), Refused> {
        let Some(meta) = graph.tensor_values.get(name) else { return Ok(()) };
        let value = self.cx.read(tensor)?;
        let ty = self.cx.ty(value).clone();
        let declared: Option<Vec<usize>> = meta.sizes.iter().map(|s| plain_size(s).ok()).collect();
        let dtype = self.cx.element_type(meta.dtype)?;
        match declared {
            Some(shape) if shape != ty.shape || dtype != ty.dtype => {
                Err(format!("its result {name:?} is {ty}, but the file says {}", TensorType::new(dtype, shape)).into())
            }
            _ => Ok(()),
        }
    }

    fn node(&mut self, node: &Node, graph: &schema::Graph, names: &Names) -> Result<Vec<Out>, Refused> {
        let mut call = call(node, graph, names);
        let (entry, in_place) =
            aten::find(call.library, call.name, call.overload).ok_or_else(|| Refused("is not supported".into()))?;
        call.name = entry.name;
        let outs = (entry.translate)(&mut self.cx, &call)?;
        if !in_place {
            return Ok(outs);
        }
        let tensor = call.first_tensor()?;
        match outs.into_iter().next() {
            Some(Out::Value(value)) => self.cx.write(tensor, value)?,
            Some(Out::Same(other)) => {
                let value = self.cx.read(other)?;
                self.cx.write(tensor, value)?;
            }
            _ => return Err("it cannot be done in place".into()),
        }
        Ok(vec![Out::Same(tensor)])
    }

    /// A call of a graph in the graph: its nodes stand in its place.
    fn inlined(&mut self, node: &Node, names: &Names) -> Result<Vec<Out>, ImportError> {
        let refused = |import: &Self, reason: &str| import.at(node, reason.into());
        let place = node.inputs.iter().position(|i| matches!(i.arg, Argument::AsGraph(_)));
        let Some((place, Argument::AsGraph(GraphArgument { graph }))) = place.map(|p| (p, &node.inputs[p].arg)) else {
            return Err(refused(self, "it has no graph"));
        };
        let gradients = !(node.target.ends_with("wrap_with_set_grad_enabled")
            && matches!(node.inputs.first().map(|i| &i.arg), Some(Argument::AsBool(false))));
        let given = &node.inputs[place + 1..];
        if given.len() < graph.inputs.len() {
            return Err(refused(self, "its graph takes more operands than it is given"));
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
                _ => Some(Item::Nothing),
            };
            let item = item.ok_or_else(|| refused(self, "it is given what nothing made before"))?;
            inner.insert(parameter.to_owned(), item);
        }
        let results: Vec<&str> = graph.outputs.iter().flat_map(argument_names).collect();
        self.nodes(graph, &mut inner, &live(graph, &results))?;
        let mut outs = Vec::new();
        for result in results {
            outs.push(match inner.get(result) {
                Some(Item::Tensor(tensor)) if gradients => Out::Same(*tensor),
                Some(Item::Tensor(tensor)) => {
                    let value = self.cx.read(*tensor).and_then(|v| self.cx.detach(v)).map_err(|r| self.at(node, r))?;
                    Out::Value(value)
                }
                Some(item) => Out::Item(item.clone()),
                None => return Err(refused(self, "its graph does not make what it gives back")),
            });
        }
        Ok(outs)
    }

    fn finish(mut self, names: &Names) -> Result<Imported, ImportError> {
        self.cx.builder.set_scope("");
        let mut results = Vec::new();
        for spec in &self.program.signature.output_specs {
            match spec {
                OutputSpec::UserOutput { arg: Argument::AsTensor(t) } | OutputSpec::LossOutput { arg: t } => {
                    if let Some(Item::Tensor(tensor)) = names.get(&t.name) {
                        let value = self.cx.read(*tensor).map_err(|r| self.model(r))?;
                        results.push((t.name.clone(), value));
                    }
                }
                OutputSpec::BufferMutation { arg, buffer_name } => {
                    let (Some((buffer, _)), Some(Item::Tensor(tensor))) =
                        (self.state.get(buffer_name), names.get(&arg.name))
                    else {
                        continue;
                    };
                    let written = self.cx.read(*tensor).and_then(|v| self.cx.write(*buffer, v));
                    written.map_err(|r| self.model(r))?;
                }
                OutputSpec::ParameterMutation(_) => {
                    return Err(self.model("its forward overwrites a parameter, which is not supported".into()));
                }
                _ => {}
            }
        }
        let is_loss = |cx: &Context<'_>, v: Val| cx.dtype(v).is_float() && cx.ty(v).numel() == 1;
        if let Some(&(_, loss)) = results.iter().find(|(_, v)| is_loss(&self.cx, *v)) {
            // What else the model gives back nobody asks for in training.
            results = vec![("loss".into(), loss)];
        }
        for (name, value) in results {
            let id = self.cx.lower(value).map_err(|r| self.model(r))?;
            self.cx.builder.output(&name, id).map_err(|e| self.graph_error(e))?;
        }
        self.count_hits().map_err(|e| self.graph_error(e))?;
        for (tensor, id) in self.state.clone().into_values() {
            let value = self.cx.read(tensor).and_then(|v| self.cx.lower(v)).map_err(|r| self.model(r))?;
            if value != id {
                self.cx.builder.update_buffer(id, value).map_err(|e| self.graph_error(e))?;
            }
        }
        self.cx.builder.metadata("source", "torch.export".into());
        if let Some(version) = self.archive.torch_version() {
            self.cx.builder.metadata("torch_version", version.into());
        }
        let graph = self.cx.builder.finish();
        let mut graph = graph
            .and_then(|g| pruned(&g))
            .map_err(|source| ImportError::Graph { archive: self.archive.name.clone(), source })?;
        if let Some((input, ignore_index)) = targets(&graph) {
            graph.metadata.insert(TARGETS.into(), serde_json::json!({"input": input, "ignore_index": ignore_index}));
        }
        Ok(Imported { graph, tied: self.tied, tensors: self.tensors })
    }
}

impl Import<'_> {
    /// Where the loss is one cross-entropy, an output `correct` as classifiers have it: how often the largest logit is the target's.
    fn count_hits(&mut self) -> Result<(), fusionllm_graph::GraphError> {
        let b = &mut self.cx.builder;
        let mut losses = b.graph().nodes.iter().filter(|n| matches!(n.op, Op::CrossEntropy(_)));
        let (Some(node), None) = (losses.next(), losses.next()) else { return Ok(()) };
        let (logits, target) = (node.inputs[0], node.inputs[1]);
        if !b.graph().outputs.contains_key("loss") {
            return Ok(());
        }
        let dtype = b.ty(logits).dtype;
        let best = b.argmax(logits, 1)?;
        let hit = b.op(Compare::Eq, &[best, target])?;
        let hit = b.cast(hit, dtype)?;
        let correct = b.sum(hit, &[0], false)?;
        b.output("correct", correct)
    }
}

/// The input that a graph's cross-entropy compares with, and which of its values do not count.
fn targets(graph: &Graph) -> Option<(String, i64)> {
    let mut losses = graph.nodes.iter().filter_map(|n| match &n.op {
        Op::CrossEntropy(op) => Some((n, op.ignore_index)),
        _ => None,
    });
    let (Some((node, ignore_index)), None) = (losses.next(), losses.next()) else { return None };
    let mut value = node.inputs[1];
    loop {
        match &graph.value(value).kind {
            ValueKind::Input => return Some((graph.value(value).name.clone(), ignore_index)),
            ValueKind::Result { node, .. } => match &graph.node(*node).op {
                Op::Reshape(_) | Op::Permute(_) => value = graph.node(*node).inputs[0],
                _ => return None,
            },
            _ => return None,
        }
    }
}

/// `aten.add.Tensor` of `torch.ops.aten.add.Tensor`.
fn short(target: &str) -> &str {
    target.strip_prefix("torch.ops.").unwrap_or(target)
}

fn call<'b>(node: &'b Node, graph: &'b schema::Graph, names: &'b Names) -> Call<'b> {
    let mut parts = short(&node.target).splitn(3, '.');
    let library = parts.next().unwrap_or_default();
    let name = parts.next().unwrap_or_default();
    let overload = parts.next().unwrap_or_default();
    Call { node, library, name, overload, names, metas: &graph.tensor_values }
}

/// The module a node stands in, by its name in the user's model.
fn module(node: &Node) -> &str {
    let last = node.metadata.nn_module_stack.rsplit(';').next().unwrap_or_default();
    let name = last.split(',').nth(1).unwrap_or_default();
    name.split('@').next().unwrap_or_default()
}

/// ` in layer1.0.conv1, model.py:12`.
fn place(node: &Node) -> String {
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

fn output_name(argument: &Argument) -> Option<&str> {
    argument_names(argument).into_iter().next()
}

/// The names that an argument reads or a result bears.
fn argument_names(argument: &Argument) -> Vec<&str> {
    use schema::{OptionalTensor, SymBool, SymFloat};
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

/// Whether a node changes what another name reads, or may.
fn has_effects(node: &Node) -> bool {
    let name = short(&node.target).split('.').nth(1).unwrap_or_default();
    let in_place = name.ends_with('_') && !name.ends_with("__");
    in_place || name.contains("batch_norm") || node.target.contains("higher_order")
}

/// The results that are asked for: the loss if there is one, and what changes buffers.
fn outputs<'g>(graph: &'g schema::Graph, signature: &'g schema::Signature) -> Vec<&'g str> {
    let named = signature.output_specs.iter().filter_map(|spec| match spec {
        OutputSpec::UserOutput { arg } => output_name(arg),
        OutputSpec::LossOutput { arg } | OutputSpec::BufferMutation { arg, .. } => Some(&arg.name),
        _ => None,
    });
    named.chain(graph.outputs.iter().flat_map(argument_names)).collect()
}

/// Which nodes the results depend on; those with effects always.
fn live(graph: &schema::Graph, results: &[&str]) -> Vec<bool> {
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

/// All operators that are not known here, by name, with the nodes that use them.
fn missing(graph: &schema::Graph, signature: &schema::Signature) -> Vec<Missing> {
    fn collect(graph: &schema::Graph, live: &[bool], found: &mut BTreeMap<String, Vec<String>>) {
        for (node, _) in graph.nodes.iter().zip(live).filter(|(_, live)| **live) {
            let graphs = node.inputs.iter().filter_map(|i| match &i.arg {
                Argument::AsGraph(g) => Some(&g.graph),
                _ => None,
            });
            let higher = node.target.strip_prefix("torch.ops.higher_order.");
            let known = match higher {
                Some(name) => INLINED.contains(&name),
                None => {
                    let mut parts = short(&node.target).splitn(3, '.');
                    let mut part = || parts.next().unwrap_or_default();
                    let (library, name, overload) = (part(), part(), part());
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
    found.into_iter().map(|(target, uses)| Missing { target, uses }).collect()
}

/// Calls of graphs in graphs that mean no more than their nodes in their place.
pub(crate) const INLINED: &[&str] =
    &["wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "invoke_subgraph", "wrap"];

/// Names of the buffers' placeholders that some node overwrites, perhaps through a view.
fn changed_buffers(program: &schema::GraphModule) -> BTreeSet<String> {
    // For every name the buffer whose memory it may show.
    let mut shown: HashMap<&str, &str> = HashMap::new();
    let mut changed = BTreeSet::new();
    for spec in &program.signature.input_specs {
        if let InputSpec::Buffer { arg, .. } = spec {
            shown.insert(&arg.name, &arg.name);
        }
    }
    for node in &program.graph.nodes {
        let name = short(&node.target).split('.').nth(1).unwrap_or_default();
        let reads =
            || node.inputs.iter().flat_map(|i| argument_names(&i.arg).into_iter().map(|n| (i.name.as_str(), n)));
        if name.contains("batch_norm") {
            let statistics = reads().filter(|(argument, _)| argument.starts_with("running_"));
            changed.extend(statistics.filter_map(|(_, n)| shown.get(n).map(|b| b.to_string())));
            continue;
        }
        let first = reads().next().and_then(|(_, n)| shown.get(n).copied());
        let Some(buffer) = first else { continue };
        if name.ends_with('_') && !name.ends_with("__") {
            changed.insert(buffer.to_owned());
        }
        for result in node.outputs.iter().flat_map(argument_names) {
            shown.insert(result, buffer);
        }
    }
    let placeholders: HashMap<&str, &str> = program
        .signature
        .input_specs
        .iter()
        .filter_map(|spec| match spec {
            InputSpec::Buffer { arg, buffer_name } => Some((buffer_name.as_str(), arg.name.as_str())),
            _ => None,
        })
        .collect();
    for spec in &program.signature.output_specs {
        if let OutputSpec::BufferMutation { buffer_name, .. } = spec
            && let Some(placeholder) = placeholders.get(buffer_name.as_str())
        {
            changed.insert((*placeholder).to_owned());
        }
    }
    changed
}
