//! Views of tensors, and operators that move elements.

use fusionllm_graph::ops::{ConstantPad, Permute, Reshape, Slice};
use fusionllm_graph::{Op, TensorType};

use super::{entries, one};
use crate::archive::row_major;
use crate::call::{Call, Out, size, wrap, wrap_all};
use crate::context::{Context, Result, Val};
use crate::error::Refused;

entries! {
    "view" ["default", "dtype"] => view,
    "_unsafe_view" ["default"] => view,
    "reshape" ["default"] => reshape,
    "view_as" ["default"] => |c, a| like(c, a, "other"),
    "reshape_as" ["default"] => |c, a| like(c, a, "other"),
    "flatten" ["using_ints"] => flatten,
    "unflatten" ["int"] => unflatten,
    "unsqueeze" ["default"] => unsqueeze,
    "squeeze" ["default", "dim", "dims"] => squeeze,
    "transpose" ["int"] => transpose,
    "swapaxes" ["default"] => transpose,
    "t" ["default"] => |c, a| reversed(c, a),
    "numpy_T" ["default"] => |c, a| reversed(c, a),
    "mT" ["default"] => |c, a| swap_last(c, a),
    "adjoint" ["default"] => |c, a| swap_last(c, a),
    "permute" ["default"] => permute,
    "movedim" ["int", "intlist"] => movedim,
    "expand" ["default"] => expand,
    "expand_as" ["default"] => expand_as,
    "broadcast_to" ["default"] => expand,
    "select" ["int"] => select,
    "slice" ["Tensor"] => slice,
    "narrow" ["default"] => narrow,
    "split" ["Tensor", "sizes"] => split,
    "split_with_sizes" ["default"] => split,
    "chunk" ["default"] => chunk,
    "tensor_split" ["sections"] => tensor_split,
    "unbind" ["int"] => unbind,
    "diagonal" ["default"] => diagonal,
    "unfold" ["default"] => unfold,
    "as_strided" ["default"] => as_strided,
    "alias" ["default"] => |_, a| Ok(vec![Out::Same(a.first_tensor()?)]),
    "contiguous" ["default"] => copy_of,
    "clone" ["default"] => copy_of,
    "lift_fresh_copy" ["default"] => copy_of,
    "positive" ["default"] => copy_of,
    "detach" ["default"] => detach,
    "to" ["dtype", "dtype_layout", "device", "other"] => to,
    "_to_copy" ["default"] => to,
    "type_as" ["default"] => to,
    "float" ["default"] => to,
    "copy" ["default"] => copy,
    "cat" ["default"] => cat,
    "concat" ["default"] => cat,
    "stack" ["default"] => stack,
    "repeat" ["default"] => repeat,
    "tile" ["default"] => repeat,
    "repeat_interleave" ["self_int"] => repeat_interleave,
    "roll" ["default"] => roll,
    "flip" ["default"] => flip,
    "rot90" ["default"] => rot90,
    "pad" ["default"] => pad,
    "constant_pad_nd" ["default"] => pad,
    "reflection_pad1d" ["default"] => |c, a| mirrored(c, a, "reflect"),
    "reflection_pad2d" ["default"] => |c, a| mirrored(c, a, "reflect"),
    "replication_pad1d" ["default"] => |c, a| mirrored(c, a, "replicate"),
    "replication_pad2d" ["default"] => |c, a| mirrored(c, a, "replicate"),
    "slice_scatter" ["default"] => slice_scatter,
    "select_scatter" ["default"] => select_scatter,
    "meshgrid" ["default", "indexing"] => meshgrid,
    "broadcast_tensors" ["default"] => broadcast_tensors,
    "pixel_shuffle" ["default"] => pixel_shuffle,
    "pixel_unshuffle" ["default"] => pixel_unshuffle,
    "channel_shuffle" ["default"] => channel_shuffle,
}

fn as_reshape(shape: Vec<usize>) -> Vec<Op> {
    vec![Reshape { shape }.into()]
}

