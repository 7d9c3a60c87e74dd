//! Copies, conversions, and operators that rearrange or pad elements.

use fusionllm_graph::ops::ConstantPad;

use super::entry::{Translate, entries, one};
use super::strided::{as_strided, diagonal};
use super::view::{select, slice};
use crate::call::{Call, Output, size, wrap, wrap_all};
use crate::context::{Context, MAX_POSITIONS, Result, Value};
use crate::error::TranslationError;

entries! {
    "contiguous" ["default"] => copy_of,
    "clone" ["default"] => copy_of,
    "lift_fresh_copy" ["default"] => copy_of,
    "positive" ["default"] => |_, a| Ok(vec![Output::Alias(a.first_tensor()?)]),
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
    "reflection_pad1d" ["default"] => |c, a| pad_from_inside(c, a, "reflect"),
    "reflection_pad2d" ["default"] => |c, a| pad_from_inside(c, a, "reflect"),
    "replication_pad1d" ["default"] => |c, a| pad_from_inside(c, a, "replicate"),
    "replication_pad2d" ["default"] => |c, a| pad_from_inside(c, a, "replicate"),
    "slice_scatter" ["default"] => |c, a| scattered(c, a, slice),
    "select_scatter" ["default"] => |c, a| scattered(c, a, select),
    "diagonal_scatter" ["default"] => |c, a| scattered(c, a, diagonal),
    "as_strided_scatter" ["default"] => |c, a| scattered(c, a, as_strided),
    "pixel_shuffle" ["default"] => pixel_shuffle,
    "pixel_unshuffle" ["default"] => pixel_unshuffle,
    "channel_shuffle" ["default"] => channel_shuffle,
}

/// Returns a copy, which has the same values but memory of its own.
fn copy_of(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    if a.name == "contiguous" && a.keeps_layout() {
        return Ok(vec![Output::Alias(a.first_tensor()?)]);
    }
    one(a.value(c, "self")?)
}

fn to(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    if c.dtype(x) == dtype && a.name != "_to_copy" && !a.bool_or("copy", false)? && a.keeps_layout() {
        return Ok(vec![Output::Alias(a.first_tensor()?)]);
    }
    one(c.cast(x, dtype)?)
}

/// `src` with the type and shape of `self`.
fn copy(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, y) = (a.value(c, "self")?, a.value(c, "src")?);
    let ty = c.ty(x).clone();
    let y = c.cast(y, ty.dtype)?;
    one(c.expand(y, &ty.shape)?)
}

fn cat(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let parts = a.values(c, "tensors")?;
    let dtype = a.result_type(c, 0)?;
    // PyTorch ignores empty vectors among tensors of any shape.
    let rank = parts.iter().map(|v| c.rank(*v)).max().unwrap_or(0);
    let parts: Vec<Value> = parts.into_iter().filter(|v| c.ty(*v).shape != [0] || rank == 1).collect();
    let parts = parts.into_iter().map(|v| c.cast(v, dtype)).collect::<Result<Vec<_>>>()?;
    let dim = wrap(a.int_or("dim", 0)?, rank)?;
    one(c.cat(&parts, dim)?)
}

fn stack(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let parts = a.values(c, "tensors")?;
    let rank = parts.first().map_or(0, |v| c.rank(*v));
    let dim = wrap(a.int_or("dim", 0)?, rank + 1)?;
    let mut unsqueezed = Vec::with_capacity(parts.len());
    for v in parts {
        let mut shape = c.shape(v);
        if dim > shape.len() {
            return Err("its tensors have different shapes".into());
        }
        shape.insert(dim, 1);
        unsqueezed.push(c.reshape(v, &shape)?);
    }
    one(c.cat(&unsqueezed, dim)?)
}

fn repeat(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let mut times = a.sizes(if a.has("repeats") { "repeats" } else { "dims" })?;
    let mut shape = c.shape(x);
    let rank = times.len().max(shape.len());
    for sizes in [&mut times, &mut shape] {
        sizes.splice(..0, std::iter::repeat_n(1, rank - sizes.len()));
    }
    let interleaved: Vec<usize> = shape.iter().flat_map(|&n| [1, n]).collect();
    let spread: Vec<usize> = shape.iter().zip(&times).flat_map(|(&n, &t)| [t, n]).collect();
    let whole = shape.iter().zip(&times).map(|(n, t)| n.checked_mul(*t).ok_or("its result is too large"));
    let whole = whole.collect::<std::result::Result<Vec<_>, _>>()?;
    let y = c.reshape(x, &interleaved)?;
    let y = c.expand(y, &spread)?;
    one(c.reshape(y, &whole)?)
}

