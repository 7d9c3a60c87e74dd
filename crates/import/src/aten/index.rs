//! Operators that index, sort or count elements.

use fusionllm_graph::ops::{
    Binary, Compare, Index, IndexAdd, IndexPut, IndexSelect, Logical, ReduceKind, Scatter, ScatterAdd, Sort, TopK,
    Unary, Where,
};
use fusionllm_graph::{DType, HostTensor};

use super::entry::{entries, one};
use crate::call::{Call, Output, size, wrap};
use crate::context::{Context, MAX_POSITIONS, Result, Value};

entries! {
    "index" ["Tensor"] => index,
    "index_put" ["default"] => index_put,
    "_unsafe_index" ["Tensor"] => index,
    "_unsafe_index_put" ["default"] => index_put,
    "index_select" ["default"] => index_select,
    "index_add" ["default"] => index_add,
    "index_copy" ["default"] => index_copy,
    "gather" ["default"] => gather,
    "take_along_dim" ["default"] => gather,
    "scatter" ["src", "value"] => scatter,
    "scatter_add" ["default"] => scatter,
    "where" ["self", "ScalarOther", "ScalarSelf", "Scalar"] => where_,
    "masked_fill" ["Scalar", "Tensor"] => masked_fill,
    "sort" ["default", "stable"] => sort,
    "argsort" ["default", "stable"] => argsort,
    "topk" ["default"] => topk,
    "one_hot" ["default"] => one_hot,
    "histc" ["default"] => histc,
    "bincount" ["default"] => bincount,
    "nonzero" ["default"] => nonzero,
    "searchsorted" ["Tensor"] => |c, a| buckets(c, a, ["sorted_sequence", "self"]),
    "bucketize" ["Tensor"] => |c, a| buckets(c, a, ["boundaries", "self"]),
}

/// Converts an index of a dimension of size `n`: negative elements count from the end.
fn non_negative(c: &mut Context<'_>, index: Value, n: usize) -> Result<Value> {
    let index = c.cast(index, DType::I64)?;
    if let Some(known) = c.constant_integers(index)? {
        return match known.iter().any(|i| *i < 0) {
            false => Ok(index),
            true => {
                let at: Vec<i64> = known.iter().map(|i| if *i < 0 { i.saturating_add(n as i64) } else { *i }).collect();
                let shape = c.shape(index);
                c.constant(HostTensor::from_i64(shape, &at)?)
            }
        };
    }
    let negative = c.compare_scalar(Compare::Lt, index, 0.0)?;
    let moved = c.add_scalar(index, n as f64)?;
    c.where_(negative, moved, index)
}

/// The positions where a constant mask is true, as one list per dimension. `None` if the mask is not constant.
fn positions(c: &mut Context<'_>, mask: Value) -> Result<Option<Vec<Value>>> {
    let Some(tensor) = c.constant_tensor(mask) else { return Ok(None) };
    let shape = tensor.shape().to_vec();
    let hits: Vec<usize> = tensor.bytes().iter().enumerate().filter(|(_, b)| **b != 0).map(|(i, _)| i).collect();
    if hits.len() > MAX_POSITIONS {
        return Err(format!("its mask selects {} elements, too many", hits.len()).into());
    }
    let mut stride: usize = shape.iter().product();
    let mut lists = Vec::with_capacity(shape.len());
    for &n in &shape {
        stride /= n.max(1);
        let at: Vec<i64> = hits.iter().map(|i| (i / stride.max(1) % n.max(1)) as i64).collect();
        lists.push(c.constant(HostTensor::from_i64([at.len()], &at)?)?);
    }
    Ok(Some(lists))
}

/// The dimensions that `indices` address, with the index of each. Masks become positions.
fn indexed_dimensions(c: &mut Context<'_>, a: &Call<'_>, x: Value) -> Result<(Vec<bool>, Vec<Value>)> {
    let shape = c.shape(x);
    let mut indexed = vec![false; shape.len()];
    let mut lists = Vec::new();
    let mut dim = 0;
    for index in a.optional_values(c, "indices")? {
        let Some(index) = index else {
            dim += 1;
            continue;
        };
        let parts = match c.dtype(index) {
            DType::Bool => positions(c, index)?.ok_or(
                "its mask, and so the shape of its result, depends on the data; use torch.where or a constant index",
            )?,
            _ => vec![index],
        };
        for part in parts {
            let n = *shape.get(dim).ok_or("it has more indices than dimensions")?;
            indexed[dim] = true;
            lists.push(non_negative(c, part, n)?);
            dim += 1;
        }
    }
    Ok((indexed, lists))
}

fn index(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let (indexed, lists) = indexed_dimensions(c, a, x)?;
    match (&indexed.iter().enumerate().filter(|(_, i)| **i).map(|(d, _)| d).collect::<Vec<_>>()[..], &lists[..]) {
        ([], _) => one(x),
        ([dim], [list]) if c.rank(*list) == 1 => one(c.op(IndexSelect { dim: *dim }, &[x, *list])?),
        _ => one(c.op(Index { indexed }, &[&[x], &lists[..]].concat())?),
    }
}

