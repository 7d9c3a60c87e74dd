//! Convolutions. Candle's kernel takes the same stride, padding and dilation in both directions. All others, and the
//! gradients that candle lacks, are matrix products over windows that candle's views lay out.

use candle_core::Tensor as Array;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{Conv2d, Slice, SliceBackward};

use super::products::product;
use super::{Result, scalar, view};

/// Sizes of a convolution: `[n, c, ..]`, `[o, c / groups, kernel]`, `[n, o, positions]`.
struct Sizes {
    n: usize,
    c: usize,
    o: usize,
    kernel: [usize; 2],
    out: [usize; 2],
}

impl Sizes {
    fn new(x: &[usize], w: &[usize], y: &[usize]) -> Self {
        Self { n: x[0], c: x[1], o: y[1], kernel: [w[2], w[3]], out: [y[2], y[3]] }
    }

    fn positions(&self) -> usize {
        self.out[0] * self.out[1]
    }
}

/// Stride, padding and dilation, if they are the same in both directions.
fn square(op: &Conv2d) -> Option<[usize; 3]> {
    let same = [op.stride, op.padding, op.dilation].iter().all(|[a, b]| a == b);
    same.then_some([op.stride[0], op.padding[0], op.dilation[0]])
}

pub(super) fn forward(op: &Conv2d, x: &Array, w: &Array, bias: Option<&Array>, out: &TensorType) -> Result<Array> {
    let (x, w) = (x.contiguous()?, w.contiguous()?);
    // Candle's kernel starts from an operand that is there.
    let y = match square(op).filter(|_| x.elem_count() > 0) {
        Some([stride, padding, dilation]) => x.conv2d(&w, padding, stride, dilation, op.groups)?,
        None => {
            let s = Sizes::new(x.dims(), w.dims(), &out.shape);
            let mut parts = Vec::with_capacity(op.groups);
            for g in 0..op.groups {
                // [o / groups, c k k] · [n, c k k, positions]
                let w = group(&w, 0, op.groups, g)?.flatten_from(1)?;
                let (rows, inner) = w.dims2()?;
                let w = w.broadcast_as((s.n, rows, inner))?.contiguous()?;
                let columns = windows(op, &group(&x, 1, op.groups, g)?, &s)?;
                parts.push(product(&w, &columns, rows, s.positions(), inner)?);
            }
            view::cat(&parts, 1)?.reshape(out.shape.as_slice())?
        }
    };
    Ok(match bias {
        Some(bias) => y.broadcast_add(&bias.reshape((1, out.shape[1], 1, 1))?)?,
        None => y,
    })
}

/// Part `g` of `groups` equal parts of a dimension.
fn group(x: &Array, dim: usize, groups: usize, g: usize) -> Result<Array> {
    let size = x.dims()[dim] / groups;
    Ok(x.narrow(dim, g * size, size)?)
}

/// The patches of all positions: `[n, c k k, positions]`, contiguous.
fn windows(op: &Conv2d, x: &Array, s: &Sizes) -> Result<Array> {
    let c = x.dims()[1];
    let zero = scalar(0.0, x.dtype())?;
    let mut x = x.contiguous()?;
    for d in 0..2 {
        x = view::pad(&x, 2 + d, [op.padding[d]; 2], &zero)?;
    }
    let x = windows_of(&x, s.kernel, op.stride, op.dilation, s.out)?;
    Ok(x.permute((0, 1, 4, 5, 2, 3))?.reshape((s.n, c * s.kernel[0] * s.kernel[1], s.positions()))?)
}

/// The windows of a padded `[n, c, h, w]` as a view `[n, c, out, out, kernel, kernel]`.
pub(super) fn windows_of(
    x: &Array,
    kernel: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    out: [usize; 2],
) -> Result<Array> {
    let mut x = x.clone();
    for d in 0..2 {
        let reach = (kernel[d] - 1) * dilation[d] + 1;
        // Candle counts windows in f32, which is exact where the last one ends with the operand.
        x = x.narrow(2 + d, 0, (out[d] - 1) * stride[d] + reach)?.unfold(2 + d, reach, stride[d])?;
        if dilation[d] > 1 {
            x = view::strided(&x, 4 + d, 0, kernel[d], dilation[d])?;
        }
    }
    Ok(x)
}

