//! A call of an operator in the exported graph, and its arguments.

use std::collections::HashMap;

use fusionllm_graph::DType;

use crate::context::{Context, Result, Step, TensorId, Value};
use crate::error::TranslationError;
use crate::layout::Layout;
use crate::schema::{Argument, Node, OptionalTensor, SymBool, SymFloat, SymInt, TensorMeta};

/// The value of a name in the exported graph.
#[derive(Debug, Clone)]
pub(crate) enum Item {
    Tensor(TensorId),
    Int(i64),
    Float(f64),
    Bool(bool),
    /// An input that is not a tensor. Reading it is an error.
    Unused,
}

pub(crate) type Names = HashMap<String, Item>;

/// A result of an operator.
#[derive(Debug)]
pub(crate) enum Output {
    /// A new tensor.
    Value(Value),
    /// An existing tensor.
    Alias(TensorId),
    /// A view of an existing tensor, computed by these steps.
    View(TensorId, Vec<Step>),
    /// The memory of an existing tensor, without its gradient.
    Detached(TensorId),
    Item(Item),
    /// A result that the importer does not compute. Reading it is an error.
    Unavailable,
}

impl From<Value> for Output {
    fn from(value: Value) -> Self {
        Self::Value(value)
    }
}

/// The call of an operator: a node, with the values of the names it reads.
pub(crate) struct Call<'a> {
    pub(crate) node: &'a Node,
    /// `aten`, or another library.
    pub(crate) library: &'a str,
    /// The operator's name, without library, overload and in-place suffix.
    pub(crate) name: &'a str,
    pub(crate) overload: &'a str,
    pub(crate) names: &'a Names,
    pub(crate) metas: &'a HashMap<String, TensorMeta>,
}

