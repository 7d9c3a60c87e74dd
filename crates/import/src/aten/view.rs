//! Views: results that share the memory of their operand.

use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{Expand, Permute, Reshape, Slice};

use super::entry::{entries, one};
use super::strided::{as_strided, diagonal, unfold};
use crate::call::{Call, Output, size, wrap, wrap_all};
use crate::context::{Context, Result, Step, TensorId};
use crate::error::TranslationError;

entries! {
    "view" ["default", "dtype"] => view,
    "_unsafe_view" ["default"] => view,
    "reshape" ["default"] => reshape,
    "view_as" ["default"] => |c, a| like(c, a, "other"),
    "reshape_as" ["default"] => |c, a| like(c, a, "other"),
    "flatten" ["using_ints"] => flatten,
    "ravel" ["default"] => ravel,
    "unflatten" ["int"] => unflatten,
    "unsqueeze" ["default"] => unsqueeze,
    "squeeze" ["default", "dim", "dims"] => squeeze,
    "transpose" ["int"] => transpose,
    "transpose_" ["default"] => transpose,
    "swapaxes" ["default"] => transpose,
    "swapdims" ["default"] => transpose,
    "t" ["default"] => |c, a| reversed(c, a),
    "numpy_T" ["default"] => |c, a| reversed(c, a),
    "mT" ["default"] => |c, a| swap_last(c, a),
    "mH" ["default"] => |c, a| swap_last(c, a),
    "matrix_H" ["default"] => |c, a| swap_last(c, a),
    "adjoint" ["default"] => |c, a| swap_last(c, a),
    "permute" ["default"] => permute,
    "movedim" ["int", "intlist"] => movedim,
    "moveaxis" ["int", "intlist"] => movedim,
    "expand" ["default"] => expand,
    "expand_as" ["default"] => expand_as,
    "broadcast_to" ["default"] => expand,
    "select" ["int"] => select,
    "slice" ["Tensor"] => slice,
    "narrow" ["default"] => narrow,
    "split" ["Tensor", "sizes"] => split,
    "split_with_sizes" ["default"] => split,
    "chunk" ["default"] => chunk,
    "unbind" ["int"] => unbind,
    "tensor_split" ["sections", "indices"] => tensor_split,
    "diagonal" ["default"] => diagonal,
    "linalg_diagonal" ["default"] => diagonal,
    "unfold" ["default"] => unfold,
    "as_strided" ["default"] => as_strided,
    "detach" ["default"] => |_, a| Ok(vec![Output::Detached(a.first_tensor()?)]),
    "real" ["default"] => |_, a| Ok(vec![Output::Alias(a.first_tensor()?)]),
    "alias" ["default"] => |_, a| view_of_self(a, Vec::new()),
    "broadcast_tensors" ["default"] => broadcast_tensors,
    "meshgrid" ["default", "indexing"] => meshgrid,
}

fn as_reshape(shape: Vec<usize>) -> Vec<Step> {
    vec![Step::Reshape(Reshape { shape })]
}

/// A view of `self`.
fn view_of_self(a: &Call<'_>, steps: Vec<Step>) -> Result<Vec<Output>> {
    Ok(vec![Output::View(a.first_tensor()?, steps)])
}

/// Replaces a -1 in a shape by the size that fits the number of elements.
fn resolved(shape: &[i64], ty: &TensorType) -> Result<Vec<usize>> {
    let refused = || TranslationError(format!("cannot view {ty} as {shape:?}"));
    let known = shape.iter().filter(|n| **n != -1).try_fold(1i64, |p, n| p.checked_mul(*n)).ok_or_else(refused)?;
    let known = size(known)?;
    shape
        .iter()
        .map(|&n| match n {
            -1 if known > 0 && ty.numel().is_multiple_of(known) => Ok(ty.numel() / known),
            -1 => Err(refused()),
            n => size(n),
        })
        .collect()
}

fn view(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    if a.overload == "dtype" {
        let x = a.value(c, "self")?;
        if a.dtype(c, "dtype")? == Some(c.dtype(x)) {
            // No gradient flows through the view.
            return Ok(vec![Output::Detached(a.first_tensor()?)]);
        }
        return Err("a view with another element type is not supported".into());
    }
    let x = a.value(c, "self")?;
    let shape = resolved(&a.ints(if a.has("size") { "size" } else { "shape" })?, c.ty(x))?;
    view_of_self(a, as_reshape(shape))
}

