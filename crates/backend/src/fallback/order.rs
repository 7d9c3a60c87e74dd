//! What depends on the order of elements by size. NaN counts as larger than all numbers, as in PyTorch.

use std::cmp::Ordering;

use fusionllm_graph::ops::ArgReduce;
use fusionllm_graph::{DType, HostTensor, TensorType};

use super::element::{Number, around, elements, tensor, with_number};

/// The first `k` elements of each lane along `dim`, sorted stably, and their positions.
pub(super) fn sorted(x: &HostTensor, dim: usize, descending: bool, k: usize) -> Result<Vec<HostTensor>, String> {
    let (outer, n, inner) = around(x.shape(), dim);
    let mut shape = x.shape().to_vec();
    shape[dim] = k;
    with_number!(x.dtype(), T => {
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
        Ok(vec![
            tensor(TensorType::new(x.dtype(), shape.clone()), &values)?,
            tensor(TensorType::new(DType::I64, shape), &positions)?,
        ])
    })
}

/// The position of the first extremum of each lane; of the first NaN where there is one.
pub(super) fn arg_reduce(op: &ArgReduce, x: &HostTensor, out: &TensorType) -> Result<HostTensor, String> {
    let (outer, n, inner) = around(x.shape(), op.dim);
    let better = if op.largest { Ordering::Greater } else { Ordering::Less };
    with_number!(x.dtype(), T => {
        let v = elements::<T>(x);
        let mut y = Vec::with_capacity(outer * inner);
        for o in 0..outer {
            for i in 0..inner {
                let at = |j: usize| v[(o * n + j) * inner + i];
                let best = (1..n).fold(0, |best, j| if at(best).yields(at(j), better) { j } else { best });
                y.push(best as i64);
            }
        }
        tensor(out.clone(), &y)
    })
}
