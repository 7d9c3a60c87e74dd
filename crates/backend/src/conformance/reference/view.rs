use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{ConstantPad, Slice, SliceBackward, Triangle};

use super::{Array, Elements, indices, position};

pub(super) fn permute(dims: &[usize], x: &Array, out: &TensorType) -> Elements {
    x.elements.pick(indices(&out.shape).map(|i| {
        let mut from = vec![0; i.len()];
        for (to, &d) in dims.iter().enumerate() {
            from[d] = i[to];
        }
        Some(position(x.shape(), &from))
    }))
}

pub(super) fn expand(x: &Array, out: &TensorType) -> Elements {
    x.elements.pick(indices(&out.shape).map(|i| Some(x.broadcast_at(&i))))
}

pub(super) fn slice(op: &Slice, x: &Array, out: &TensorType) -> Elements {
    x.elements.pick(indices(&out.shape).map(|mut i| {
        i[op.dim] = op.start + op.step * i[op.dim];
        Some(position(x.shape(), &i))
    }))
}

pub(super) fn slice_backward(op: &SliceBackward, g: &Array, out: &TensorType) -> Elements {
    let s = &op.slice;
    g.elements.pick(indices(&out.shape).map(|mut i| {
        let at = i[s.dim];
        let taken = at >= s.start && at < s.end && (at - s.start).is_multiple_of(s.step);
        taken.then(|| {
            i[s.dim] = (at - s.start) / s.step;
            position(g.shape(), &i)
        })
    }))
}

pub(super) fn cat(dim: usize, xs: &[Array], out: &TensorType) -> Elements {
    let mut result = Array::filled(out.clone(), 0.0).elements;
    let mut start = 0;
    for x in xs {
        for (from, mut i) in indices(x.shape()).enumerate() {
            i[dim] += start;
            result.put(position(&out.shape, &i), &x.elements, from, false);
        }
        start += x.shape()[dim];
    }
    result
}

pub(super) fn split(dim: usize, x: &Array, outs: &[TensorType]) -> Vec<Elements> {
    let mut start = 0;
    outs.iter()
        .map(|out| {
            let part = x.elements.pick(indices(&out.shape).map(|mut i| {
                i[dim] += start;
                Some(position(x.shape(), &i))
            }));
            start += out.shape[dim];
            part
        })
        .collect()
}

pub(super) fn flip(dims: &[usize], x: &Array) -> Elements {
    x.elements.pick(indices(x.shape()).map(|mut i| {
        for &d in dims {
            i[d] = x.shape()[d] - 1 - i[d];
        }
        Some(position(x.shape(), &i))
    }))
}

pub(super) fn constant_pad(op: &ConstantPad, x: &Array, out: &TensorType) -> Elements {
    let mut result = Array::filled(out.clone(), op.value).elements;
    for (from, mut i) in indices(x.shape()).enumerate() {
        for (i, [before, _]) in i.iter_mut().zip(&op.pads) {
            *i += before;
        }
        result.put(position(&out.shape, &i), &x.elements, from, false);
    }
    result
}

pub(super) fn triangle(op: &Triangle, x: &Array) -> Elements {
    x.elements.pick(indices(x.shape()).enumerate().map(|(at, i)| {
        let above = i[i.len() - 1] as i64 - i[i.len() - 2] as i64;
        let kept = if op.upper { above >= op.diagonal } else { above <= op.diagonal };
        kept.then_some(at)
    }))
}