/// A view of `self`.
fn seen(a: &Call<'_>, ops: Vec<Op>) -> Result<Vec<Out>> {
    Ok(vec![Out::View(a.first_tensor()?, ops)])
}

/// A shape with at most one -1, which is worked out.
fn resolved(shape: &[i64], ty: &TensorType) -> Result<Vec<usize>> {
    let refused = || Refused(format!("cannot view {ty} as {shape:?}"));
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

fn view(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    if a.overload == "dtype" {
        let x = a.value(c, "self")?;
        if a.dtype(c, "dtype")? == Some(c.dtype(x)) {
            return Ok(vec![Out::Same(a.first_tensor()?)]);
        }
        return Err("reading the same bits as another type is not supported".into());
    }
    let x = a.value(c, "self")?;
    let shape = resolved(&a.ints(if a.has("size") { "size" } else { "shape" })?, c.ty(x))?;
    seen(a, as_reshape(shape))
}

/// `reshape` gives a view where that is possible, and that it is for a tensor that stands in row-major order.
fn reshape(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = resolved(&a.ints("shape")?, c.ty(x))?;
    reshaped(c, a, shape)
}

fn reshaped(c: &mut Context<'_>, a: &Call<'_>, shape: Vec<usize>) -> Result<Vec<Out>> {
    if contiguous(c, a)? {
        return seen(a, as_reshape(shape));
    }
    let x = a.value(c, "self")?;
    one(c.reshape(x, &shape)?)
}

/// Whether `self` stands in row-major order, as far as the file tells.
fn contiguous(c: &mut Context<'_>, a: &Call<'_>) -> Result<bool> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let strides = a.meta("self").map(|m| m.strides.iter().map(crate::archive::plain_size).collect::<Vec<_>>());
    let Some(strides) = strides.filter(|s| s.len() == shape.len()) else { return Ok(true) };
    let expected = row_major(&shape);
    // Strides that depend on the batch are those of ordinary tensors.
    Ok(strides.iter().zip(&expected).zip(&shape).all(|((s, e), n)| *n <= 1 || s.as_ref().map_or(true, |s| s == e)))
}

fn like(c: &mut Context<'_>, a: &Call<'_>, other: &str) -> Result<Vec<Out>> {
    let other = a.value(c, other)?;
    let shape = c.shape(other);
    reshaped(c, a, shape)
}

fn flatten(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    if shape.is_empty() {
        return reshaped(c, a, vec![1]);
    }
    let (first, last) = (wrap(a.int_or("start_dim", 0)?, shape.len())?, wrap(a.int_or("end_dim", -1)?, shape.len())?);
    if first > last {
        return Err("flattens no dimension".into());
    }
    let mut flat = shape[..first].to_vec();
    flat.push(shape[first..=last].iter().product());
    flat.extend(&shape[last + 1..]);
    reshaped(c, a, flat)
}

fn unflatten(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let mut shape = c.shape(x);
    let dim = wrap(a.int("dim")?, shape.len())?;
    let part = TensorType::new(c.dtype(x), [shape.get(dim).copied().unwrap_or(1)]);
    let sizes = resolved(&a.ints("sizes")?, &part)?;
    shape.splice(dim..(dim + 1).min(shape.len()), sizes);
    seen(a, as_reshape(shape))
}

fn unsqueeze(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let mut shape = c.shape(x);
    shape.insert(wrap(a.int("dim")?, shape.len() + 1)?, 1);
    seen(a, as_reshape(shape))
}

fn squeeze(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dims = match a.overload {
        "default" => (0..shape.len()).collect(),
        // An empty list means none here.
        _ => match a.ints("dim")? {
            dims if dims.is_empty() => Vec::new(),
            dims => wrap_all(&dims, shape.len())?,
        },
    };
    let kept = (0..shape.len()).filter(|d| !(dims.contains(d) && shape[*d] == 1)).map(|d| shape[d]).collect();
    seen(a, as_reshape(kept))
}