// dw [o, c k k] = Σ_n g [o, positions] · windowsᵀ [positions, c k k], one product over all positions of all images.
pub(super) fn weight_grad(op: &Conv2d, g: &Array, x: &Array, out: &TensorType) -> Result<Array> {
    let s = Sizes::new(x.dims(), &out.shape, g.dims());
    if g.elem_count() == 0 || x.elem_count() == 0 {
        return super::filled(0.0, out);
    }
    let mut parts = Vec::with_capacity(op.groups);
    for i in 0..op.groups {
        let (o, c) = (s.o / op.groups, s.c / op.groups);
        let rows = group(g, 1, op.groups, i)?.transpose(0, 1)?.reshape((o, s.n * s.positions()))?;
        let columns = windows(op, &group(x, 1, op.groups, i)?, &s)?;
        let inner = c * s.kernel[0] * s.kernel[1];
        let columns = columns.transpose(1, 2)?.reshape((s.n * s.positions(), inner))?;
        parts.push(product(&rows, &columns, o, inner, s.n * s.positions())?);
    }
    Ok(view::cat(&parts, 0)?.reshape(out.shape.as_slice())?)
}

pub(super) fn input_grad(op: &Conv2d, g: &Array, w: &Array, out: &TensorType) -> Result<Array> {
    let (g, w) = (g.contiguous()?, w.contiguous()?);
    if g.elem_count() == 0 {
        return super::filled(0.0, out);
    }
    // How far windows reach beyond the padding, in both directions.
    let beyond = |d: usize| ((w.dims()[2 + d] - 1) * op.dilation[d]).checked_sub(op.padding[d]);
    if let (Some([1, _, dilation]), 1, Some(padding)) = (square(op), op.groups, beyond(0))
        && beyond(1) == Some(padding)
    {
        // At stride 1 the gradient is a convolution with the kernel turned around. (Candle's transposed convolution
        // takes six times as long.)
        let turned = w.flip(&[2, 3])?.transpose(0, 1)?.contiguous()?;
        return Ok(g.conv2d(&turned, padding, 1, dilation, 1)?);
    }
    let s = Sizes::new(&out.shape, w.dims(), g.dims());
    let mut parts = Vec::with_capacity(op.groups);
    for i in 0..op.groups {
        // Gradients of the windows, [n, c k k, positions], then each back to where its window took it from.
        let (o, c) = (s.o / op.groups, s.c / op.groups);
        let inner = c * s.kernel[0] * s.kernel[1];
        let wt = group(&w, 0, op.groups, i)?.reshape((o, inner))?.t()?;
        let wt = wt.broadcast_as((s.n, inner, o))?.contiguous()?;
        let rows = group(&g, 1, op.groups, i)?.reshape((s.n, o, s.positions()))?;
        let columns = product(&wt, &rows, inner, s.positions(), o)?;
        let columns = columns.reshape((s.n, c, s.kernel[0] * s.kernel[1], s.out[0], s.out[1]))?;
        parts.push(fold(op, &columns, c, &s, out)?);
    }
    view::cat(&parts, 1)
}

/// Adds the gradients of windows `[n, c, k k, out, out]` to the operand's `[n, c, h, w]`, kernel element by kernel
/// element.
fn fold(op: &Conv2d, columns: &Array, c: usize, s: &Sizes, out: &TensorType) -> Result<Array> {
    let padded = [out.shape[2] + 2 * op.padding[0], out.shape[3] + 2 * op.padding[1]];
    let mut sum: Option<Array> = None;
    for at in 0..s.kernel[0] * s.kernel[1] {
        let offset = [at / s.kernel[1] * op.dilation[0], at % s.kernel[1] * op.dilation[1]];
        let mut part = columns.narrow(2, at, 1)?.squeeze(2)?;
        let mut shape = vec![s.n, c, s.out[0], s.out[1]];
        for d in 0..2 {
            shape[2 + d] = padded[d];
            let end = offset[d] + (s.out[d] - 1) * op.stride[d] + 1;
            let slice = Slice { dim: 2 + d, start: offset[d], end, step: op.stride[d] };
            let spread = SliceBackward { slice, size: padded[d] };
            part = view::slice_backward(&spread, &part, &TensorType::new(out.dtype, shape.clone()))?;
        }
        sum = Some(match sum {
            None => part,
            Some(sum) => sum.add(&part)?,
        });
    }
    match sum {
        Some(sum) => {
            Ok(sum.narrow(2, op.padding[0], out.shape[2])?.narrow(3, op.padding[1], out.shape[3])?.contiguous()?)
        }
        None => super::other("a kernel without elements"),
    }
}
