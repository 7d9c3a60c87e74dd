//! Sorting and extrema. NaN counts as larger than every number, as in PyTorch.

use std::cmp::Ordering;

use fusionllm_graph::ops::ArgReduce;

use super::Operand;
use super::element::{Number, around, elements, with_number};
use crate::kernels::Buffer;

/// The first `k` elements of each lane along `dim`, sorted stably, and their positions.
pub(super) fn sorted(x: &Operand<'_>, dim: usize, descending: bool, k: usize) -> Result<Vec<Buffer>, String> {
    let (outer, n, inner) = around(&x.ty.shape, dim);
    with_number!(x.ty.dtype, T => {
        let v = elements::<T>(x);
        let mut values = vec![T::ZERO; outer * k * inner];
        let mut positions = vec![0i64; outer * k * inner];
        let mut lane: Vec<usize> = Vec::with_capacity(n);
        for o in 0..outer {
            for i in 0..inner {
                let at = |j: usize| v[(o * n + j) * inner + i];
                lane.clear();
                lane.extend(0..n);
                match descending {
                    true => lane.sort_by(|&a, &b| at(b).order(at(a))),
                    false => lane.sort_by(|&a, &b| at(a).order(at(b))),
                }
                for (rank, &j) in lane[..k].iter().enumerate() {
                    let to = (o * k + rank) * inner + i;
                    values[to] = at(j);
                    positions[to] = j as i64;
                }
            }
        }
        Ok(vec![Buffer::new(values), Buffer::new(positions)])
    })
}

/// The position of the first extremum of each lane, or of the first NaN.
pub(super) fn arg_reduce(op: &ArgReduce, x: &Operand<'_>) -> Result<Buffer, String> {
    let (outer, n, inner) = around(&x.ty.shape, op.dim);
    let better = if op.largest { Ordering::Greater } else { Ordering::Less };
    with_number!(x.ty.dtype, T => {
        let v = elements::<T>(x);
        let mut y: Vec<i64> = Vec::with_capacity(outer * inner);
        for o in 0..outer {
            for i in 0..inner {
                let at = |j: usize| v[(o * n + j) * inner + i];
                let best = (1..n).fold(0, |best, j| if at(best).yields(at(j), better) { j } else { best });
                y.push(best as i64);
            }
        }
        Ok(Buffer::new(y))
    })
}