fn transpose(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let (first, second) = if a.has("dim0") { ("dim0", "dim1") } else { ("axis0", "axis1") };
    let (i, j) = (wrap(a.int(first)?, rank)?, wrap(a.int(second)?, rank)?);
    let mut dims: Vec<usize> = (0..rank).collect();
    if rank > 0 {
        dims.swap(i, j);
    }
    seen(a, vec![Permute { dims }.into()])
}

fn reversed(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    seen(a, vec![Permute { dims: (0..c.rank(x)).rev().collect() }.into()])
}

fn swap_last(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    if rank < 2 {
        return Err("needs at least two dimensions".into());
    }
    let mut dims: Vec<usize> = (0..rank).collect();
    dims.swap(rank - 1, rank - 2);
    seen(a, vec![Permute { dims }.into()])
}

fn permute(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let dims = a.ints("dims")?.into_iter().map(|d| wrap(d, rank)).collect::<Result<Vec<_>>>()?;
    seen(a, vec![Permute { dims }.into()])
}

fn movedim(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let wrapped = |name| a.ints(name)?.into_iter().map(|d| wrap(d, rank)).collect::<Result<Vec<_>>>();
    let (from, to) = (wrapped("source")?, wrapped("destination")?);
    let mut rest = (0..rank).filter(|d| !from.contains(d));
    let dims: Option<Vec<usize>> = (0..rank)
        .map(|d| to.iter().position(|t| *t == d).and_then(|i| from.get(i).copied()).or_else(|| rest.next()))
        .collect();
    seen(a, vec![Permute { dims: dims.ok_or("its dimensions do not fit")? }.into()])
}

/// A shape in which -1 keeps what is there.
fn expanded(shape: &[i64], ty: &TensorType) -> Result<Vec<usize>> {
    let lead = shape.len().checked_sub(ty.rank()).ok_or_else(|| Refused(format!("cannot expand {ty} to {shape:?}")))?;
    shape
        .iter()
        .enumerate()
        .map(|(d, &n)| if n == -1 && d >= lead { Ok(ty.shape[d - lead]) } else { size(n) })
        .collect()
}

fn expand(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = expanded(&a.ints("size")?, c.ty(x))?;
    seen(a, vec![fusionllm_graph::ops::Expand { shape }.into()])
}

fn expand_as(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let other = a.value(c, "other")?;
    let shape = c.shape(other);
    seen(a, vec![fusionllm_graph::ops::Expand { shape }.into()])
}

fn without(mut shape: Vec<usize>, dim: usize) -> Vec<usize> {
    shape.remove(dim);
    shape
}

fn select(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let (dim, at) = selected(a, &shape)?;
    let ops =
        vec![Slice { dim, start: at, end: at + 1, step: 1 }.into(), Reshape { shape: without(shape, dim) }.into()];
    seen(a, ops)
}

/// The dimension and the position in it.
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

/// The slice that `dim`, `start`, `end` and `step` ask for, cut to what is there.
fn sliced(a: &Call<'_>, shape: &[usize]) -> Result<Slice> {
    let dim = wrap(a.int_or("dim", 0)?, shape.len())?;
    let n = *shape.get(dim).ok_or("a scalar cannot be sliced")? as i64;
    let limit = |at: i64| (if at < 0 { at.saturating_add(n) } else { at }).clamp(0, n);
    let start = limit(a.int_or("start", 0)?);
    let end = limit(a.int_or("end", i64::MAX)?).max(start);
    let step = a.int_or("step", 1)?;
    if step < 1 {
        return Err(format!("a step of {step} is not possible").into());
    }
    Ok(Slice { dim, start: start as usize, end: end as usize, step: step as usize })
}

fn part(shape: &[usize], slice: &Slice) -> Vec<Op> {
    let whole = slice.start == 0 && slice.step == 1 && slice.end == shape[slice.dim];
    if whole { Vec::new() } else { vec![slice.clone().into()] }
}

