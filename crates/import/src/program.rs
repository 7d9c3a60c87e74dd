//! The translation of an archive into a graph.

use std::collections::{BTreeMap, HashMap};

use fusionllm_graph::{DType, Graph, HostTensor, Init, TensorType, ValueId};

use crate::ImportError;
use crate::analysis::{
    argument_names, live, module, node_count, output_name, outputs, place, short, unsupported_operators,
    updated_buffers,
};
use crate::archive::{Archive, StoredTensor, plain_size};
use crate::aten;
use crate::call::{Call, Item, Names, Output};
use crate::context::{Context, Evaluate, TensorId, Value};
use crate::error::TranslationError;
use crate::loss::{add_correct_output, targets};
use crate::prune::pruned;
use crate::schema::{self, Argument, GraphArgument, InputSpec, Node, OutputSpec, Size, SizeExpression, SymInt};

/// Differences between the graph and the model as it was exported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// The batch size, for a model with a dynamic batch dimension. By default that of the export.
    pub batch_size: Option<usize>,
    /// The element type of the model's single-precision tensors.
    pub precision: Precision,
}

/// The element type that replaces single precision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Precision {
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
    pub graph: Graph,
    /// Tied parameters share one tensor of the graph: further names, and the name in the graph.
    pub tied: BTreeMap<String, String>,
    /// By name in the graph: the tensor in the archive, and its element type in the graph.
    tensors: BTreeMap<String, (StoredTensor, DType)>,
}

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
}

/// By member of the archive: the first parameter stored there. Others of the same content are tied to it.
type Owners = HashMap<String, Owner>;

struct Owner {
    stored: StoredTensor,
    name: String,
    id: ValueId,
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
}