fn reshape(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = resolved(&a.ints("shape")?, c.ty(x))?;
    reshaped(c, a, shape)
}

/// A view of `self` where its place in memory allows that, and otherwise a copy, as in PyTorch.
fn reshaped(c: &mut Context<'_>, a: &Call<'_>, shape: Vec<usize>) -> Result<Vec<Output>> {
    if a.layout("self").zip(a.result_layout()).is_none_or(|(from, to)| from.can_be_viewed_as(&to.shape)) {
        return view_of_self(a, as_reshape(shape));
    }
    let x = a.value(c, "self")?;
    one(c.reshape(x, &shape)?)
}

/// A flat view of a tensor that is contiguous, and otherwise a copy.
fn ravel(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = vec![c.ty(x).numel()];
    if a.layout("self").is_none_or(|layout| layout.is_row_major()) {
        return view_of_self(a, as_reshape(shape));
    }
    one(c.reshape(x, &shape)?)
}

fn like(c: &mut Context<'_>, a: &Call<'_>, other: &str) -> Result<Vec<Output>> {
    let other = a.value(c, other)?;
    let shape = c.shape(other);
    reshaped(c, a, shape)
}

fn flatten(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    if shape.is_empty() {
        return reshaped(c, a, vec![1]);
    }
    let (first, last) = (wrap(a.int_or("start_dim", 0)?, shape.len())?, wrap(a.int_or("end_dim", -1)?, shape.len())?);
    if first > last {
        return Err("its start dimension is after its end dimension".into());
    }
    let mut flat = shape[..first].to_vec();
    flat.push(shape[first..=last].iter().product());
    flat.extend(&shape[last + 1..]);
    reshaped(c, a, flat)
}

fn unflatten(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let mut shape = c.shape(x);
    let dim = wrap(a.int("dim")?, shape.len())?;
    let part = TensorType::new(c.dtype(x), [shape.get(dim).copied().unwrap_or(1)]);
    let sizes = resolved(&a.ints("sizes")?, &part)?;
    shape.splice(dim..(dim + 1).min(shape.len()), sizes);
    view_of_self(a, as_reshape(shape))
}

fn unsqueeze(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let mut shape = c.shape(x);
    shape.insert(wrap(a.int("dim")?, shape.len() + 1)?, 1);
    view_of_self(a, as_reshape(shape))
}

fn squeeze(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dims = match a.overload {
        "default" => (0..shape.len()).collect(),
        // Here an empty list means no dimension.
        _ => match a.ints("dim")? {
            dims if dims.is_empty() => Vec::new(),
            dims => wrap_all(&dims, shape.len())?,
        },
    };
    let kept = (0..shape.len()).filter(|d| !(dims.contains(d) && shape[*d] == 1)).map(|d| shape[d]).collect();
    view_of_self(a, as_reshape(kept))
}

fn transpose(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let (first, second) = if a.has("dim0") { ("dim0", "dim1") } else { ("axis0", "axis1") };
    let (i, j) = (wrap(a.int(first)?, rank)?, wrap(a.int(second)?, rank)?);
    let mut dims: Vec<usize> = (0..rank).collect();
    if rank > 0 {
        dims.swap(i, j);
    }
    view_of_self(a, vec![Step::Permute(Permute { dims })])
}

fn reversed(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    view_of_self(a, vec![Step::Permute(Permute { dims: (0..c.rank(x)).rev().collect() })])
}

fn swap_last(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    if rank < 2 {
        return Err("it needs at least two dimensions".into());
    }
    let mut dims: Vec<usize> = (0..rank).collect();
    dims.swap(rank - 1, rank - 2);
    view_of_self(a, vec![Step::Permute(Permute { dims })])
}

fn permute(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let dims = a.ints("dims")?.into_iter().map(|d| wrap(d, rank)).collect::<Result<Vec<_>>>()?;
    view_of_self(a, vec![Step::Permute(Permute { dims })])
}

fn movedim(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let wrapped = |name| a.ints(name)?.into_iter().map(|d| wrap(d, rank)).collect::<Result<Vec<_>>>();
    let (from, to) = (wrapped("source")?, wrapped("destination")?);
    let mut rest = (0..rank).filter(|d| !from.contains(d));
    let dims: Option<Vec<usize>> = (0..rank)
        .map(|d| to.iter().position(|t| *t == d).and_then(|i| from.get(i).copied()).or_else(|| rest.next()))
        .collect();
    let dims = dims.ok_or("its source and destination dimensions do not match")?;
    view_of_self(a, vec![Step::Permute(Permute { dims })])
}