fn slice(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let slice = sliced(a, &shape)?;
    seen(a, part(&shape, &slice))
}

fn narrow(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = wrap(a.int("dim")?, shape.len())?;
    let n = shape.get(dim).copied().unwrap_or(0) as i64;
    let start = a.int("start")?;
    let start = size(if start < 0 { start.saturating_add(n) } else { start })?;
    let end = start.checked_add(size(a.int("length")?)?).ok_or("its length is too large")?;
    seen(a, part(&shape, &Slice { dim, start, end, step: 1 }))
}

/// Views of the parts of a dimension, of those sizes.
fn parts(a: &Call<'_>, shape: &[usize], dim: usize, sizes: &[usize]) -> Result<Vec<Out>> {
    let tensor = a.first_tensor()?;
    let mut start = 0usize;
    let mut outs = Vec::with_capacity(sizes.len());
    for &n in sizes {
        let end = start.checked_add(n).filter(|end| *end <= shape[dim]).ok_or("its parts reach over the end")?;
        outs.push(Out::View(tensor, part(shape, &Slice { dim, start, end, step: 1 })));
        start = end;
    }
    Ok(outs)
}

/// Sizes of parts that are `each` long but for the last.
fn equal_parts(a: &Call<'_>, total: usize, each: usize) -> Result<Vec<usize>> {
    if each == 0 {
        return if total == 0 { Ok(vec![0]) } else { Err("parts of no size are not possible".into()) };
    }
    let count = total.div_ceil(each).max(1);
    if count > a.outputs().len() {
        return Err("it has more parts than results".into());
    }
    Ok((0..count).map(|i| each.min(total - i * each)).collect())
}

fn split(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
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
        return Err("a scalar cannot be cut".into());
    }
    wrap(a.int_or("dim", 0)?, shape.len())
}

fn chunk(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = dimension(a, &shape)?;
    let chunks = size(a.int("chunks")?)?.max(1);
    let sizes = equal_parts(a, shape[dim], shape[dim].div_ceil(chunks))?;
    parts(a, &shape, dim, &sizes)
}

/// As many parts as asked, the first ones longer by one.
fn tensor_split(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = dimension(a, &shape)?;
    let count = size(a.int("sections")?)?.max(1);
    if count > a.outputs().len() {
        return Err("it has more parts than results".into());
    }
    let (each, more) = (shape[dim] / count, shape[dim] % count);
    let sizes: Vec<usize> = (0..count).map(|i| each + usize::from(i < more)).collect();
    parts(a, &shape, dim, &sizes)
}

fn unbind(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = dimension(a, &shape)?;
    let tensor = a.first_tensor()?;
    if shape[dim] > a.outputs().len() {
        return Err("it has more parts than results".into());
    }
    let rest = without(shape.clone(), dim);
    Ok((0..shape[dim])
        .map(|i| {
            let slice = Slice { dim, start: i, end: i + 1, step: 1 };
            Out::View(tensor, vec![slice.into(), Reshape { shape: rest.clone() }.into()])
        })
        .collect())
}

/// Picks elements by their row-major positions.
fn picked(c: &mut Context<'_>, x: Val, shape: &[usize], positions: &[i64]) -> Result<Val> {
    let flat = c.reshape(x, &[c.ty(x).numel()])?;
    let y = c.pick(flat, 0, positions)?;
    c.reshape(y, shape)
}

/// Positions `Σ index · stride + first` of all indices of a shape, unless they are too many.
fn positions(shape: &[usize], strides: &[i64], first: i64) -> Result<Vec<i64>> {
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).filter(|n| *n <= 1 << 24);
    count.ok_or("it addresses too many elements")?;
    let mut all = vec![first];
    for (&n, &stride) in shape.iter().zip(strides) {
        all = all.iter().flat_map(|&at| (0..n as i64).map(move |i| at.wrapping_add(i.wrapping_mul(stride)))).collect();
    }
    Ok(all)
}