impl<'a> Import<'a> {
    fn run(
        archive: &'a mut Archive,
        program: &'a schema::GraphModule,
        options: ImportOptions,
        evaluate: Evaluate<'a>,
    ) -> Result<Imported, ImportError> {
        let name = archive.name.clone();
        let stem = std::path::Path::new(&name).file_stem().map_or("model".into(), |s| s.to_string_lossy().into_owned());
        let operators = unsupported_operators(&program.graph, &program.signature);
        if !operators.is_empty() {
            return Err(ImportError::UnsupportedOperators { archive: name, operators });
        }
        let single = match options.precision {
            Precision::Single => DType::F32,
            Precision::Double => DType::F64,
        };
        let mut import = Self {
            archive,
            program,
            cx: Context::new(&stem, single, node_count(&program.graph), evaluate),
            symbols: HashMap::new(),
            tensors: BTreeMap::new(),
            tied: BTreeMap::new(),
            state: BTreeMap::new(),
        };
        import.cx.torch = import.archive.torch_release().unwrap_or(import.cx.torch);
        let mut names = Names::new();
        import.bind_symbols(options.batch_size)?;
        import.inputs(&mut names)?;
        let graph = &import.program.graph;
        import.nodes(graph, &mut names, &live(graph, &outputs(graph, &import.program.signature)))?;
        import.finish(&names)
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
        match (batch_size, exported) {
            (Some(batch), Some(exported)) if !dynamic && Some(exported) != requested => {
                Err(ImportError::BatchSize { archive: self.archive.name.clone(), exported, requested: batch })
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

    /// Adds inputs, parameters, buffers and constants.
    fn inputs(&mut self, names: &mut Names) -> Result<(), ImportError> {
        let updated = updated_buffers(self.program);
        let mut owners = Owners::new();
        for spec in &self.program.signature.input_specs {
            let (name, item) = match spec {
                InputSpec::UserInput { arg: Argument::AsTensor(t) } => {
                    let ty = self.declared_type(&t.name).map_err(|r| self.model_error(r))?;
                    let id = self.cx.builder.input(&t.name, ty.dtype, ty.shape).map_err(|e| self.graph_error(e))?;
                    (&t.name, Item::Tensor(self.cx.new_tensor(Value::Node(id))))
                }
                InputSpec::UserInput { arg: Argument::AsSymInt(SymInt::AsName(n)) } => {
                    return Err(
                        self.model_error(format!("its input {n:?} is a number; only tensors are supported").into())
                    );
                }
                InputSpec::Parameter { arg, parameter_name } => {
                    (&arg.name, Item::Tensor(self.parameter(parameter_name, &mut owners)?))
                }
                InputSpec::Buffer { arg, buffer_name } => {
                    (&arg.name, Item::Tensor(self.buffer(buffer_name, updated.contains(&arg.name))?))
                }
                InputSpec::TensorConstant { arg, tensor_constant_name } => {
                    (&arg.name, Item::Tensor(self.buffer(tensor_constant_name, false)?))
                }
                InputSpec::ConstantInput { name } => (name, Item::Unused),
                _ => continue,
            };
            names.insert(name.clone(), item);
        }
        Ok(())
    }

    fn stored(&self, name: &str) -> Result<StoredTensor, ImportError> {
        let found = self.archive.weights.get(name).or_else(|| self.archive.constants.get(name));
        found.cloned().ok_or_else(|| self.model_error(format!("the archive has no tensor {name:?}").into()))
    }

    fn type_of(&self, stored: &StoredTensor) -> Result<TensorType, ImportError> {
        let ty = stored.ty().map_err(|r| self.archive.damaged(&stored.member, r))?;
        let dtype = if ty.dtype == DType::F32 { self.cx.single } else { ty.dtype };
        Ok(TensorType::new(dtype, ty.shape))
    }

    fn parameter(&mut self, name: &str, owners: &mut Owners) -> Result<TensorId, ImportError> {
        let stored = self.stored(name)?;
        if let Some(first) = owners.get(&stored.member) {
            if first.stored != stored {
                let reason = format!(
                    "the parameters {:?} and {name:?} share only part of their memory, which is not supported",
                    first.name
                );
                return Err(self.model_error(reason.into()));
            }
            self.tied.insert(name.into(), first.name.clone());
            return Ok(self.cx.new_tensor(Value::Node(first.id)));
        }
        let ty = self.type_of(&stored)?;
        let dtype = ty.dtype;
        let trained = dtype.is_float() && stored.requires_grad;
        let unset = Init::Constant(0.0);
        let id = match trained {
            true => self.cx.builder.parameter(name, dtype, ty.shape, unset),
            // A frozen parameter never changes.
            false => self.cx.builder.buffer(name, dtype, ty.shape, unset),
        };
        let id = id.map_err(|e| self.graph_error(e))?;
        self.tensors.insert(name.into(), (stored.clone(), dtype));
        owners.insert(stored.member.clone(), Owner { stored, name: name.into(), id });
        Ok(self.cx.new_tensor(Value::Node(id)))
    }

    /// Adds a buffer. A buffer that is never updated becomes a constant, unless it is too large.
    fn buffer(&mut self, name: &str, updated: bool) -> Result<TensorId, ImportError> {
        let stored = self.stored(name)?;
        let ty = self.type_of(&stored)?;
        if !updated && ty.bytes() <= crate::context::MAX_CONSTANT_BYTES {
            let tensor = self.archive.tensor(&stored)?.cast(ty.dtype).map_err(|e| self.graph_error(e))?;
            let value = self.cx.stored_constant(tensor);
            return Ok(self.cx.new_tensor(value));
        }
        let id = self.cx.builder.buffer(name, ty.dtype, ty.shape, Init::Constant(0.0));
        let id = id.map_err(|e| self.graph_error(e))?;
        self.tensors.insert(name.into(), (stored, ty.dtype));
        let tensor = self.cx.new_tensor(Value::Node(id));
        if updated {
            self.state.insert(name.into(), (tensor, id));
        }
        Ok(tensor)
    }

    fn node_error(&self, node: &Node, reason: TranslationError) -> ImportError {
        ImportError::Node {
            archive: self.archive.name.clone(),
            target: short(&node.target).into(),
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
                    Output::Value(value) => Item::Tensor(self.cx.new_tensor(value)),
                    Output::Alias(tensor) => Item::Tensor(tensor),
                    Output::View(tensor, ops) => {
                        Item::Tensor(self.cx.view(tensor, ops).map_err(|r| self.node_error(node, r))?)
                    }
                    Output::Item(item) => item,
                    Output::Unavailable => continue,
                };
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
        match outs.into_iter().next() {
            Some(Output::Value(value)) => self.cx.write(tensor, value)?,
            Some(Output::Alias(other)) => {
                let value = self.cx.read(other)?;
                self.cx.write(tensor, value)?;
            }
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
        let gradients = !(node.target.ends_with("wrap_with_set_grad_enabled")
            && matches!(node.inputs.first().map(|i| &i.arg), Some(Argument::AsBool(false))));
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
        self.nodes(graph, &mut inner, &live(graph, &results))?;
        let mut outs = Vec::new();
        for result in results {
            outs.push(match inner.get(result) {
                Some(Item::Tensor(tensor)) if gradients => Output::Alias(*tensor),
                Some(Item::Tensor(tensor)) => {
                    let value =
                        self.cx.read(*tensor).and_then(|v| self.cx.detach(v)).map_err(|r| self.node_error(node, r))?;
                    Output::Value(value)
                }
                Some(item) => Output::Item(item.clone()),
                None => return Err(refused(self, "its subgraph returns a value that no node computed")),
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
                        let value = self.cx.read(*tensor).map_err(|r| self.model_error(r))?;
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
        let is_loss = |cx: &Context<'_>, v: Value| cx.dtype(v).is_float() && cx.ty(v).numel() == 1;
        if let Some(&(_, loss)) = results.iter().find(|(_, v)| is_loss(&self.cx, *v)) {
            // Training reads no other result of the model.
            results = vec![("loss".into(), loss)];
        }
        for (name, value) in results {
            let id = self.cx.materialize(value).map_err(|r| self.model_error(r))?;
            self.cx.builder.output(&name, id).map_err(|e| self.graph_error(e))?;
        }
        add_correct_output(&mut self.cx.builder).map_err(|e| self.graph_error(e))?;
        for (tensor, id) in self.state.clone().into_values() {
            let value = self.cx.read(tensor).and_then(|v| self.cx.materialize(v)).map_err(|r| self.model_error(r))?;
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
            graph
                .metadata
                .insert(TARGETS_KEY.into(), serde_json::json!({"input": input, "ignore_index": ignore_index}));
        }
        Ok(Imported { graph, tied: self.tied, tensors: self.tensors })
    }
}

fn call<'b>(node: &'b Node, graph: &'b schema::Graph, names: &'b Names) -> Call<'b> {
    let mut parts = short(&node.target).splitn(3, '.');
    let library = parts.next().unwrap_or_default();
    let name = parts.next().unwrap_or_default();
    let overload = parts.next().unwrap_or_default();
    Call { node, library, name, overload, names, metas: &graph.tensor_values }
}