impl<'a> Call<'a> {
    /// The argument with this name; `None` if it is missing or Python's `None`.
    pub(crate) fn argument(&self, name: &str) -> Option<&'a Argument> {
        let found = self.node.inputs.iter().find(|i| i.name == name).map(|i| &i.arg);
        found.filter(|a| !matches!(a, Argument::AsNone(_) | Argument::AsOptionalTensor(OptionalTensor::AsNone(_))))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.argument(name).is_some()
    }

    fn item(&self, name: &str) -> Result<&'a Item> {
        self.names.get(name).ok_or_else(|| TranslationError(format!("it reads {name}, which no earlier node computed")))
    }

    fn wrong<T>(&self, name: &str, wanted: &str) -> Result<T> {
        Err(match self.argument(name) {
            None => format!("its argument `{name}` is missing").into(),
            Some(_) => format!("its argument `{name}` is not {wanted}").into(),
        })
    }

    pub(crate) fn tensor_named(&self, name: &str) -> Result<TensorId> {
        match self.item(name)? {
            Item::Tensor(t) => Ok(*t),
            _ => Err(format!("{name} is not a tensor").into()),
        }
    }

    /// The tensor that is this argument.
    pub(crate) fn tensor(&self, name: &str) -> Result<TensorId> {
        match self.argument(name) {
            Some(Argument::AsTensor(t) | Argument::AsOptionalTensor(OptionalTensor::AsTensor(t))) => {
                self.tensor_named(&t.name)
            }
            _ => self.wrong(name, "a tensor"),
        }
    }

    /// The first argument, which in-place operators overwrite.
    pub(crate) fn first_tensor(&self) -> Result<TensorId> {
        match self.node.inputs.first().map(|i| &i.arg) {
            Some(Argument::AsTensor(t)) => self.tensor_named(&t.name),
            _ => Err("its first argument is not a tensor".into()),
        }
    }

    /// The name of the tensor that is this argument.
    pub(crate) fn tensor_name(&self, name: &str) -> Option<&'a str> {
        match self.argument(name) {
            Some(Argument::AsTensor(t)) => Some(&t.name),
            _ => None,
        }
    }

    pub(crate) fn value(&self, cx: &mut Context<'_>, name: &str) -> Result<Value> {
        cx.read(self.tensor(name)?)
    }

    pub(crate) fn optional(&self, cx: &mut Context<'_>, name: &str) -> Result<Option<Value>> {
        if self.has(name) { self.value(cx, name).map(Some) } else { Ok(None) }
    }

    /// A list of tensors.
    pub(crate) fn tensors(&self, name: &str) -> Result<Vec<TensorId>> {
        match self.argument(name) {
            Some(Argument::AsTensors(all)) => all.iter().map(|t| self.tensor_named(&t.name)).collect(),
            _ => self.wrong(name, "a list of tensors"),
        }
    }

    /// The values of a list of tensors.
    pub(crate) fn values(&self, cx: &mut Context<'_>, name: &str) -> Result<Vec<Value>> {
        let all = self.optional_values(cx, name)?;
        all.into_iter().map(|v| v.ok_or_else(|| TranslationError(format!("a tensor of `{name}` is missing")))).collect()
    }

    /// A list of tensors. Elements may be missing.
    pub(crate) fn optional_values(&self, cx: &mut Context<'_>, name: &str) -> Result<Vec<Option<Value>>> {
        match self.argument(name) {
            Some(Argument::AsTensors(all)) => {
                all.iter().map(|t| self.tensor_named(&t.name).and_then(|t| cx.read(t)).map(Some)).collect()
            }
            Some(Argument::AsOptionalTensors(all)) => all
                .iter()
                .map(|t| match t {
                    OptionalTensor::AsTensor(t) => self.tensor_named(&t.name).and_then(|t| cx.read(t)).map(Some),
                    OptionalTensor::AsNone(_) => Ok(None),
                })
                .collect(),
            _ => self.wrong(name, "a list of tensors"),
        }
    }

    fn sym(&self, size: &SymInt) -> Result<i64> {
        match size {
            SymInt::AsInt(n) => Ok(*n),
            SymInt::AsName(name) => match self.item(name)? {
                Item::Int(n) => Ok(*n),
                _ => Err(format!("{name} is not an integer").into()),
            },
        }
    }

    pub(crate) fn int(&self, name: &str) -> Result<i64> {
        match self.argument(name) {
            Some(Argument::AsInt(n)) => Ok(*n),
            Some(Argument::AsSymInt(n)) => self.sym(n),
            Some(Argument::AsBool(b)) => Ok((*b).into()),
            Some(Argument::AsFloat(x)) if x.0.fract() == 0.0 => Ok(x.0 as i64),
            _ => self.wrong(name, "an integer"),
        }
    }

    pub(crate) fn int_or(&self, name: &str, default: i64) -> Result<i64> {
        if self.has(name) { self.int(name) } else { Ok(default) }
    }

    pub(crate) fn ints(&self, name: &str) -> Result<Vec<i64>> {
        match self.argument(name) {
            Some(Argument::AsInts(all)) => Ok(all.clone()),
            Some(Argument::AsSymInts(all)) => all.iter().map(|n| self.sym(n)).collect(),
            // PyTorch writes empty lists of integers as lists of tensors.
            Some(Argument::AsTensors(none)) if none.is_empty() => Ok(Vec::new()),
            Some(Argument::AsInt(_) | Argument::AsSymInt(_)) => Ok(vec![self.int(name)?]),
            _ => self.wrong(name, "a list of integers"),
        }
    }

    pub(crate) fn ints_or(&self, name: &str, default: &[i64]) -> Result<Vec<i64>> {
        if self.has(name) { self.ints(name) } else { Ok(default.to_vec()) }
    }

    /// A list of sizes. Negative ones are an error.
    pub(crate) fn sizes(&self, name: &str) -> Result<Vec<usize>> {
        self.ints(name)?.into_iter().map(size).collect()
    }

    pub(crate) fn bool_or(&self, name: &str, default: bool) -> Result<bool> {
        match self.argument(name) {
            None => Ok(default),
            Some(Argument::AsBool(b) | Argument::AsSymBool(SymBool::AsBool(b))) => Ok(*b),
            Some(Argument::AsInt(n)) => Ok(*n != 0),
            Some(Argument::AsSymBool(SymBool::AsName(n))) => match self.item(n)? {
                Item::Bool(b) => Ok(*b),
                _ => self.wrong(name, "a boolean"),
            },
            _ => self.wrong(name, "a boolean"),
        }
    }

    pub(crate) fn string(&self, name: &str) -> Option<&'a str> {
        match self.argument(name) {
            Some(Argument::AsString(s)) => Some(s),
            _ => None,
        }
    }

    /// A number of any type; `None` if the argument is a tensor or missing.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>> {
        Ok(match self.argument(name) {
            Some(Argument::AsFloat(x) | Argument::AsSymFloat(SymFloat::AsFloat(x))) => Some(x.0),
            Some(Argument::AsInt(n)) => Some(*n as f64),
            Some(Argument::AsBool(b)) => Some((*b).into()),
            Some(Argument::AsSymInt(n)) => Some(self.sym(n)? as f64),
            Some(Argument::AsSymFloat(SymFloat::AsName(n))) => match self.item(n)? {
                Item::Float(x) => Some(*x),
                Item::Int(n) => Some(*n as f64),
                _ => return self.wrong(name, "a number"),
            },
            _ => None,
        })
    }

    pub(crate) fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.number(name)?.unwrap_or(default))
    }

    /// An element type.
    pub(crate) fn dtype(&self, cx: &Context<'_>, name: &str) -> Result<Option<DType>> {
        match self.argument(name) {
            Some(Argument::AsScalarType(code) | Argument::AsInt(code)) => cx.element_type(*code).map(Some),
            _ => Ok(None),
        }
    }

    /// The names of the results. Lists are flattened.
    pub(crate) fn outputs(&self) -> Vec<Option<&'a str>> {
        let mut names = Vec::new();
        for output in &self.node.outputs {
            match output {
                Argument::AsTensor(t) | Argument::AsOptionalTensor(OptionalTensor::AsTensor(t)) => {
                    names.push(Some(t.name.as_str()));
                }
                Argument::AsTensors(all) => names.extend(all.iter().map(|t| Some(t.name.as_str()))),
                Argument::AsSymInt(SymInt::AsName(n))
                | Argument::AsSymFloat(SymFloat::AsName(n))
                | Argument::AsSymBool(SymBool::AsName(n)) => names.push(Some(n.as_str())),
                _ => names.push(None),
            }
        }
        names
    }

    /// The element type of a result, as the file declares it.
    pub(crate) fn result_type(&self, cx: &Context<'_>, index: usize) -> Result<DType> {
        let name = self.outputs().get(index).copied().flatten();
        let meta = name.and_then(|n| self.metas.get(n));
        let meta =
            meta.ok_or_else(|| TranslationError(format!("the file does not declare the type of result {index}")))?;
        cx.element_type(meta.dtype)
    }

    /// The place in memory of the tensor that is this argument; `None` if the file does not say.
    pub(crate) fn layout(&self, name: &str) -> Option<Layout> {
        Layout::of(self.metas.get(self.tensor_name(name)?)?)
    }

    /// The place in memory of the first result; `None` if the file does not say.
    pub(crate) fn result_layout(&self) -> Option<Layout> {
        Layout::of(self.metas.get(self.outputs().first().copied().flatten()?)?)
    }

    /// Whether the result has the element type and the strides that `self` has in the file. If it has not, it is a
    /// copy.
    pub(crate) fn keeps_layout(&self) -> bool {
        let both = self.layout("self").zip(self.result_layout());
        both.is_none_or(|(from, to)| from.element_type == to.element_type && from.has_strides(&to.strides))
    }
}

