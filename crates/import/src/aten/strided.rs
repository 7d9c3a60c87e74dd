//! Views that select elements by their positions in memory.

use std::collections::HashMap;

use fusionllm_graph::ops::{Permute, Reshape};

use crate::archive::row_major;
use crate::call::{Call, Output, size, wrap};
use crate::context::{Context, MAX_POSITIONS, Result, Step};

/// A view of the first operand: the elements at these row-major positions, as a tensor of this shape.
fn elements_at(c: &mut Context<'_>, a: &Call<'_>, shape: Vec<usize>, positions: &[i64]) -> Result<Vec<Output>> {
    let x = c.read(a.first_tensor()?)?;
    let numel = c.ty(x).numel();
    let mut steps = Vec::new();
    if positions.len() != numel || positions.iter().enumerate().any(|(i, at)| i as i64 != *at) {
        steps.push(Step::Reshape(Reshape { shape: vec![numel] }));
        steps.push(Step::At { dim: 0, positions: c.positions(positions)? });
    }
    steps.push(Step::Reshape(Reshape { shape }));
    Ok(vec![Output::View(a.first_tensor()?, steps)])
}

/// The positions `Σ index · stride + first` of all indices of a shape.
fn positions(c: &mut Context<'_>, shape: &[usize], strides: &[i64], first: i64) -> Result<Vec<i64>> {
    if shape.contains(&0) {
        return Ok(Vec::new());
    }
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).filter(|n| *n <= MAX_POSITIONS);
    let count = count.ok_or_else(|| format!("it reads more than {MAX_POSITIONS} elements"))?;
    c.spend(count * size_of::<i64>())?;
    let reach = |(n, stride): (&usize, &i64)| (*n as i128 - 1) * i128::from(stride.unsigned_abs());
    let farthest = shape.iter().zip(strides).map(reach).sum::<i128>() + i128::from(first.unsigned_abs());
    i64::try_from(farthest).map_err(|_| "its strides reach beyond any memory")?;
    let mut all = vec![first];
    for (&n, &stride) in shape.iter().zip(strides) {
        all = all.iter().flat_map(|&at| (0..n as i64).map(move |i| at + i * stride)).collect();
    }
    Ok(all)
}

pub(super) fn diagonal(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    // `linalg_diagonal` calls its operand `A`.
    let (operand, dims) = if a.has("A") { ("A", (-2, -1)) } else { ("self", (0, 1)) };
    let x = a.value(c, operand)?;
    let shape = c.shape(x);
    let rank = shape.len();
    let (i, j) = (wrap(a.int_or("dim1", dims.0)?, rank)?, wrap(a.int_or("dim2", dims.1)?, rank)?);
    if rank < 2 || i == j {
        return Err("it needs two dimensions".into());
    }
    let offset = a.int_or("offset", 0)?;
    let strides: Vec<i64> = row_major(&shape).into_iter().map(|s| s as i64).collect();
    let (rows, columns) = (shape[i] as i64, shape[j] as i64);
    let (length, first) = match offset {
        o if o >= 0 => (rows.min(columns.saturating_sub(o)).max(0), o.saturating_mul(strides[j])),
        o => (columns.min(rows.saturating_add(o)).max(0), o.saturating_neg().saturating_mul(strides[i])),
    };
    let kept: Vec<usize> = (0..rank).filter(|d| *d != i && *d != j).collect();
    let mut out: Vec<usize> = kept.iter().map(|&d| shape[d]).collect();
    let mut steps: Vec<i64> = kept.iter().map(|&d| strides[d]).collect();
    out.push(length as usize);
    steps.push(strides[i] + strides[j]);
    let at = positions(c, &out, &steps, if length == 0 { 0 } else { first })?;
    elements_at(c, a, out, &at)
}

/// The windows of a dimension, along a new last dimension.
pub(super) fn unfold(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = wrap(a.int("dimension")?, shape.len())?;
    let (window, step) = (size(a.int("size")?)?, size(a.int("step")?)?);
    let n = shape.get(dim).copied().unwrap_or(0);
    if window > n || step == 0 {
        return Err(format!("windows of {window} by {step} do not fit size {n}").into());
    }
    let count = (n - window) / step + 1;
    let at = positions(c, &[count, window], &[step as i64, 1], 0)?;
    let mut split = shape;
    split.splice(dim..=dim, [count, window]);
    let mut dims: Vec<usize> = (0..split.len()).filter(|d| *d != dim + 1).collect();
    dims.push(dim + 1);
    let steps = vec![
        Step::At { dim, positions: c.positions(&at)? },
        Step::Reshape(Reshape { shape: split }),
        Step::Permute(Permute { dims }),
    ];
    Ok(vec![Output::View(a.first_tensor()?, steps)])
}

/// Selects elements by their positions in memory. The file describes the memory of `self`.
pub(super) fn as_strided(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = a.sizes("size")?;
    let strides = a.ints("stride")?;
    if strides.len() != shape.len() {
        return Err("it has a different number of sizes and strides".into());
    }
    let own = a.layout("self").filter(|layout| layout.shape == c.shape(x));
    let own = own.ok_or("the file does not describe the memory of its operand at this batch size")?;
    let own_strides: Vec<i64> = own.strides.iter().map(|s| *s as i64).collect();
    let first = own.offset as i64;
    let wanted = positions(c, &shape, &strides, a.int_or("storage_offset", first)?)?;
    let mut place = HashMap::new();
    for (i, at) in positions(c, &own.shape, &own_strides, first)?.into_iter().enumerate() {
        place.insert(at, i as i64);
    }
    let at: Option<Vec<i64>> = wanted.iter().map(|p| place.get(p).copied()).collect();
    elements_at(c, a, shape, &at.ok_or("it reads memory outside its operand")?)
}