fn diagonal(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let rank = shape.len();
    let (i, j) = (wrap(a.int_or("dim1", 0)?, rank)?, wrap(a.int_or("dim2", 1)?, rank)?);
    if rank < 2 || i == j {
        return Err("needs two dimensions".into());
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
    let at = positions(&out, &steps, if length == 0 { 0 } else { first })?;
    one(picked(c, x, &out, &at)?)
}

/// Windows of a dimension, laid out along a new last one.
fn unfold(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let dim = wrap(a.int("dimension")?, shape.len())?;
    let (window, step) = (size(a.int("size")?)?, size(a.int("step")?)?);
    let n = shape.get(dim).copied().unwrap_or(0);
    if window > n || step == 0 {
        return Err(format!("windows of {window} by {step} do not fit size {n}").into());
    }
    let count = (n - window) / step + 1;
    let at = positions(&[count, window], &[step as i64, 1], 0)?;
    let y = c.pick(x, dim, &at)?;
    let mut split = shape.clone();
    split.splice(dim..=dim, [count, window]);
    let y = c.reshape(y, &split)?;
    let mut dims: Vec<usize> = (0..split.len()).filter(|d| *d != dim + 1).collect();
    dims.push(dim + 1);
    one(c.permute(y, &dims)?)
}

/// Reads elements by their place in memory, which the file gives for `self`.
fn as_strided(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = a.sizes("size")?;
    let strides = a.ints("stride")?;
    if strides.len() != shape.len() {
        return Err("its sizes and strides differ in number".into());
    }
    let own = c.shape(x);
    let meta = a.meta("self").ok_or("the file does not describe its operand")?;
    let own_strides = meta.strides.iter().map(|s| crate::archive::plain_size(s).map(|s| s as i64));
    let own_strides = own_strides.collect::<std::result::Result<Vec<_>, _>>()?;
    let first = meta.storage_offset.as_ref().map(crate::archive::plain_size).transpose()?.unwrap_or(0) as i64;
    let wanted = positions(&shape, &strides, a.int_or("storage_offset", first)?)?;
    let mut place = std::collections::HashMap::new();
    for (i, at) in positions(&own, &own_strides, first)?.into_iter().enumerate() {
        place.insert(at, i as i64);
    }
    let at: Option<Vec<i64>> = wanted.iter().map(|p| place.get(p).copied()).collect();
    let at = at.ok_or("reads memory outside of its operand")?;
    if at.len() == c.ty(x).numel() && at.iter().enumerate().all(|(i, p)| i as i64 == *p) {
        return one(c.reshape(x, &shape)?);
    }
    one(picked(c, x, &shape, &at)?)
}

/// A copy holds the same values and is written on its own.
fn copy_of(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    if a.name == "contiguous" && contiguous(c, a)? {
        return Ok(vec![Out::Same(a.first_tensor()?)]);
    }
    one(a.value(c, "self")?)
}

fn detach(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    one(c.detach(x)?)
}

fn to(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    if c.dtype(x) == dtype && a.name != "_to_copy" && !a.bool_or("copy", false)? {
        return Ok(vec![Out::Same(a.first_tensor()?)]);
    }
    one(c.cast(x, dtype)?)
}

/// `src` in the type and shape of `self`.
fn copy(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let (x, y) = (a.value(c, "self")?, a.value(c, "src")?);
    let ty = c.ty(x).clone();
    let y = c.cast(y, ty.dtype)?;
    one(c.expand(y, &ty.shape)?)
}

fn cat(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let parts = a.values(c, "tensors")?;
    let dtype = a.result_type(c, 0)?;
    // An empty vector may stand beside tensors of any shape.
    let rank = parts.iter().map(|v| c.rank(*v)).max().unwrap_or(0);
    let parts: Vec<Val> = parts.into_iter().filter(|v| c.ty(*v).shape != [0] || rank == 1).collect();
    let parts = parts.into_iter().map(|v| c.cast(v, dtype)).collect::<Result<Vec<_>>>()?;
    let dim = wrap(a.int_or("dim", 0)?, rank)?;
    one(c.cat(&parts, dim)?)
}

fn stack(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let parts = a.values(c, "tensors")?;
    let rank = parts.first().map_or(0, |v| c.rank(*v));
    let dim = wrap(a.int_or("dim", 0)?, rank + 1)?;
    let mut raised = Vec::with_capacity(parts.len());
    for v in parts {
        let mut shape = c.shape(v);
        if dim > shape.len() {
            return Err("its tensors differ in shape".into());
        }
        shape.insert(dim, 1);
        raised.push(c.reshape(v, &shape)?);
    }
    one(c.cat(&raised, dim)?)
}

fn repeat(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let mut times = a.sizes(if a.has("repeats") { "repeats" } else { "dims" })?;
    let mut shape = c.shape(x);
    while times.len() < shape.len() {
        times.insert(0, 1);
    }
    while shape.len() < times.len() {
        shape.insert(0, 1);
    }
    let interleaved: Vec<usize> = shape.iter().flat_map(|&n| [1, n]).collect();
    let spread: Vec<usize> = shape.iter().zip(&times).flat_map(|(&n, &t)| [t, n]).collect();
    let whole = shape.iter().zip(&times).map(|(n, t)| n.checked_mul(*t).ok_or("its result is too large"));
    let whole = whole.collect::<std::result::Result<Vec<_>, _>>()?;
    let y = c.reshape(x, &interleaved)?;
    let y = c.expand(y, &spread)?;
    one(c.reshape(y, &whole)?)
}

/// Every slice of a dimension several times in a row.
fn repeat_interleave(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let mut x = a.value(c, "self")?;
    let times = size(a.int("repeats")?)?;
    let dim = match a.has("dim") {
        true => wrap(a.int("dim")?, c.rank(x))?,
        false => {
            x = c.reshape(x, &[c.ty(x).numel()])?;
            0
        }
    };
    let shape = c.shape(x);
    let n = *shape.get(dim).ok_or("a scalar has no slices")?;
    let mut spread = shape.clone();
    spread.insert(dim + 1, 1);
    let y = c.reshape(x, &spread)?;
    spread[dim + 1] = times;
    let y = c.expand(y, &spread)?;
    let mut whole = shape;
    whole[dim] = n.checked_mul(times).ok_or("its result is too large")?;
    one(c.reshape(y, &whole)?)
}

fn roll(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let whole = c.shape(x);
    let (shifts, dims) = (a.ints("shifts")?, a.ints_or("dims", &[])?);
    let flat = dims.is_empty();
    let mut y = if flat { c.reshape(x, &[c.ty(x).numel()])? } else { x };
    let dims = if flat { vec![0] } else { dims };
    if shifts.len() != dims.len() {
        return Err("its shifts and dimensions differ in number".into());
    }
    for (shift, dim) in shifts.into_iter().zip(dims) {
        let dim = wrap(dim, c.rank(y))?;
        let n = c.shape(y).get(dim).copied().unwrap_or(0);
        if n == 0 {
            continue;
        }
        let cut = n - shift.rem_euclid(n as i64) as usize;
        let (head, tail) = (c.slice(y, dim, 0, cut, 1)?, c.slice(y, dim, cut, n, 1)?);
        y = c.cat(&[tail, head], dim)?;
    }
    one(c.reshape(y, &whole)?)
}

fn flip(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let dims = a.ints("dims")?;
    if dims.is_empty() {
        return one(x);
    }
    let dims = wrap_all(&dims, c.rank(x))?;
    one(c.flip(x, &dims)?)
}

fn rot90(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let dims = a.ints_or("dims", &[0, 1])?;
    let [i, j] = dims[..] else { return Err("needs two dimensions".into()) };
    let (i, j) = (wrap(i, rank)?, wrap(j, rank)?);
    let mut swapped: Vec<usize> = (0..rank).collect();
    swapped.swap(i, j);
    one(match a.int_or("k", 1)?.rem_euclid(4) {
        0 => x,
        1 => {
            let y = c.flip(x, &[j])?;
            c.permute(y, &swapped)?
        }
        2 => c.flip(x, &[i.min(j), i.max(j)])?,
        _ => {
            let y = c.permute(x, &swapped)?;
            c.flip(y, &[j])?
        }
    })
}

fn pad(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    match a.text("mode") {
        None | Some("constant") => {}
        Some(mode) => return mirrored(c, a, mode),
    }
    let x = a.value(c, "self")?;
    let pads = margins(a, "pad", c.rank(x))?;
    one(padded(c, x, &pads, a.number_or("value", 0.0)?)?)
}

/// What is to be added before and after each dimension, as `pad` lists it: the last dimension first.
fn margins(a: &Call<'_>, name: &str, rank: usize) -> Result<Vec<[i64; 2]>> {
    let flat = a.ints(name)?;
    if flat.len() % 2 != 0 || flat.len() / 2 > rank {
        return Err(format!("{} pads do not fit {rank} dimensions", flat.len()).into());
    }
    let mut pads = vec![[0, 0]; rank];
    for (i, pair) in flat.chunks_exact(2).enumerate() {
        pads[rank - 1 - i] = [pair[0], pair[1]];
    }
    Ok(pads)
}

/// Surrounded by a number; what is negative is cut off.
pub(super) fn padded(c: &mut Context<'_>, mut x: Val, pads: &[[i64; 2]], value: f64) -> Result<Val> {
    for (dim, &[before, after]) in pads.iter().enumerate() {
        if before < 0 || after < 0 {
            let n = c.shape(x)[dim];
            let cut = |p: i64| size(p.min(0).saturating_neg());
            let end = n.checked_sub(cut(after)?).ok_or("cuts off more than there is")?;
            x = c.slice(x, dim, cut(before)?.min(end), end, 1)?;
        }
    }
    if pads.iter().flatten().all(|p| *p <= 0) {
        return Ok(x);
    }
    let pads = pads.iter().map(|p| p.map(|n| n.max(0) as usize)).collect();
    c.op(ConstantPad { pads, value }, &[x])
}

/// Surrounded by what lies inside.
fn mirrored(c: &mut Context<'_>, a: &Call<'_>, mode: &str) -> Result<Vec<Out>> {
    let mut x = a.value(c, "self")?;
    let pads = margins(a, if a.has("pad") { "pad" } else { "padding" }, c.rank(x))?;
    for (dim, [before, after]) in pads.into_iter().enumerate() {
        if before == 0 && after == 0 {
            continue;
        }
        let n = c.shape(x)[dim] as i64;
        let limit = if mode == "reflect" { n - 1 } else { 1 << 20 };
        if n == 0 || n > 1 << 24 || before < 0 || after < 0 || before > limit || after > limit {
            return Err(format!("pads of {before} and {after} do not fit size {n}").into());
        }
        let at: Vec<i64> = (-before..n + after)
            .map(|i| match mode {
                "reflect" if i < 0 => Ok(-i),
                "reflect" if i >= n => Ok(2 * (n - 1) - i),
                "reflect" => Ok(i),
                "replicate" => Ok(i.clamp(0, n - 1)),
                "circular" => Ok(i.rem_euclid(n)),
                _ => Err(Refused(format!("padding by {mode:?} is not known"))),
            })
            .collect::<Result<_>>()?;
        x = c.pick(x, dim, &at)?;
    }
    one(x)
}

fn slice_scatter(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let (x, src) = (a.value(c, "self")?, a.value(c, "src")?);
    let shape = c.shape(x);
    let slice = sliced(a, &shape)?;
    let mut part = shape;
    part[slice.dim] = (slice.end - slice.start).div_ceil(slice.step);
    let src = c.cast(src, c.dtype(x))?;
    let src = c.expand(src, &part)?;
    one(c.slice_scatter(x, src, &slice)?)
}

fn select_scatter(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let (x, src) = (a.value(c, "self")?, a.value(c, "src")?);
    let mut part = c.shape(x);
    let (dim, at) = selected(a, &part)?;
    part[dim] = 1;
    let src = c.cast(src, c.dtype(x))?;
    let src = c.reshape(src, &part)?;
    one(c.slice_scatter(x, src, &Slice { dim, start: at, end: at + 1, step: 1 })?)
}

fn meshgrid(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let axes = a.values(c, "tensors")?;
    let mut order: Vec<usize> = (0..axes.len()).collect();
    if a.text("indexing") == Some("xy") && axes.len() >= 2 {
        order.swap(0, 1);
    }
    let mut shape = vec![1; axes.len()];
    for (i, axis) in axes.iter().enumerate() {
        shape[order[i]] = c.ty(*axis).numel();
    }
    let mut outs = Vec::new();
    for (i, axis) in axes.into_iter().enumerate() {
        let mut along = vec![1; shape.len()];
        along[order[i]] = c.ty(axis).numel();
        let y = c.reshape(axis, &along)?;
        outs.push(c.expand(y, &shape)?.into());
    }
    Ok(outs)
}

fn broadcast_tensors(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let all = a.values(c, "tensors")?;
    let shapes: Vec<Vec<usize>> = all.iter().map(|v| c.shape(*v)).collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
    let shape = fusionllm_graph::ops::broadcast_shapes(&shapes)?;
    all.into_iter().map(|v| c.expand(v, &shape).map(Out::Value)).collect()
}

/// The last three dimensions and those before.
fn image(c: &Context<'_>, x: Val) -> Result<(Vec<usize>, [usize; 3])> {
    match c.ty(x).shape[..] {
        [ref lead @ .., ch, h, w] => Ok((lead.to_vec(), [ch, h, w])),
        _ => Err("needs at least three dimensions".into()),
    }
}

/// `[.., C r², H, W]` to `[.., C, H r, W r]`.
fn pixel_shuffle(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let (lead, [ch, h, w]) = image(c, x)?;
    let r = size(a.int("upscale_factor")?)?;
    let parts = r.checked_mul(r).filter(|p| *p > 0 && ch % p == 0).ok_or("its channels do not divide")?;
    let n = lead.len();
    let y = c.reshape(x, &[&lead[..], &[ch / parts, r, r, h, w]].concat())?;
    let y = c.permute(y, &[&(0..n).collect::<Vec<_>>()[..], &[n, n + 3, n + 1, n + 4, n + 2]].concat())?;
    one(c.reshape(y, &[&lead[..], &[ch / parts, h * r, w * r]].concat())?)
}

/// `[.., C, H r, W r]` to `[.., C r², H, W]`.
fn pixel_unshuffle(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let (lead, [ch, h, w]) = image(c, x)?;
    let r = size(a.int("downscale_factor")?)?;
    if r == 0 || h % r != 0 || w % r != 0 {
        return Err("its size does not divide".into());
    }
    let n = lead.len();
    let y = c.reshape(x, &[&lead[..], &[ch, h / r, r, w / r, r]].concat())?;
    let y = c.permute(y, &[&(0..n).collect::<Vec<_>>()[..], &[n, n + 2, n + 4, n + 1, n + 3]].concat())?;
    one(c.reshape(y, &[&lead[..], &[ch * r * r, h / r, w / r]].concat())?)
}

fn channel_shuffle(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Out>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let groups = size(a.int("groups")?)?;
    let [n, ch, rest @ ..] = &shape[..] else { return Err("needs channels".into()) };
    if groups == 0 || ch % groups != 0 {
        return Err("its channels do not divide".into());
    }
    let y = c.reshape(x, &[&[*n, groups, ch / groups], rest].concat())?;
    let mut dims: Vec<usize> = (0..rest.len() + 3).collect();
    dims.swap(1, 2);
    let y = c.permute(y, &dims)?;
    one(c.reshape(y, &shape)?)
}