fn index_put(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let values = a.value(c, "values")?;
    let values = c.cast(values, c.dtype(x))?;
    let accumulate = a.bool_or("accumulate", false)?;
    // With a single value, a mask that depends on the data selects between the tensor and the value.
    if let [Some(mask)] = a.optional_values(c, "indices")?[..]
        && c.dtype(mask) == DType::Bool
        && c.constant_tensor(mask).is_none()
        && c.ty(values).numel() == 1
    {
        let mut along = c.shape(mask);
        along.resize(c.rank(x), 1);
        let mask = c.reshape(mask, &along)?;
        let value = c.reshape(values, &[])?;
        let written = if accumulate { c.add(x, value)? } else { value };
        return one(c.where_(mask, written, x)?);
    }
    let (indexed, lists) = indexed_dimensions(c, a, x)?;
    if lists.is_empty() {
        return Err("it has no indices".into());
    }
    let read = Index { indexed: indexed.clone() };
    let types: Vec<&fusionllm_graph::TensorType> = lists.iter().map(|l| c.ty(*l)).collect();
    let (shape, ..) = read.layout(c.ty(x), &types)?;
    let values = c.expand(values, &shape)?;
    one(c.op(IndexPut { indexed, accumulate }, &[&[x, values], &lists[..]].concat())?)
}

/// `self` and `dim`. A scalar becomes a tensor with one dimension.
fn tensor_and_dim(c: &mut Context<'_>, a: &Call<'_>) -> Result<(Value, usize)> {
    let x = a.value(c, "self")?;
    let x = if c.rank(x) == 0 { c.reshape(x, &[1])? } else { x };
    Ok((x, wrap(a.int_or("dim", -1)?, c.rank(x))?))
}

fn index_select(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, dim) = tensor_and_dim(c, a)?;
    let at = flat_index(c, a)?;
    one(c.op(IndexSelect { dim }, &[x, at])?)
}

/// `index`, flattened to one dimension.
fn flat_index(c: &mut Context<'_>, a: &Call<'_>) -> Result<Value> {
    let at = a.value(c, "index")?;
    let at = c.cast(at, DType::I64)?;
    c.reshape(at, &[c.ty(at).numel()])
}

fn index_add(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, dim) = tensor_and_dim(c, a)?;
    let at = flat_index(c, a)?;
    let source = a.value(c, "source")?;
    let source = c.cast(source, c.dtype(x))?;
    let source = c.mul_scalar(source, a.number_or("alpha", 1.0)?)?;
    one(c.op(IndexAdd { dim }, &[x, at, source])?)
}

fn index_copy(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, dim) = tensor_and_dim(c, a)?;
    let at = flat_index(c, a)?;
    let source = a.value(c, "source")?;
    let mut indexed = vec![false; c.rank(x)];
    indexed[dim] = true;
    one(c.op(IndexPut { indexed, accumulate: false }, &[x, source, at])?)
}

fn gather(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (mut x, dim) = tensor_and_dim(c, a)?;
    let mut at = a.value(c, if a.has("index") { "index" } else { "indices" })?;
    at = c.cast(at, DType::I64)?;
    if a.name == "take_along_dim" {
        // Both broadcast in the other dimensions.
        let (mut xs, mut ats) = (c.shape(x), c.shape(at));
        if xs.len() != ats.len() {
            return Err("operand and indices differ in dimensions".into());
        }
        for d in (0..xs.len()).filter(|d| *d != dim) {
            let n = if xs[d] == 1 { ats[d] } else { xs[d] };
            (xs[d], ats[d]) = (n, n);
        }
        x = c.expand(x, &xs)?;
        at = c.expand(at, &ats)?;
        at = non_negative(c, at, xs[dim])?;
    }
    one(c.gather(x, dim, at)?)
}

fn scatter(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, dim) = tensor_and_dim(c, a)?;
    let at = a.value(c, "index")?;
    let at = c.cast(at, DType::I64)?;
    let shape = c.shape(at);
    let dtype = c.dtype(x);
    let source = match a.number(if a.has("src") { "src" } else { "value" })? {
        Some(n) => c.full(dtype, &shape, n)?,
        None => {
            // The source may be larger than the index.
            let mut source = a.value(c, "src")?;
            for (d, n) in shape.iter().enumerate() {
                source = c.slice(source, d, 0, *n, 1)?;
            }
            c.cast(source, dtype)?
        }
    };
    if a.name == "scatter_add" {
        return one(c.op(ScatterAdd { dim }, &[x, at, source])?);
    }
    one(c.op(Scatter { dim }, &[x, at, source])?)
}

fn where_(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let condition = a.value(c, "condition")?;
    let condition = c.cast(condition, DType::Bool)?;
    let dtype = a.result_type(c, 0)?;
    let mut sides = [condition; 2];
    for (side, name) in sides.iter_mut().zip(["self", "other"]) {
        *side = match a.number(name)? {
            Some(n) => c.full(dtype, &[], n)?,
            None => {
                let v = a.value(c, name)?;
                c.cast(v, dtype)?
            }
        };
    }
    one(c.where_(condition, sides[0], sides[1])?)
}

