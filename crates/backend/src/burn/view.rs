//! Operators that move elements, or only change how they are addressed.

use burn_backend::Slice;
use fusionllm_graph::ops::{ConstantPad, SliceBackward, Split};
use fusionllm_graph::{TensorType, ops};

use super::tensor::{Data, Framework, by_kind, shape};

impl<B: Framework> Data<B> {
    pub(super) fn reshape(self, dims: &[usize]) -> Self {
        let s = shape(dims);
        by_kind!(self, t => B::float_reshape(t, s), B::int_reshape(t, s), B::bool_reshape(t, s))
    }

    pub(super) fn permute(self, dims: &[usize]) -> Self {
        if dims.is_empty() {
            return self;
        }
        by_kind!(self, t => B::float_permute(t, dims), B::int_permute(t, dims), B::bool_permute(t, dims))
    }

    /// Broadcasts to a shape.
    pub(super) fn expand(self, dims: &[usize]) -> Self {
        if self.shape() == dims {
            return self;
        }
        let s = shape(dims);
        by_kind!(self, t => B::float_expand(t, s), B::int_expand(t, s), B::bool_expand(t, s))
    }

    pub(super) fn flip(self, dims: &[usize]) -> Self {
        by_kind!(self, t => B::float_flip(t, dims), B::int_flip(t, dims), B::bool_flip(t, dims))
    }

    pub(super) fn slice(self, slices: &[Slice]) -> Self {
        by_kind!(self, t => B::float_slice(t, slices), B::int_slice(t, slices), B::bool_slice(t, slices))
    }

    /// Elements `start..end` of one dimension.
    pub(super) fn narrow(self, dim: usize, start: usize, end: usize) -> Self {
        let slices = along(dim, self.shape().len(), range(start, end, 1));
        self.slice(&slices)
    }

    /// Replaces the elements in the slices by `value`.
    pub(super) fn assign(self, slices: &[Slice], value: Self) -> Result<Self, String> {
        Ok(match self {
            Self::Float(t) => Self::Float(B::float_slice_assign(t, slices, value.float()?)),
            Self::Int(t) => Self::Int(B::int_slice_assign(t, slices, value.int()?)),
            Self::Bool(t) => Self::Bool(B::bool_slice_assign(t, slices, value.bool()?)),
        })
    }

    /// Concatenates tensors of one kind.
    pub(super) fn cat(parts: Vec<Self>, dim: usize) -> Result<Self, String> {
        Ok(match parts.first() {
            Some(Self::Float(_)) => {
                let parts = parts.into_iter().map(Self::float).collect::<Result<_, _>>()?;
                Self::Float(B::float_cat(parts, dim))
            }
            Some(Self::Int(_)) => {
                let parts = parts.into_iter().map(Self::int).collect::<Result<_, _>>()?;
                Self::Int(B::int_cat(parts, dim))
            }
            Some(Self::Bool(_)) => {
                let parts = parts.into_iter().map(Self::bool).collect::<Result<_, _>>()?;
                Self::Bool(B::bool_cat(parts, dim))
            }
            None => return Err("takes at least one operand".into()),
        })
    }
}

fn range(start: usize, end: usize, step: usize) -> Slice {
    // A step behind the end is any step, but one that is not an isize would run backwards.
    Slice::new(start as isize, Some(end as isize), step.min((end - start).max(1)) as isize)
}

/// A slice of one dimension. The other dimensions are taken whole.
fn along(dim: usize, rank: usize, slice: Slice) -> Vec<Slice> {
    (0..rank).map(|d| if d == dim { slice } else { Slice::full() }).collect()
}

fn of(op: &ops::Slice, rank: usize) -> Vec<Slice> {
    along(op.dim, rank, range(op.start, op.end, op.step))
}

pub(super) fn slice<B: Framework>(op: &ops::Slice, x: Data<B>) -> Data<B> {
    let slices = of(op, x.shape().len());
    x.slice(&slices)
}

pub(super) fn slice_backward<B: Framework>(
    op: &SliceBackward,
    g: Data<B>,
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    let whole = Data::full(out, 0.0, device);
    if g.shape().contains(&0) {
        return Ok(whole);
    }
    whole.assign(&of(&op.slice, out.rank()), g)
}

pub(super) fn split<B: Framework>(op: &Split, x: Data<B>, outputs: &[TensorType], device: &B::Device) -> Vec<Data<B>> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(op.sizes.len());
    for (&size, ty) in op.sizes.iter().zip(outputs) {
        parts.push(match ty.numel() {
            0 => Data::empty(ty, device),
            _ => x.clone().narrow(op.dim, start, start + size),
        });
        start += size;
    }
    parts
}

pub(super) fn cat<B: Framework>(inputs: Vec<Data<B>>, dim: usize) -> Result<Data<B>, String> {
    Data::cat(inputs.into_iter().filter(|x| !x.shape().contains(&0)).collect(), dim)
}

// Some of burn's kernels do not support negative strides.
pub(super) fn flip<B: Framework>(dims: &[usize], x: Data<B>) -> Data<B> {
    if dims.is_empty() { x } else { B::contiguous(x.flip(dims)) }
}

pub(super) fn pad<B: Framework>(
    op: &ConstantPad,
    x: Data<B>,
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    if op.pads.iter().all(|pad| *pad == [0, 0]) {
        return Ok(x);
    }
    let dims = x.shape();
    let whole = Data::full(out, op.value, device);
    if dims.contains(&0) {
        return Ok(whole);
    }
    let place: Vec<Slice> = dims.iter().zip(&op.pads).map(|(&n, &[before, _])| range(before, before + n, 1)).collect();
    whole.assign(&place, x)
}
