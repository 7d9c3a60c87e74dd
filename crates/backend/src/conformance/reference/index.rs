use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{EmbeddingDenseBackward, Index, IndexPut};

use super::{Array, Elements, indices, position};

/// An index as a position, or an error unless it is below `size`.
fn checked(i: i64, size: usize) -> Result<usize, String> {
    usize::try_from(i).ok().filter(|&i| i < size).ok_or_else(|| format!("index {i} is out of range for size {size}"))
}

fn checked_all(ids: &Array, size: usize) -> Result<Vec<usize>, String> {
    ids.ints()?.iter().map(|&i| checked(i, size)).collect()
}

/// Slices of dimension `dim` in the index's order. The index's shape replaces that dimension.
pub(super) fn select(dim: usize, x: &Array, ids: &Array, out: &TensorType) -> Result<Elements, String> {
    let at = checked_all(ids, x.shape()[dim])?;
    let rank = ids.ty.rank();
    Ok(x.elements.pick(indices(&out.shape).map(|i| {
        let mut from = i[..dim].to_vec();
        from.push(at[position(ids.shape(), &i[dim..dim + rank])]);
        from.extend(&i[dim + rank..]);
        Some(position(x.shape(), &from))
    })))
}

pub(super) fn embedding_backward(
    op: &EmbeddingDenseBackward,
    g: &Array,
    ids: &Array,
    out: &TensorType,
) -> Result<Elements, String> {
    let width = out.shape[1];
    let mut rows = Array::filled(out.clone(), 0.0).elements;
    for (n, row) in checked_all(ids, op.num_weights)?.into_iter().enumerate() {
        if op.padding_idx != Some(row) {
            for j in 0..width {
                rows.put(row * width + j, &g.elements, n * width + j, true);
            }
        }
    }
    Ok(rows)
}

pub(super) fn add(dim: usize, x: &Array, ids: &Array, source: &Array) -> Result<Elements, String> {
    let at = checked_all(ids, x.shape()[dim])?;
    let mut result = x.elements.clone();
    for (from, mut i) in indices(source.shape()).enumerate() {
        i[dim] = at[i[dim]];
        result.put(position(x.shape(), &i), &source.elements, from, true);
    }
    Ok(result)
}

/// The position in `x` that each element of the index names.
fn named(dim: usize, x: &Array, index: &Array) -> Result<Vec<usize>, String> {
    let at = index.ints()?;
    indices(index.shape())
        .enumerate()
        .map(|(n, mut i)| {
            i[dim] = checked(at[n], x.shape()[dim])?;
            Ok(position(x.shape(), &i))
        })
        .collect()
}

pub(super) fn gather(dim: usize, x: &Array, index: &Array) -> Result<Elements, String> {
    Ok(x.elements.pick(named(dim, x, index)?.into_iter().map(Some)))
}

pub(super) fn scatter(
    dim: usize,
    x: &Array,
    index: &Array,
    source: &Array,
    accumulate: bool,
) -> Result<Elements, String> {
    let mut result = x.elements.clone();
    for (from, to) in named(dim, x, index)?.into_iter().enumerate() {
        result.put(to, &source.elements, from, accumulate);
    }
    Ok(result)
}

/// The position in `x` that each result of advanced indexing reads.
fn addressed(indexed: &[bool], x: &Array, ids: &[Array], out: &[usize]) -> Result<Vec<usize>, String> {
    let types: Vec<&TensorType> = ids.iter().map(|a| &a.ty).collect();
    let (_, at, place) = Index { indexed: indexed.to_vec() }.layout(&x.ty, &types)?;
    indices(out)
        .map(|i| {
            // The result's index is: plain dimensions, with the indices' common shape at `place`.
            let common = &i[place..place + at.len()];
            let mut plain = i[..place].iter().chain(&i[place + at.len()..]);
            let mut operand = ids.iter();
            let mut from = Vec::with_capacity(indexed.len());
            for (d, &by_index) in indexed.iter().enumerate() {
                let next = match by_index {
                    true => match operand.next() {
                        Some(ids) => checked(ids.ints()?[ids.broadcast_at(common)], x.shape()[d])?,
                        None => return Err("too few index operands".to_string()),
                    },
                    false => *plain.next().ok_or("too few plain dimensions")?,
                };
                from.push(next);
            }
            Ok(position(x.shape(), &from))
        })
        .collect()
}

pub(super) fn index(indexed: &[bool], x: &Array, ids: &[Array], out: &TensorType) -> Result<Elements, String> {
    Ok(x.elements.pick(addressed(indexed, x, ids, &out.shape)?.into_iter().map(Some)))
}

pub(super) fn put(op: &IndexPut, x: &Array, values: &Array, ids: &[Array]) -> Result<Elements, String> {
    let mut result = x.elements.clone();
    for (from, to) in addressed(&op.indexed, x, ids, values.shape())?.into_iter().enumerate() {
        result.put(to, &values.elements, from, op.accumulate);
    }
    Ok(result)
}

/// The first `k` elements of a dimension in stable order, and their positions.
pub(super) fn sorted(dim: usize, k: usize, descending: bool, x: &Array) -> Vec<Elements> {
    let mut lines = x.shape().to_vec();
    lines[dim] = 1;
    let mut shape = x.shape().to_vec();
    shape[dim] = k;
    let mut from = vec![0; shape.iter().product()];
    let mut at = vec![0i64; from.len()];
    let less = |a: usize, b: usize| match &x.elements {
        Elements::Float(v) => v[a].total_cmp(&v[b]),
        Elements::Int(v) => v[a].cmp(&v[b]),
    };
    for mut i in indices(&lines) {
        let mut line: Vec<(usize, usize)> = (0..x.shape()[dim])
            .map(|n| {
                i[dim] = n;
                (n, position(x.shape(), &i))
            })
            .collect();
        line.sort_by(|a, b| if descending { less(b.1, a.1) } else { less(a.1, b.1) });
        for (n, (place, source)) in line.into_iter().take(k).enumerate() {
            i[dim] = n;
            let to = position(&shape, &i);
            from[to] = source;
            at[to] = place as i64;
        }
    }
    vec![x.elements.pick(from.into_iter().map(Some)), Elements::Int(at)]
}