/// Converts a size. Negative sizes are an error.
pub(crate) fn size(n: i64) -> Result<usize> {
    usize::try_from(n).map_err(|_| TranslationError(format!("{n} is not a size")))
}

/// Converts a dimension of a tensor with `rank` dimensions. Negative ones count from the end.
pub(crate) fn wrap(dim: i64, rank: usize) -> Result<usize> {
    // As in PyTorch, a scalar counts as one dimension.
    let rank = rank.max(1) as i64;
    let wrapped = if dim < 0 { dim.checked_add(rank) } else { Some(dim) };
    match wrapped {
        Some(d) if (0..rank).contains(&d) => Ok(d as usize),
        _ => Err(format!("dimension {dim} is out of range for {rank} dimensions").into()),
    }
}

/// Converts a list of dimensions: ascending and without repetition. An empty list means all.
pub(crate) fn wrap_all(dims: &[i64], rank: usize) -> Result<Vec<usize>> {
    if dims.is_empty() {
        return Ok((0..rank).collect());
    }
    if rank == 0 {
        dims.iter().try_for_each(|d| wrap(*d, 0).map(|_| ()))?;
        return Ok(Vec::new());
    }
    let mut dims = dims.iter().map(|d| wrap(*d, rank)).collect::<Result<Vec<_>>>()?;
    dims.sort_unstable();
    dims.dedup();
    Ok(dims)
}