/// Repeats every slice of a dimension.
fn repeat_interleave(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
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

fn roll(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let whole = c.shape(x);
    let (shifts, dims) = (a.ints("shifts")?, a.ints_or("dims", &[])?);
    let flat = dims.is_empty();
    let mut y = if flat { c.reshape(x, &[c.ty(x).numel()])? } else { x };
    let dims = if flat { vec![0] } else { dims };
    if shifts.len() != dims.len() {
        return Err("it has a different number of shifts and dimensions".into());
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

fn flip(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dims = a.ints("dims")?;
    if dims.is_empty() {
        return one(x);
    }
    let dims = wrap_all(&dims, c.rank(x))?;
    one(c.flip(x, &dims)?)
}

fn rot90(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let rank = c.rank(x);
    let dims = a.ints_or("dims", &[0, 1])?;
    let [i, j] = dims[..] else { return Err("it needs two dimensions".into()) };
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

fn pad(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    match a.string("mode") {
        None | Some("constant") => {}
        Some(mode) => return pad_from_inside(c, a, mode),
    }
    let x = a.value(c, "self")?;
    let pads = margins(a, "pad", c.rank(x))?;
    one(padded(c, x, &pads, a.number_or("value", 0.0)?)?)
}

/// The elements to add before and after each dimension. PyTorch lists the last dimension first.
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

/// Pads with a constant. Negative pads cut elements off.
pub(super) fn padded(c: &mut Context<'_>, mut x: Value, pads: &[[i64; 2]], value: f64) -> Result<Value> {
    for (dim, &[before, after]) in pads.iter().enumerate() {
        if before < 0 || after < 0 {
            let n = c.shape(x)[dim];
            let cut = |p: i64| size(p.min(0).saturating_neg());
            let end = n.checked_sub(cut(after)?).ok_or("it cuts off more elements than the dimension has")?;
            x = c.slice(x, dim, cut(before)?.min(end), end, 1)?;
        }
    }
    if pads.iter().flatten().all(|p| *p <= 0) {
        return Ok(x);
    }
    let pads = pads.iter().map(|p| p.map(|n| n.max(0) as usize)).collect();
    c.op(ConstantPad { pads, value }, &[x])
}

/// Pads with elements of the tensor itself.
fn pad_from_inside(c: &mut Context<'_>, a: &Call<'_>, mode: &str) -> Result<Vec<Output>> {
    let mut x = a.value(c, "self")?;
    let pads = margins(a, if a.has("pad") { "pad" } else { "padding" }, c.rank(x))?;
    for (dim, [before, after]) in pads.into_iter().enumerate() {
        if before == 0 && after == 0 {
            continue;
        }
        let n = c.shape(x)[dim] as i64;
        let limit = if mode == "reflect" { n - 1 } else { 1 << 20 };
        if n == 0 || n > MAX_POSITIONS as i64 || before < 0 || after < 0 || before > limit || after > limit {
            return Err(format!("pads of {before} and {after} do not fit size {n}").into());
        }
        let at: Vec<i64> = (-before..n + after)
            .map(|i| match mode {
                "reflect" if i < 0 => Ok(-i),
                "reflect" if i >= n => Ok(2 * (n - 1) - i),
                "reflect" => Ok(i),
                "replicate" => Ok(i.clamp(0, n - 1)),
                "circular" => Ok(i.rem_euclid(n)),
                _ => Err(TranslationError(format!("the padding mode {mode:?} is not supported"))),
            })
            .collect::<Result<_>>()?;
        x = c.index_select(x, dim, &at)?;
    }
    one(x)
}

/// A copy of `self` whose view, of the operator that is given, is overwritten with `src`.
fn scattered(c: &mut Context<'_>, a: &Call<'_>, view: Translate) -> Result<Vec<Output>> {
    let Some(Output::View(tensor, steps)) = view(c, a)?.pop() else { return Err("it has no view".into()) };
    let whole = c.read(tensor)?;
    let copy = c.new_tensor(whole);
    let part = c.view(copy, steps)?;
    let src = a.value(c, "src")?;
    c.write(part, src)?;
    one(c.read(copy)?)
}

/// The leading dimensions, and the last three: channels, height and width.
fn image_shape(c: &Context<'_>, x: Value) -> Result<(Vec<usize>, [usize; 3])> {
    match c.ty(x).shape[..] {
        [ref lead @ .., ch, h, w] => Ok((lead.to_vec(), [ch, h, w])),
        _ => Err("it needs at least three dimensions".into()),
    }
}

/// `[.., C r², H, W]` to `[.., C, H r, W r]`.
fn pixel_shuffle(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let (lead, [ch, h, w]) = image_shape(c, x)?;
    let r = size(a.int("upscale_factor")?)?;
    let parts = r.checked_mul(r).filter(|p| *p > 0 && ch % p == 0).ok_or("its channels do not divide evenly")?;
    let n = lead.len();
    let y = c.reshape(x, &[&lead[..], &[ch / parts, r, r, h, w]].concat())?;
    let y = c.permute(y, &[&(0..n).collect::<Vec<_>>()[..], &[n, n + 3, n + 1, n + 4, n + 2]].concat())?;
    one(c.reshape(y, &[&lead[..], &[ch / parts, h * r, w * r]].concat())?)
}

/// `[.., C, H r, W r]` to `[.., C r², H, W]`.
fn pixel_unshuffle(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let (lead, [ch, h, w]) = image_shape(c, x)?;
    let r = size(a.int("downscale_factor")?)?;
    if r == 0 || h % r != 0 || w % r != 0 {
        return Err("its height and width do not divide evenly".into());
    }
    let n = lead.len();
    let y = c.reshape(x, &[&lead[..], &[ch, h / r, r, w / r, r]].concat())?;
    let y = c.permute(y, &[&(0..n).collect::<Vec<_>>()[..], &[n, n + 2, n + 4, n + 1, n + 3]].concat())?;
    one(c.reshape(y, &[&lead[..], &[ch * r * r, h / r, w / r]].concat())?)
}

fn channel_shuffle(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let shape = c.shape(x);
    let groups = size(a.int("groups")?)?;
    let [n, ch, rest @ ..] = &shape[..] else { return Err("it needs a channel dimension".into()) };
    if groups == 0 || ch % groups != 0 {
        return Err("its channels do not divide evenly".into());
    }
    let y = c.reshape(x, &[&[*n, groups, ch / groups], rest].concat())?;
    let mut dims: Vec<usize> = (0..rest.len() + 3).collect();
    dims.swap(1, 2);
    let y = c.permute(y, &dims)?;
    one(c.reshape(y, &shape)?)
}
