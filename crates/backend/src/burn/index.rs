//! Operators that address elements by integers. Indices are checked first, since burn panics on bad ones.

use burn_backend::tensor::{IndexingUpdateOp, IntTensor};
use fusionllm_graph::ops::{EmbeddingDenseBackward, MaxPool2dBackward};
use fusionllm_graph::{DType, TensorType};

use super::elementwise::cast;
use super::tensor::{Data, Framework};
use crate::kernels::check_indices;

/// Fails on the first target that is neither a class nor ignored. The decomposition would not notice it.
pub(super) fn check_targets<B: Framework>(target: &Data<B>, classes: usize, ignored: i64) -> Result<(), String> {
    let mut counted = target.clone().into_i64()?;
    counted.retain(|t| *t != ignored);
    check_indices(&counted, classes).map_err(|e| e.to_string())
}

/// The index for burn, or an error unless every element is below `size`.
fn checked<B: Framework>(index: Data<B>, size: usize) -> Result<IntTensor<B>, String> {
    check_indices(&index.clone().into_i64()?, size).map_err(|e| e.to_string())?;
    index.int()
}

/// Applies `f`. Booleans become integers for it, since burn-flex returns selected booleans as another type.
fn through_integers<B: Framework>(x: Data<B>, f: impl FnOnce(Data<B>) -> Data<B>) -> Data<B> {
    match x {
        Data::Bool(_) => cast(f(cast(x, DType::Bool, DType::I32)), DType::I32, DType::Bool),
        x => f(x),
    }
}

/// Selects slices of `dim` by a one-dimensional index.
pub(super) fn select<B: Framework>(x: Data<B>, dim: usize, index: Data<B>) -> Result<Data<B>, String> {
    let i = checked(index, x.shape()[dim])?;
    Ok(through_integers(x, |x| match x {
        Data::Float(t) => Data::Float(B::float_select(t, dim, i)),
        Data::Int(t) => Data::Int(B::int_select(t, dim, i)),
        x => x,
    }))
}

pub(super) fn embedding<B: Framework>(weight: Data<B>, ids: Data<B>, out: &TensorType) -> Result<Data<B>, String> {
    let count = ids.shape().iter().product();
    Ok(select(weight, 0, ids.reshape(&[count]))?.reshape(&out.shape))
}

/// Adds slices of a float source, in order, to the slices of `x` that the index names.
pub(super) fn index_add<B: Framework>(
    x: Data<B>,
    dim: usize,
    index: Data<B>,
    source: Data<B>,
) -> Result<Data<B>, String> {
    let i = checked(index, x.shape()[dim])?;
    let source = source.float()?;
    Ok(Data::Float(B::float_select_assign(x.float()?, dim, i, source, IndexingUpdateOp::Add)))
}

pub(super) fn embedding_backward<B: Framework>(
    op: &EmbeddingDenseBackward,
    g: Data<B>,
    ids: Data<B>,
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    let zeros = Data::full(out, 0.0, device);
    let count = ids.shape().iter().product();
    if count == 0 {
        return Ok(zeros);
    }
    let width = out.shape[1];
    let y = index_add(zeros, 0, ids.reshape(&[count]), g.reshape(&[count, width]))?;
    match op.padding_idx {
        Some(row) if row < op.num_weights => {
            let clear = Data::full(&TensorType::new(out.dtype, [1, width]), 0.0, device);
            let (row, width) = (row as isize, width as isize);
            y.assign(&[(row..row + 1).into(), (0..width).into()], clear)
        }
        _ => Ok(y),
    }
}

pub(super) fn gather<B: Framework>(x: Data<B>, dim: usize, index: Data<B>) -> Result<Data<B>, String> {
    let i = index.shape();
    // burn needs the same sizes in the other dimensions.
    let mut x = x;
    for (d, n) in i.iter().enumerate().filter(|(d, _)| *d != dim) {
        if *n < x.shape()[d] {
            x = x.narrow(d, 0, *n);
        }
    }
    let i = checked(index, x.shape()[dim])?;
    Ok(through_integers(x, |x| match x {
        Data::Float(t) => Data::Float(B::float_gather(dim, t, i)),
        Data::Int(t) => Data::Int(B::int_gather(dim, t, i)),
        x => x,
    }))
}

/// Adds a float source to the elements that [`gather`] would read. The index has the size of `x` in all dimensions
/// but `dim`.
pub(super) fn scatter_add<B: Framework>(
    x: Data<B>,
    dim: usize,
    index: Data<B>,
    source: Data<B>,
) -> Result<Data<B>, String> {
    if index.shape().contains(&0) {
        return Ok(x);
    }
    let i = checked(index, x.shape()[dim])?;
    Ok(Data::Float(B::float_scatter(dim, x.float()?, i, source.float()?, IndexingUpdateOp::Add)))
}

pub(super) fn max_pool_backward<B: Framework>(
    op: &MaxPool2dBackward,
    g: Data<B>,
    at: Data<B>,
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    let (rows, plane) = (out.shape[0] * out.shape[1], op.input[0] * op.input[1]);
    let zeros = Data::full(&TensorType::new(out.dtype, [rows, plane]), 0.0, device);
    let windows = g.shape()[2..].iter().product();
    if windows == 0 {
        return Ok(zeros.reshape(&out.shape));
    }
    let y = scatter_add(zeros, 1, at.reshape(&[rows, windows]), g.reshape(&[rows, windows]))?;
    Ok(y.reshape(&out.shape))
}
