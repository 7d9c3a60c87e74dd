//! One operator of the exported graph with its arguments.

use std::collections::HashMap;

use fusionllm_graph::DType;

use crate::context::{Context, Result, Value};
use crate::error::TranslationError;
use crate::schema::{Argument, Node, OptionalTensor, SymBool, SymFloat, SymInt, TensorMeta};

/// What a name of the exported graph stands for.
#[derive(Debug, Clone)]
pub(crate) enum Item {
    /// By its number in the context.
    Tensor(usize),
    Int(i64),
    Float(f64),
    Bool(bool),
    /// An input that is no tensor and read by nothing that matters.
    Nothing,
}

pub(crate) type Names = HashMap<String, Item>;

/// A result of an operator.
#[derive(Debug)]
pub(crate) enum Output {
    /// A tensor of its own.
    Value(Value),
    /// The tensor of that number itself.
    Same(usize),
    /// A tensor seen otherwise.
    View(usize, Vec<fusionllm_graph::Op>),
    Item(Item),
    /// A result that nothing can read.
    Nothing,
}

impl From<Value> for Output {
    fn from(value: Value) -> Self {
        Self::Value(value)
    }
}

/// The node, and what the names it reads stand for.
pub(crate) struct Call<'a> {
    pub(crate) node: &'a Node,
    /// `aten`, or another library.
    pub(crate) library: &'a str,
    /// The operator's name without library, overload and the mark of working in place.
    pub(crate) name: &'a str,
    pub(crate) overload: &'a str,
    pub(crate) names: &'a Names,
    pub(crate) metas: &'a HashMap<String, TensorMeta>,
}

impl<'a> Call<'a> {
    /// The argument of a name, unless it is left out or `None`.
    pub(crate) fn argument(&self, name: &str) -> Option<&'a Argument> {
        let found = self.node.inputs.iter().find(|i| i.name == name).map(|i| &i.arg);
        found.filter(|a| !matches!(a, Argument::AsNone(_) | Argument::AsOptionalTensor(OptionalTensor::AsNone(_))))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.argument(name).is_some()
    }

    fn item(&self, name: &str) -> Result<&'a Item> {
        self.names.get(name).ok_or_else(|| TranslationError(format!("reads {name}, which nothing made before")))
    }

    fn wrong<T>(&self, name: &str, wanted: &str) -> Result<T> {
        Err(match self.argument(name) {
            None => format!("its argument `{name}` is missing").into(),
            Some(_) => format!("its argument `{name}` is not {wanted}").into(),
        })
    }

    pub(crate) fn named(&self, name: &str) -> Result<usize> {
        match self.item(name)? {
            Item::Tensor(t) => Ok(*t),
            _ => Err(format!("{name} is no tensor").into()),
        }
    }

    /// A tensor by its number.
    pub(crate) fn tensor(&self, name: &str) -> Result<usize> {
        match self.argument(name) {
            Some(Argument::AsTensor(t) | Argument::AsOptionalTensor(OptionalTensor::AsTensor(t))) => {
                self.named(&t.name)
            }
            _ => self.wrong(name, "a tensor"),
        }
    }

    /// The name of the first argument, which in-place operators overwrite.
    pub(crate) fn first_tensor(&self) -> Result<usize> {
        match self.node.inputs.first().map(|i| &i.arg) {
            Some(Argument::AsTensor(t)) => self.named(&t.name),
            _ => Err("its first argument is no tensor".into()),
        }
    }

    /// The name of the tensor that an argument is.
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
    pub(crate) fn values(&self, cx: &mut Context<'_>, name: &str) -> Result<Vec<Value>> {
        let all = self.optional_values(cx, name)?;
        all.into_iter().map(|v| v.ok_or_else(|| TranslationError(format!("a tensor of `{name}` is missing")))).collect()
    }

    /// A list of tensors, some of which may be left out.
    pub(crate) fn optional_values(&self, cx: &mut Context<'_>, name: &str) -> Result<Vec<Option<Value>>> {
        match self.argument(name) {
            Some(Argument::AsTensors(all)) => {
                all.iter().map(|t| self.named(&t.name).and_then(|t| cx.read(t)).map(Some)).collect()
            }
            Some(Argument::AsOptionalTensors(all)) => all
                .iter()
                .map(|t| match t {
                    OptionalTensor::AsTensor(t) => self.named(&t.name).and_then(|t| cx.read(t)).map(Some),
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
                _ => Err(format!("{name} is no integer").into()),
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
            // An empty list has no type of its own.
            Some(Argument::AsTensors(none)) if none.is_empty() => Ok(Vec::new()),
            Some(Argument::AsInt(_) | Argument::AsSymInt(_)) => Ok(vec![self.int(name)?]),
            _ => self.wrong(name, "a list of integers"),
        }
    }

    pub(crate) fn ints_or(&self, name: &str, default: &[i64]) -> Result<Vec<i64>> {
        if self.has(name) { self.ints(name) } else { Ok(default.to_vec()) }
    }

    /// Sizes: none negative.
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
                _ => self.wrong(name, "a truth value"),
            },
            _ => self.wrong(name, "a truth value"),
        }
    }

    pub(crate) fn text(&self, name: &str) -> Option<&'a str> {
        match self.argument(name) {
            Some(Argument::AsString(s)) => Some(s),
            _ => None,
        }
    }

    /// A number of any type, or `None` if the argument is a tensor or left out.
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

    /// Names of the results, those of lists one by one.
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

    /// The element type the file declares for a result.
    pub(crate) fn result_type(&self, cx: &Context<'_>, index: usize) -> Result<DType> {
        let name = self.outputs().get(index).copied().flatten();
        let meta = name.and_then(|n| self.metas.get(n));
        let meta = meta.ok_or_else(|| TranslationError(format!("the file does not describe its result {index}")))?;
        cx.element_type(meta.dtype)
    }

    /// The declared description of the tensor of an argument.
    pub(crate) fn meta(&self, name: &str) -> Option<&'a TensorMeta> {
        self.metas.get(self.tensor_name(name)?)
    }
}

/// A size that is not negative.
pub(crate) fn size(n: i64) -> Result<usize> {
    usize::try_from(n).map_err(|_| TranslationError(format!("{n} is no size")))
}

/// A dimension of `rank`, counted from the end if negative.
pub(crate) fn wrap(dim: i64, rank: usize) -> Result<usize> {
    // A scalar counts as of one dimension.
    let rank = rank.max(1) as i64;
    let wrapped = if dim < 0 { dim.checked_add(rank) } else { Some(dim) };
    match wrapped {
        Some(d) if (0..rank).contains(&d) => Ok(d as usize),
        _ => Err(format!("dimension {dim} is out of range for {rank} dimensions").into()),
    }
}

/// Several dimensions, ascending, each once. None given stands for all.
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
