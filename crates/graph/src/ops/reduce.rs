//! Reductions and scans.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_dim, ensure_dtype, ensure_float, ensure_number};
use super::operator::{Cost, Operator, elements};
use crate::{DType, TensorType};

/// The function of a [`Reduce`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum ReduceKind {
    Sum,
    Mean,
    Amax,
    Amin,
    Prod,
    Any,
    All,
}

impl ReduceKind {
    /// All variants, for tests and tables.
    pub const ALL: [Self; 7] = [Self::Sum, Self::Mean, Self::Amax, Self::Amin, Self::Prod, Self::Any, Self::All];
}

/// Reduces dimensions. Backends sum contiguous operands in an order that depends on the shape alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduce {
    /// The function.
    pub kind: ReduceKind,
    /// The dimensions to reduce, ascending.
    pub dims: Vec<usize>,
    /// Whether the reduced dimensions stay, with size 1.
    pub keepdim: bool,
}

pub(super) fn reduced_shape(x: &TensorType, dims: &[usize], keepdim: bool) -> Result<Vec<usize>, String> {
    ensure(dims.windows(2).all(|w| w[0] < w[1]), || format!("dimensions {dims:?} must be ascending"))?;
    for &d in dims {
        ensure_dim(d, x)?;
    }
    Ok(x.shape
        .iter()
        .enumerate()
        .filter_map(|(i, &n)| match dims.contains(&i) {
            false => Some(n),
            true => keepdim.then_some(1),
        })
        .collect())
}

impl Operator for Reduce {
    fn name(&self) -> &'static str {
        match self.kind {
            ReduceKind::Sum => "sum.dim_IntList",
            ReduceKind::Mean => "mean.dim",
            ReduceKind::Amax => "amax",
            ReduceKind::Amin => "amin",
            ReduceKind::Prod => "prod",
            ReduceKind::Any => "any.dims",
            ReduceKind::All => "all.dims",
        }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        match self.kind {
            ReduceKind::Mean => ensure_float(x)?,
            ReduceKind::Any | ReduceKind::All => ensure_dtype(x, DType::Bool, "the operand")?,
            _ => ensure_number(x)?,
        }
        if matches!(self.kind, ReduceKind::Amax | ReduceKind::Amin) {
            ensure(self.dims.iter().all(|&d| x.shape.get(d) != Some(&0)), || {
                format!("an empty dimension of {x} has no extremum")
            })?;
        }
        Ok(vec![TensorType::new(x.dtype, reduced_shape(x, &self.dims, self.keepdim)?)])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(elements(inputs), inputs, outputs)
    }
}

/// The position (`i64`) of the first largest or smallest element along a dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgReduce {
    /// Whether to find the largest element. Otherwise the smallest.
    pub largest: bool,
    /// The dimension.
    pub dim: usize,
    /// Whether the dimension stays, with size 1.
    pub keepdim: bool,
}

impl Operator for ArgReduce {
    fn name(&self) -> &'static str {
        if self.largest { "argmax" } else { "argmin" }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_number(x)?;
        let shape = reduced_shape(x, &[self.dim], self.keepdim)?;
        ensure(x.shape[self.dim] > 0, || format!("the empty dimension {} of {x} has no extremum", self.dim))?;
        Ok(vec![TensorType::new(DType::I64, shape)])
    }
}

/// Running sum along a dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CumSum {
    /// The dimension.
    pub dim: usize,
}

impl Operator for CumSum {
    fn name(&self) -> &'static str {
        "cumsum"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_dim(self.dim, x)?;
        ensure_number(x)?;
        Ok(vec![x.clone()])
    }
}
