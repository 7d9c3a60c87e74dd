//! Matrix products, convolutions and attention.

use burn_flex::FlexTensor;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad, ScaledDotProductAttention};

use super::tensor::{Scalar, arranged, broadcast, contiguous, elements, memory, owned};
use crate::host::{
    self, Attention, AttentionGrads, AttentionSizes, Convolution, Heads, Mask, MaskData, Matrix, Sizes, Strides,
};

fn last_strides(t: &FlexTensor) -> Strides {
    let s = t.layout().strides();
    Strides { row: s[s.len() - 2], column: s[s.len() - 1] }
}

/// Where the matrices of each product of a batch begin.
fn starts(t: &FlexTensor, batch: &[usize]) -> Vec<usize> {
    let rank = t.layout().num_dims();
    let own = &t.layout().shape()[..rank - 2];
    let missing = batch.len() - own.len();
    let strides: Vec<isize> = (0..batch.len())
        .map(|d| match d.checked_sub(missing) {
            Some(i) if own[i] == batch[d] => t.layout().strides()[i],
            _ => 0,
        })
        .collect();
    (0..batch.iter().product::<usize>())
        .map(|mut n| {
            let mut at = t.layout().start_offset() as isize;
            for d in (0..batch.len()).rev() {
                at += (n % batch[d]) as isize * strides[d];
                n /= batch[d];
            }
            at as usize
        })
        .collect()
}

pub(super) fn matmul<T: Scalar>(a: FlexTensor, b: FlexTensor, out: &TensorType) -> FlexTensor {
    let rank = out.rank();
    let batch = &out.shape[..rank - 2];
    let (m, n) = (out.shape[rank - 2], out.shape[rank - 1]);
    let k = a.layout().shape()[a.layout().num_dims() - 1];
    let mut y = host::uninit::<T>(out.numel());
    let products: usize = batch.iter().product();
    if b.layout().num_dims() == 2 && products > 1 {
        // One matrix for the whole batch: one product of all rows.
        let a = contiguous(a);
        let b_start = [b.layout().start_offset()];
        let sizes = Sizes { m: products * m, n, k };
        let left = (elements(&a), Strides::rows(k), &[0][..]);
        host::matmul(&mut y, sizes, left, (memory(&b), last_strides(&b), &b_start));
    } else {
        let (at, bt) = (starts(&a, batch), starts(&b, batch));
        let (left, right) = ((memory(&a), last_strides(&a), &at[..]), (memory(&b), last_strides(&b), &bt[..]));
        host::matmul(&mut y, Sizes { m, n, k }, left, right);
    }
    owned(y, out)
}

pub(super) fn linear<T: Scalar>(
    x: FlexTensor,
    weight: FlexTensor,
    bias: Option<FlexTensor>,
    out: &TensorType,
) -> FlexTensor {
    let (x, bias) = (contiguous(x), bias.map(contiguous));
    let (n, k) = (weight.layout().shape()[0], weight.layout().shape()[1]);
    let mut y = host::uninit::<T>(out.numel());
    let sizes = Sizes { m: out.numel() / n, n, k };
    let w = Matrix { data: memory(&weight), start: weight.layout().start_offset(), strides: last_strides(&weight) };
    host::linear(&mut y, sizes, Matrix::rows(elements(&x), k), w, bias.as_ref().map(elements));
    owned(y, out)
}

/// Sizes from the types of operand, weight and result.
fn convolution(op: &Conv2d, x: &TensorType, weight: &TensorType, y: &TensorType) -> Convolution {
    Convolution {
        n: x.shape[0],
        c: x.shape[1],
        input: [x.shape[2], x.shape[3]],
        o: y.shape[1],
        kernel: [weight.shape[2], weight.shape[3]],
        output: [y.shape[2], y.shape[3]],
        stride: op.stride,
        padding: op.padding,
        dilation: op.dilation,
        groups: op.groups,
    }
}

pub(super) fn conv2d<T: Scalar>(
    op: &Conv2d,
    x: FlexTensor,
    weight: FlexTensor,
    bias: Option<FlexTensor>,
    types: &[TensorType],
    out: &TensorType,
) -> FlexTensor {
    let (x, weight, bias) = (contiguous(x), contiguous(weight), bias.map(contiguous));
    let mut y = host::uninit::<T>(out.numel());
    let sizes = convolution(op, &types[0], &types[1], out);
    host::conv2d(&mut y, &sizes, elements(&x), elements(&weight), bias.as_ref().map(elements));
    owned(y, out)
}

pub(super) fn conv2d_input_grad<T: Scalar>(
    op: &Conv2dInputGrad,
    grad: FlexTensor,
    weight: FlexTensor,
    types: &[TensorType],
    out: &TensorType,
) -> FlexTensor {
    let (grad, weight) = (contiguous(grad), contiguous(weight));
    let mut dx = host::uninit::<T>(out.numel());
    let sizes = convolution(&op.conv, out, &types[1], &types[0]);
    host::conv2d_input_grad(&mut dx, &sizes, elements(&grad), elements(&weight));
    owned(dx, out)
}

