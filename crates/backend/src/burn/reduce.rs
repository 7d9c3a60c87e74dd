//! Reductions of floats. The order of additions depends on the shape alone: operands are made contiguous, and long
//! sums are cut into chunks of fixed size.

use fusionllm_graph::ops::{Reduce, ReduceKind};
use fusionllm_graph::{DType, TensorType};

use super::elementwise::cast;
use super::tensor::{Data, Framework};

/// Most elements that burn sums in one call.
const CHUNK: usize = 4096;

pub(super) fn reduce<B: Framework>(
    op: &Reduce,
    x: Data<B>,
    ty: &TensorType,
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    let n: usize = op.dims.iter().map(|&d| ty.shape[d]).product();
    if n == 0 {
        let value = match op.kind {
            ReduceKind::Prod => 1.0,
            ReduceKind::Mean => f64::NAN,
            _ => 0.0,
        };
        return Ok(Data::full(out, value, device));
    }
    // Sums in half precision would lose small addends.
    let wide = if ty.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let mut x = cast(B::contiguous(x), ty.dtype, wide);
    match op.kind {
        ReduceKind::Sum | ReduceKind::Mean => {
            let mut shape = ty.shape.clone();
            let mut dims = op.dims.as_slice();
            // Adjacent dimensions together, the last ones first.
            while let Some(&last) = dims.last() {
                let run = dims.iter().rev().zip(0..).take_while(|(d, i)| **d + i == last).count();
                dims = &dims[..dims.len() - run];
                let first = last + 1 - run;
                let outer = shape[..first].iter().product();
                let inner = shape[last + 1..].iter().product();
                x = sum_middle(x, outer, shape[first..=last].iter().product(), inner)?;
                shape[first..=last].fill(1);
            }
            if op.kind == ReduceKind::Mean {
                x = Data::Float(B::float_div_scalar(x.float()?, (n as f64).into()));
            }
        }
        kind => {
            for &d in op.dims.iter().rev() {
                let t = x.float()?;
                x = Data::Float(match kind {
                    ReduceKind::Prod => B::float_prod_dim(t, d),
                    ReduceKind::Amax => B::float_max_dim(t, d),
                    ReduceKind::Amin => B::float_min_dim(t, d),
                    _ => return Err("needs booleans".into()),
                });
            }
        }
    }
    Ok(cast(x.reshape(&out.shape), wide, ty.dtype))
}

/// Sums a contiguous `[outer, n, inner]` over `n`.
fn sum_middle<B: Framework>(x: Data<B>, outer: usize, n: usize, inner: usize) -> Result<Data<B>, String> {
    if n <= CHUNK {
        return along_middle(x.reshape(&[outer, n, inner]), outer, inner);
    }
    let (chunks, rest) = (n / CHUNK, n % CHUNK);
    let x = x.reshape(&[outer, n, inner]);
    let body = B::contiguous(x.clone().narrow(1, 0, chunks * CHUNK));
    let body = body.reshape(&[outer * chunks, CHUNK, inner]);
    let mut sums = along_middle(body, outer * chunks, inner)?.reshape(&[outer, chunks, inner]);
    if rest > 0 {
        let tail = along_middle(B::contiguous(x.narrow(1, chunks * CHUNK, n)), outer, inner)?;
        sums = Data::cat(vec![sums, tail.reshape(&[outer, 1, inner])], 1)?;
    }
    sum_middle(sums, outer, chunks + usize::from(rest > 0), inner)
}

fn along_middle<B: Framework>(x: Data<B>, outer: usize, inner: usize) -> Result<Data<B>, String> {
    Ok(Data::Float(B::float_sum_dim(x.float()?, 1)).reshape(&[outer, inner]))
}
