//! Reductions and scans.

use serde::{Deserialize, Serialize};

use super::{Backward, Cost, Operator, args, float, in_rank, want};
use crate::{DType, GraphError, TensorType, ValueId};

use super::elementwise::Compare;

/// What a [`Reduce`] computes.
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
    /// Every kind, for suites and tables.
    pub const ALL: [Self; 7] = [Self::Sum, Self::Mean, Self::Amax, Self::Amin, Self::Prod, Self::Any, Self::All];
}

/// Reduces over dimensions. Backends sum contiguous operands in an order that depends on nothing but the shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduce {
    /// What to compute.
    pub kind: ReduceKind,
    /// The dimensions reduced, ascending.
    pub dims: Vec<usize>,
    /// Whether they stay with size 1.
    pub keepdim: bool,
}

pub(super) fn reduced_shape(x: &TensorType, dims: &[usize], keepdim: bool) -> Result<Vec<usize>, String> {
    want(dims.windows(2).all(|w| w[0] < w[1]), || format!("dimensions {dims:?} must ascend"))?;
    for &d in dims {
        in_rank(d, x)?;
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
            ReduceKind::Mean => float(x)?,
            ReduceKind::Any | ReduceKind::All => super::of_type(x, DType::Bool, "the operand")?,
            _ => want(x.dtype != DType::Bool, || format!("needs numbers, got {x}"))?,
        }
        if matches!(self.kind, ReduceKind::Amax | ReduceKind::Amin) {
            want(self.dims.iter().all(|&d| x.shape.get(d) != Some(&0)), || {
                format!("has no extremum over the empty dimension of {x}")
            })?;
        }
        Ok(vec![TensorType::new(x.dtype, reduced_shape(x, &self.dims, self.keepdim)?)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, y, g) = (cx.inputs[0], cx.outputs[0], cx.grad(0)?);
        let b = &mut *cx.b;
        let shape = b.ty(x).shape.clone();
        let mut kept = shape.clone();
        for &d in &self.dims {
            kept[d] = 1;
        }
        let g = b.reshape(g, kept.clone())?;
        let spread = match self.kind {
            ReduceKind::Sum => b.expand(g, shape)?,
            ReduceKind::Mean => {
                let n: usize = self.dims.iter().map(|&d| shape[d]).product();
                let g = b.div_scalar(g, n as f64)?;
                b.expand(g, shape)?
            }
            // The gradient is shared evenly among equal extrema, as ATen's amax does.
            ReduceKind::Amax | ReduceKind::Amin => {
                let y = b.reshape(y, kept)?;
                let hit = b.op(Compare::Eq, &[x, y])?;
                let dtype = b.ty(x).dtype;
                let hit = b.cast(hit, dtype)?;
                let count = b.sum(hit, &self.dims, true)?;
                let share = b.div(g, count)?;
                b.mul(hit, share)?
            }
            // Π of the others = y / x; exact only away from zeros.
            ReduceKind::Prod => {
                let y = b.reshape(y, kept)?;
                let p = b.mul(g, y)?;
                b.div(p, x)?
            }
            ReduceKind::Any | ReduceKind::All => return Ok(vec![None]),
        };
        Ok(vec![Some(spread)])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(inputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
    }
}

/// The position (`i64`) of the first largest or smallest element along a dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgReduce {
    /// Largest rather than smallest.
    pub largest: bool,
    /// The dimension.
    pub dim: usize,
    /// Whether it stays with size 1.
    pub keepdim: bool,
}

impl Operator for ArgReduce {
    fn name(&self) -> &'static str {
        if self.largest { "argmax" } else { "argmin" }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        want(x.dtype != DType::Bool, || format!("needs numbers, got {x}"))?;
        let shape = reduced_shape(x, &[self.dim], self.keepdim)?;
        want(x.shape[self.dim] > 0, || format!("has no extremum over the empty dimension {} of {x}", self.dim))?;
        Ok(vec![TensorType::new(DType::I64, shape)])
    }

    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None])
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
        in_rank(self.dim, x)?;
        want(x.dtype != DType::Bool, || format!("needs numbers, got {x}"))?;
        Ok(vec![x.clone()])
    }

    // dx_i = Σ_{j ≥ i} g_j: a running sum from the other end.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let g = cx.grad(0)?;
        let b = &mut *cx.b;
        let f = b.flip(g, &[self.dim])?;
        let s = b.op(self.clone(), &[f])?;
        Ok(vec![Some(b.flip(s, &[self.dim])?)])
    }
}