/// Replaces each -1 in a shape by the size that the dimension has.
fn expanded(shape: &[i64], ty: &TensorType) -> Result<Vec<usize>> {
    let lead = shape
        .len()
        .checked_sub(ty.rank())
        .ok_or_else(|| TranslationError(format!("cannot expand {ty} to {shape:?}")))?;
    shape
        .iter()
        .enumerate()
        .map(|(d, &n)| if n == -1 && d >= lead { Ok(ty.shape[d - lead]) } else { size(n) })
        .collect()
}

fn expand(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = expanded(&a.ints("size")?, c.ty(x))?;
    view_of_self(a, vec![Step::Expand(Expand { shape })])
}

fn expand_as(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let other = a.value(c, "other")?;
    let shape = c.shape(other);
    view_of_self(a, vec![Step::Expand(Expand { shape })])
}

/// Views of all tensors, repeated to their common shape.
fn broadcast_tensors(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let all = a.tensors("tensors")?;
    let shapes = all.iter().map(|t| c.read(*t).map(|v| c.shape(v))).collect::<Result<Vec<_>>>()?;
    let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
    let shape = fusionllm_graph::ops::broadcast_shapes(&shapes)?;
    Ok(all.into_iter().map(|t| Output::View(t, vec![Step::Expand(Expand { shape: shape.clone() })])).collect())
}

/// Views of all axes, each repeated along the others.
fn meshgrid(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let axes = a.tensors("tensors")?;
    let mut order: Vec<usize> = (0..axes.len()).collect();
    if a.string("indexing") == Some("xy") && axes.len() >= 2 {
        order.swap(0, 1);
    }
    let mut shape = vec![1; axes.len()];
    for (i, axis) in axes.iter().enumerate() {
        let value = c.read(*axis)?;
        shape[order[i]] = c.ty(value).numel();
    }
    let grid = |(i, axis): (usize, TensorId)| {
        let mut along = vec![1; shape.len()];
        along[order[i]] = shape[order[i]];
        let expand = Expand { shape: shape.clone() };
        Output::View(axis, vec![Step::Reshape(Reshape { shape: along }), Step::Expand(expand)])
    };
    Ok(axes.into_iter().enumerate().map(grid).collect())
}

fn without(mut shape: Vec<usize>, dim: usize) -> Vec<usize> {
    shape.remove(dim);
    shape
}

pub(super) fn select(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let (dim, at) = selected(a, &shape)?;
    view_of_self(a, selection(dim, at, without(shape, dim)))
}

/// The steps to one slice of a dimension, without that dimension.
fn selection(dim: usize, at: usize, shape: Vec<usize>) -> Vec<Step> {
    let slice = Slice { dim, start: at, end: at + 1, step: 1 };
    vec![Step::Slice(slice), Step::Reshape(Reshape { shape })]
}

/// The dimension and the index of `select`.
fn selected(a: &Call<'_>, shape: &[usize]) -> Result<(usize, usize)> {
    let dim = wrap(a.int("dim")?, shape.len())?;
    let n = *shape.get(dim).ok_or("a scalar has nothing to select")?;
    let at = a.int("index")?;
    let at = if at < 0 { at.checked_add(n as i64).unwrap_or(-1) } else { at };
    match usize::try_from(at) {
        Ok(at) if at < n => Ok((dim, at)),
        _ => Err(format!("index {} is out of range for size {n}", a.int("index")?).into()),
    }
}

/// The slice that `dim`, `start`, `end` and `step` describe, limited to the size of the dimension.
fn sliced(a: &Call<'_>, shape: &[usize]) -> Result<Slice> {
    let dim = wrap(a.int_or("dim", 0)?, shape.len())?;
    let n = *shape.get(dim).ok_or("a scalar cannot be sliced")? as i64;
    let limit = |at: i64| (if at < 0 { at.saturating_add(n) } else { at }).clamp(0, n);
    let start = limit(a.int_or("start", 0)?);
    let end = limit(a.int_or("end", i64::MAX)?).max(start);
    let step = a.int_or("step", 1)?;
    if step < 1 {
        return Err(format!("its step is {step}, but it must be positive").into());
    }
    Ok(Slice { dim, start: start as usize, end: end as usize, step: step as usize })
}