pub(super) fn conv2d_weight_grad<T: Scalar>(
    op: &Conv2dWeightGrad,
    grad: FlexTensor,
    x: FlexTensor,
    types: &[TensorType],
    out: &TensorType,
) -> FlexTensor {
    let (grad, x) = (contiguous(grad), contiguous(x));
    let mut dw = host::uninit::<T>(out.numel());
    let sizes = convolution(&op.conv, &types[1], out, &types[0]);
    host::conv2d_weight_grad(&mut dw, &sizes, elements(&grad), elements(&x));
    owned(dw, out)
}

/// A tensor whose rows are contiguous and whose strides are not negative: itself where it is so already.
fn by_rows(t: FlexTensor) -> FlexTensor {
    let s = t.layout().strides();
    if s[3] == 1 && s.iter().all(|s| *s >= 0) { t } else { contiguous(t) }
}

fn heads<T: Scalar>(t: &FlexTensor) -> Heads<'_, T> {
    let s = t.layout().strides();
    Heads { data: memory(t), start: t.layout().start_offset(), strides: [s[0] as usize, s[1] as usize, s[2] as usize] }
}

/// Heads side by side within the rows of `[batch, row, head, column]`, as the projections around attention have them.
fn side_by_side(ty: &TensorType) -> [usize; 4] {
    let [_, h, l, e] = [ty.shape[0], ty.shape[1], ty.shape[2], ty.shape[3]];
    [l * h * e, e, h * e, 1]
}

/// Operands of an attention: q, k, v and perhaps a mask.
struct Operands {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    mask: Option<FlexTensor>,
    mask_strides: [usize; 4],
    sizes: AttentionSizes,
}

impl Operands {
    fn new([q, k, v]: [FlexTensor; 3], mask: Option<FlexTensor>, types: &[TensorType]) -> Self {
        let (q, k, v) = (by_rows(q), by_rows(k), by_rows(v));
        let [q_shape, k_shape] = [&types[0].shape, &types[1].shape];
        let sizes = AttentionSizes {
            b: q_shape[0],
            h: q_shape[1],
            g: k_shape[1],
            l: q_shape[2],
            s: k_shape[2],
            e: q_shape[3],
            f: types[2].shape[3],
        };
        let mask = mask.map(contiguous);
        let mut mask_strides = [0; 4];
        if let Some(mask) = &mask {
            let strides = broadcast(mask, &[sizes.b, sizes.h, sizes.l, sizes.s]);
            for (to, s) in mask_strides.iter_mut().zip(strides) {
                *to = s as usize;
            }
        }
        Self { q, k, v, mask, mask_strides, sizes }
    }

    fn attention<T: Scalar>(&self, op: &ScaledDotProductAttention) -> Attention<'_, T> {
        let mask = self.mask.as_ref().map(|t| Mask {
            data: if t.dtype().is_float() { MaskData::Added(memory(t)) } else { MaskData::Bool(memory(t)) },
            start: t.layout().start_offset(),
            strides: self.mask_strides,
        });
        Attention {
            sizes: self.sizes,
            q: heads(&self.q),
            k: heads(&self.k),
            v: heads(&self.v),
            mask,
            causal: op.is_causal,
            scale: op.scale,
        }
    }
}

pub(super) fn attention<T: Scalar>(
    op: &ScaledDotProductAttention,
    qkv: [FlexTensor; 3],
    mask: Option<FlexTensor>,
    types: &[TensorType],
    outputs: &[TensorType],
) -> Vec<FlexTensor> {
    let operands = Operands::new(qkv, mask, types);
    let (mut out, mut lse) = (host::uninit::<T>(outputs[0].numel()), host::uninit::<T>(outputs[1].numel()));
    let strides = side_by_side(&outputs[0]);
    host::attention(&mut out, [strides[0], strides[1], strides[2]], &mut lse, &operands.attention::<T>(op));
    vec![arranged(out, &outputs[0], &strides), owned(lse, &outputs[1])]
}

pub(super) fn attention_backward<T: Scalar>(
    op: &ScaledDotProductAttention,
    grad: FlexTensor,
    qkv: [FlexTensor; 3],
    [out, lse]: [FlexTensor; 2],
    mask: Option<FlexTensor>,
    types: &[TensorType],
    outputs: &[TensorType],
) -> Vec<FlexTensor> {
    let operands = Operands::new(qkv, mask, &types[1..4]);
    let (grad, out, lse) = (by_rows(grad), by_rows(out), contiguous(lse));
    let mut results = [0, 1, 2].map(|i| host::uninit::<T>(outputs[i].numel()));
    let strides = [0, 1, 2].map(|i| side_by_side(&outputs[i]));
    let [dq, dk, dv] = &mut results;
    let of = |i: usize| [strides[i][0], strides[i][1], strides[i][2]];
    let grads = AttentionGrads { dq: (dq, of(0)), dk: (dk, of(1)), dv: (dv, of(2)) };
    host::attention_backward(grads, &operands.attention::<T>(op), heads(&grad), heads(&out), elements(&lse));
    let each = results.into_iter().zip(outputs).zip(&strides);
    each.map(|((v, ty), strides)| arranged(v, ty, strides)).collect()
}
