//! Matrix products.

use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all, all_and_optional, generic, one, view, with_float};
use crate::kernels::{self, Float, Matrix, Sizes, Strides};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    match op {
        // A sum of no products.
        Op::Matmul(_) if inputs.iter().any(Array::is_empty) => one(view::full(out, 0.0)?),
        Op::Matmul(_) => {
            let [a, b] = all(inputs)?;
            with_float!(out.dtype, T => one(matmul::<T>(a, b, out)))
        }
        Op::Linear(_) => {
            let ([x, weight], bias) = all_and_optional(inputs)?;
            with_float!(out.dtype, T => one(linear::<T>(x, weight, bias, out)))
        }
        _ => generic(op, inputs, outputs),
    }
}

fn last_strides(x: &Array) -> Strides {
    let s = &x.strides;
    Strides { row: s[s.len() - 2], column: s[s.len() - 1] }
}

/// The first element of each matrix in a batch of products.
fn starts(x: &Array, batch: &[usize]) -> Vec<usize> {
    let rank = x.shape.len();
    let matrices = x.clone().view(x.shape[..rank - 2].to_vec(), x.strides[..rank - 2].to_vec(), x.start);
    let strides = matrices.broadcast(batch);
    (0..batch.iter().product::<usize>())
        .map(|mut n| {
            let mut at = x.start as isize;
            for d in (0..batch.len()).rev() {
                at += (n % batch[d]) as isize * strides[d];
                n /= batch[d];
            }
            at as usize
        })
        .collect()
}

fn matmul<T: Float>(a: Array, b: Array, out: &TensorType) -> Array {
    let rank = out.rank();
    let batch = &out.shape[..rank - 2];
    let (m, n) = (out.shape[rank - 2], out.shape[rank - 1]);
    let k = a.shape[a.shape.len() - 1];
    let mut y = kernels::uninit::<T>(out.numel());
    let products: usize = batch.iter().product();
    if b.shape.len() == 2 && products > 1 {
        // The batch shares one matrix: one product of all rows.
        let a = a.contiguous();
        let sizes = Sizes { m: products * m, n, k };
        let left = (a.elements(), Strides::rows(k), &[0][..]);
        kernels::matmul(&mut y, sizes, left, (b.memory(), last_strides(&b), &[b.start]));
    } else {
        let (at, bt) = (starts(&a, batch), starts(&b, batch));
        let (left, right) = ((a.memory(), last_strides(&a), &at[..]), (b.memory(), last_strides(&b), &bt[..]));
        kernels::matmul(&mut y, Sizes { m, n, k }, left, right);
    }
    Array::new(y, out)
}

fn linear<T: Float>(x: Array, weight: Array, bias: Option<Array>, out: &TensorType) -> Array {
    let (x, bias) = (x.contiguous(), bias.map(Array::contiguous));
    let (n, k) = (weight.shape[0], weight.shape[1]);
    let mut y = kernels::uninit::<T>(out.numel());
    let sizes = Sizes { m: out.numel() / n, n, k };
    let w = Matrix { data: weight.memory(), start: weight.start, strides: last_strides(&weight) };
    kernels::linear(&mut y, sizes, Matrix::rows(x.elements(), k), w, bias.as_ref().map(Array::elements));
    Array::new(y, out)
}
