//! Scaled dot-product attention.

use fusionllm_graph::ops::{ScaledDotProductAttention, ScaledDotProductAttentionBackward};
use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all_and_optional, generic, with_float};
use crate::kernels::{self, Attention, AttentionGrads, AttentionSizes, Float, Heads, Mask, MaskData};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let dtype = outputs[0].dtype;
    match op {
        Op::ScaledDotProductAttention(op) => {
            let (qkv, mask) = all_and_optional(inputs)?;
            with_float!(dtype, T => Ok(forward::<T>(op, qkv, mask, outputs)))
        }
        Op::ScaledDotProductAttentionBackward(ScaledDotProductAttentionBackward { forward }) => {
            let ([g, q, k, v, y, lse], mask) = all_and_optional(inputs)?;
            with_float!(dtype, T => Ok(backward::<T>(forward, g, [q, k, v], [y, lse], mask, outputs)))
        }
        _ => generic(op, inputs, outputs),
    }
}

/// A tensor with contiguous rows and without negative strides, copied only if it is not so already.
fn by_rows(x: Array) -> Array {
    if x.strides[3] == 1 && x.strides.iter().all(|s| *s >= 0) { x } else { x.contiguous() }
}

fn heads<T: Float>(x: &Array) -> Heads<'_, T> {
    let s = &x.strides;
    Heads { data: x.memory(), start: x.start, strides: [s[0] as usize, s[1] as usize, s[2] as usize] }
}

/// Strides of `[batch, head, row, column]` with heads side by side in each row, as the projections around attention
/// want them.
fn side_by_side(ty: &TensorType) -> [usize; 4] {
    let [_, h, l, e] = [ty.shape[0], ty.shape[1], ty.shape[2], ty.shape[3]];
    [l * h * e, e, h * e, 1]
}

/// Operands of an attention.
struct Operands {
    q: Array,
    k: Array,
    v: Array,
    mask: Option<Array>,
    mask_strides: [usize; 4],
    sizes: AttentionSizes,
}

impl Operands {
    fn new(qkv: [Array; 3], mask: Option<Array>) -> Self {
        let [q, k, v] = qkv.map(by_rows);
        let sizes = AttentionSizes {
            b: q.shape[0],
            h: q.shape[1],
            g: k.shape[1],
            l: q.shape[2],
            s: k.shape[2],
            e: q.shape[3],
            f: v.shape[3],
        };
        let mask = mask.map(Array::contiguous);
        let mut mask_strides = [0; 4];
        if let Some(mask) = &mask {
            let strides = mask.broadcast(&[sizes.b, sizes.h, sizes.l, sizes.s]);
            for (to, s) in mask_strides.iter_mut().zip(strides) {
                *to = s as usize;
            }
        }
        Self { q, k, v, mask, mask_strides, sizes }
    }

    fn attention<T: Float>(&self, op: &ScaledDotProductAttention) -> Attention<'_, T> {
        let mask = self.mask.as_ref().map(|x| Mask {
            data: if x.dtype.is_float() { MaskData::Added(x.memory()) } else { MaskData::Bool(x.memory()) },
            start: x.start,
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

fn forward<T: Float>(
    op: &ScaledDotProductAttention,
    qkv: [Array; 3],
    mask: Option<Array>,
    outputs: &[TensorType],
) -> Vec<Array> {
    let operands = Operands::new(qkv, mask);
    let [mut out, mut lse] = [0, 1].map(|i| kernels::uninit::<T>(outputs[i].numel()));
    let strides = side_by_side(&outputs[0]);
    kernels::attention(&mut out, [strides[0], strides[1], strides[2]], &mut lse, &operands.attention::<T>(op));
    vec![Array::with_strides(out, &outputs[0], &strides), Array::new(lse, &outputs[1])]
}

fn backward<T: Float>(
    op: &ScaledDotProductAttention,
    grad: Array,
    qkv: [Array; 3],
    [out, lse]: [Array; 2],
    mask: Option<Array>,
    outputs: &[TensorType],
) -> Vec<Array> {
    let operands = Operands::new(qkv, mask);
    let (grad, out, lse) = (by_rows(grad), by_rows(out), lse.contiguous());
    let mut results = [0, 1, 2].map(|i| kernels::uninit::<T>(outputs[i].numel()));
    let strides = [0, 1, 2].map(|i| side_by_side(&outputs[i]));
    let [dq, dk, dv] = &mut results;
    let of = |i: usize| [strides[i][0], strides[i][1], strides[i][2]];
    let grads = AttentionGrads { dq: (dq, of(0)), dk: (dk, of(1)), dv: (dv, of(2)) };
    kernels::attention_backward(grads, &operands.attention::<T>(op), heads(&grad), heads(&out), lse.elements());
    let each = results.into_iter().zip(outputs).zip(&strides);
    each.map(|((v, ty), strides)| Array::with_strides(v, ty, strides)).collect()
}