fn masked_fill(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, mask) = (a.value(c, "self")?, a.value(c, "mask")?);
    let dtype = c.dtype(x);
    let value = match a.number("value")? {
        Some(n) => c.full(dtype, &[], n)?,
        None => {
            let v = a.value(c, "value")?;
            c.cast(v, dtype)?
        }
    };
    one(c.op(Where, &[mask, value, x])?)
}

fn sorted(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Value>> {
    let (x, dim) = tensor_and_dim(c, a)?;
    let dtype = c.dtype(x);
    let number = if dtype == DType::Bool { c.cast(x, DType::I32)? } else { x };
    let mut results = c.apply(Sort { dim, descending: a.bool_or("descending", false)? }, &[number])?;
    results[0] = c.cast(results[0], dtype)?;
    Ok(results)
}

fn sort(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    Ok(sorted(c, a)?.into_iter().map(Output::Value).collect())
}

fn argsort(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    one(sorted(c, a)?[1])
}

fn topk(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, dim) = tensor_and_dim(c, a)?;
    let op = TopK { k: size(a.int("k")?)?, dim, largest: a.bool_or("largest", true)? };
    Ok(c.apply(op, &[x])?.into_iter().map(Output::Value).collect())
}

/// A boolean tensor `[.., classes]`: true where the last index equals the element.
fn is_class(c: &mut Context<'_>, x: Value, classes: usize) -> Result<Value> {
    let mut shape = c.shape(x);
    shape.push(1);
    let x = c.reshape(x, &shape)?;
    let range = c.arange(c.dtype(x), 0.0, 1.0, classes)?;
    c.compare(Compare::Eq, x, range)
}

fn one_hot(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let classes = a.int_or("num_classes", -1)?;
    let classes = usize::try_from(classes).map_err(|_| "it needs the argument `num_classes`")?;
    let y = is_class(c, x, classes)?;
    one(c.cast(y, DType::I64)?)
}

/// The number of elements in each of `bins` equal intervals. The last interval includes its end.
fn histc(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    let bins = size(a.int_or("bins", 100)?)?;
    let (min, max) = (a.number_or("min", 0.0)?, a.number_or("max", 0.0)?);
    if min >= max {
        return Err("it needs the arguments `min` and `max`".into());
    }
    let x = c.cast(x, DType::F64)?;
    let x = c.reshape(x, &[c.ty(x).numel()])?;
    let low = c.compare_scalar(Compare::Ge, x, min)?;
    let high = c.compare_scalar(Compare::Le, x, max)?;
    let inside = c.op(Logical::And, &[low, high])?;
    let at = c.add_scalar(x, -min)?;
    let at = c.mul_scalar(at, bins as f64)?;
    let at = c.scalar(Binary::Div, at, max - min, false)?;
    let at = c.unary(Unary::Floor, at)?;
    let at = c.scalar(Binary::Minimum, at, bins as f64 - 1.0, false)?;
    let y = is_class(c, at, bins)?;
    let n = c.ty(inside).numel();
    let inside = c.reshape(inside, &[n, 1])?;
    let y = c.op(Logical::And, &[y, inside])?;
    let y = c.cast(y, dtype)?;
    one(c.reduce(ReduceKind::Sum, y, &[0], false)?)
}

/// Counts the elements of a constant. For other tensors, the shape of the result would depend on the data.
fn bincount(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let classes = size(a.int_or("minlength", 0)?)?;
    if c.constant_tensor(x).is_none() || a.has("weights") {
        return Err("the shape of its result depends on the data".into());
    }
    let known = c.constant_integers(x)?.unwrap_or_default();
    let most = known.iter().copied().max().map_or(0, |m| m.saturating_add(1));
    let classes = classes.max(size(most)?);
    let y = is_class(c, x, classes)?;
    let y = c.cast(y, DType::I64)?;
    one(c.reduce(ReduceKind::Sum, y, &[0], false)?)
}

fn nonzero(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let mask = c.cast(x, DType::Bool)?;
    let lists = positions(c, mask)?.ok_or("the shape of its result depends on the data")?;
    let mut columns = Vec::new();
    for list in lists {
        let n = c.ty(list).numel();
        columns.push(c.reshape(list, &[n, 1])?);
    }
    one(c.cat(&columns, 1)?)
}

/// The number of boundaries before each element.
fn buckets(c: &mut Context<'_>, a: &Call<'_>, [boundaries, x]: [&str; 2]) -> Result<Vec<Output>> {
    let (edges, x) = (a.value(c, boundaries)?, a.value(c, x)?);
    if c.rank(edges) != 1 {
        return Err("its boundaries must have one dimension".into());
    }
    let right = a.bool_or("right", false)? || a.string("side") == Some("right");
    let mut shape = c.shape(x);
    shape.push(1);
    let x = c.cast(x, c.dtype(edges))?;
    let x = c.reshape(x, &shape)?;
    let before = c.compare(if right { Compare::Le } else { Compare::Lt }, edges, x)?;
    let dtype = a.result_type(c, 0)?;
    let before = c.cast(before, dtype)?;
    one(c.reduce(ReduceKind::Sum, before, &[shape.len() - 1], false)?)
}