fn slice_steps(shape: &[usize], slice: &Slice) -> Vec<Step> {
    let whole = slice.start == 0 && slice.step == 1 && slice.end == shape[slice.dim];
    if whole { Vec::new() } else { vec![Step::Slice(slice.clone())] }
}

pub(super) fn slice(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let slice = sliced(a, &shape)?;
    view_of_self(a, slice_steps(&shape, &slice))
}

fn narrow(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = wrap(a.int("dim")?, shape.len())?;
    let n = shape.get(dim).copied().unwrap_or(0) as i64;
    let start = a.int("start")?;
    let start = size(if start < 0 { start.saturating_add(n) } else { start })?;
    let end = start.checked_add(size(a.int("length")?)?).ok_or("its length is too large")?;
    view_of_self(a, slice_steps(&shape, &Slice { dim, start, end, step: 1 }))
}

/// Cuts a dimension into views of these sizes.
fn parts(a: &Call<'_>, shape: &[usize], dim: usize, sizes: &[usize]) -> Result<Vec<Output>> {
    let tensor = a.first_tensor()?;
    let mut start = 0usize;
    let mut outs = Vec::with_capacity(sizes.len());
    for &n in sizes {
        let end =
            start.checked_add(n).filter(|end| *end <= shape[dim]).ok_or("its parts are larger than the dimension")?;
        outs.push(Output::View(tensor, slice_steps(shape, &Slice { dim, start, end, step: 1 })));
        start = end;
    }
    Ok(outs)
}

/// The sizes of parts of `each` elements. The last part may be smaller.
fn equal_parts(a: &Call<'_>, total: usize, each: usize) -> Result<Vec<usize>> {
    if each == 0 {
        return if total == 0 { Ok(vec![0]) } else { Err("its parts have size 0".into()) };
    }
    let count = total.div_ceil(each).max(1);
    if count > a.outputs().len() {
        return Err("it has more parts than the file declares results".into());
    }
    Ok((0..count).map(|i| each.min(total - i * each)).collect())
}

fn split(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = dimension(a, &shape)?;
    let sizes = match a.has("split_sizes") {
        true => a.sizes("split_sizes")?,
        false if a.overload == "sizes" => a.sizes("split_size")?,
        false => equal_parts(a, shape[dim], size(a.int("split_size")?)?)?,
    };
    parts(a, &shape, dim, &sizes)
}

fn dimension(a: &Call<'_>, shape: &[usize]) -> Result<usize> {
    if shape.is_empty() {
        return Err("a scalar cannot be split".into());
    }
    wrap(a.int_or("dim", 0)?, shape.len())
}

fn chunk(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = dimension(a, &shape)?;
    let chunks = size(a.int("chunks")?)?.max(1);
    let sizes = equal_parts(a, shape[dim], shape[dim].div_ceil(chunks))?;
    parts(a, &shape, dim, &sizes)
}

/// Cuts a dimension at these indices, or into a number of parts. If the number does not divide the dimension, the first
/// parts are larger by one.
fn tensor_split(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = dimension(a, &shape)?;
    let n = shape[dim];
    let sizes: Vec<usize> = if a.overload == "indices" {
        let at = |i: i64| (if i < 0 { i.saturating_add(n as i64) } else { i }).clamp(0, n as i64) as usize;
        let ends: Vec<usize> = a.ints("indices")?.into_iter().map(at).chain([n]).collect();
        let starts = std::iter::once(0).chain(ends.iter().copied());
        if ends.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err("its indices are not in ascending order".into());
        }
        ends.iter().zip(starts).map(|(end, start)| end - start).collect()
    } else {
        let count = size(a.int("sections")?)?.max(1);
        if count > a.outputs().len() {
            return Err("it has more parts than the file declares results".into());
        }
        (0..count).map(|i| n / count + usize::from(i < n % count)).collect()
    };
    parts(a, &shape, dim, &sizes)
}

fn unbind(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = dimension(a, &shape)?;
    let tensor = a.first_tensor()?;
    if shape[dim] > a.outputs().len() {
        return Err("it has more parts than the file declares results".into());
    }
    let rest = without(shape.clone(), dim);
    Ok((0..shape[dim]).map(|i| Output::View(tensor, selection(dim, i, rest.clone()))).collect())
}
