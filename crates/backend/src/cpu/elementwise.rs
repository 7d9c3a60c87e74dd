//! Operators that work element by element.

use fusionllm_graph::ops::{Approximate, Binary, BinaryScalar, Clamp, Compare, Dropout, Gelu, GeluBackward, Unary};
use fusionllm_graph::{DType, Op, TensorType};

use super::tensor::{Array, with_bits};
use super::{Ran, all, generic, one, with_float};
use crate::kernels::generic::{Number, keep_mask, with_element, with_number};
use crate::kernels::{self, Element, Float, Strided};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    match op {
        Op::Unary(Unary::LogicalNot) => one(logical_not(all(inputs)?)),
        Op::Unary(_) | Op::Binary(_) | Op::BinaryScalar(_) if !out.dtype.is_float() => generic(op, inputs, outputs),
        Op::Unary(op) => {
            let [x] = all(inputs)?;
            with_float!(out.dtype, T => one(x.overwrite::<T>(|out, source| kernels::unary(*op, out, source))))
        }
        Op::Binary(op) => {
            let [a, b] = all(inputs)?;
            with_float!(out.dtype, T => one(binary::<T>(*op, a, b, out)))
        }
        Op::BinaryScalar(op) => {
            let [x] = all(inputs)?;
            with_float!(out.dtype, T => one(binary_scalar::<T>(op, x, out)))
        }
        Op::Compare(op) => {
            let [a, b] = all(inputs)?;
            with_element!(a.dtype, T => one(compare::<T>(*op, &a, &b, out)))
        }
        Op::CompareScalar(op) => {
            let [x] = all(inputs)?;
            with_number!(x.dtype, T => one(compare_scalar(op.op, &x, <T as Number>::of(op.scalar), out)))
        }
        Op::Logical(op) => {
            let [a, b] = all(inputs)?;
            let (sa, sb) = (a.broadcast(&out.shape), b.broadcast(&out.shape));
            let mut y = kernels::uninit::<u8>(out.numel());
            kernels::logical(*op, &mut y, &out.shape, a.strided(&sa), b.strided(&sb));
            one(Array::new(y, out))
        }
        Op::Where(_) => {
            let [condition, a, b] = all(inputs)?;
            with_bits!(out.dtype, T => one(choose::<T>(&condition, &a, &b, out)))
        }
        Op::Clamp(op) => {
            let [x] = all(inputs)?;
            with_number!(x.dtype, T => one(clamp::<T>(op, x)))
        }
        Op::Cast(_) => one(cast(all::<1>(inputs)?.into_iter().next().ok_or("takes an operand")?, out.dtype)),
        _ => activation(op, inputs, outputs),
    }
}

fn activation(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let dtype = outputs[0].dtype;
    match op {
        Op::Gelu(Gelu { approximate }) => {
            let [x] = all(inputs)?;
            with_float!(dtype, T => one(x.overwrite::<T>(|out, source| match approximate {
                Approximate::Tanh => kernels::gelu_tanh(out, source),
                Approximate::None => kernels::gelu_erf(out, source),
            })))
        }
        Op::GeluBackward(GeluBackward { approximate }) => {
            let [g, x] = all(inputs)?;
            let x = x.contiguous();
            with_float!(dtype, T => one(g.overwrite::<T>(|out, source| match approximate {
                Approximate::Tanh => kernels::gelu_tanh_backward(out, source, x.elements()),
                Approximate::None => kernels::gelu_erf_backward(out, source, x.elements()),
            })))
        }
        Op::ThresholdBackward(op) => {
            let [g, x] = all(inputs)?;
            let x = x.contiguous();
            with_float!(dtype, T => one(g.overwrite::<T>(|out, source| {
                kernels::threshold_backward(out, source, x.elements(), op.threshold);
            })))
        }
        Op::Dropout(op) => dropout(op, all(inputs)?, outputs),
        Op::DropoutBackward(op) => {
            let [g, mask] = all(inputs)?;
            let mask = mask.contiguous();
            with_float!(dtype, T => one(masked::<T>(g, mask.elements(), op.scale)))
        }
        _ => generic(op, inputs, outputs),
    }
}

fn logical_not([x]: [Array; 1]) -> Array {
    x.overwrite::<u8>(|out, source| {
        if let Some(source) = source {
            out.copy_from_slice(source);
        }
        out.iter_mut().for_each(|v| *v = u8::from(*v == 0));
    })
}

fn binary<T: Float>(op: Binary, a: Array, b: Array, out: &TensorType) -> Array {
    let shape = &out.shape;
    let reusable = |x: &Array| x.shape == *shape && x.is_contiguous() && x.is_unique();
    if reusable(&a) {
        let strides = b.broadcast(shape);
        return a.overwrite::<T>(|out, _| kernels::binary(op, false, out, shape, None, b.strided(&strides)));
    }
    if reusable(&b) {
        let strides = a.broadcast(shape);
        return b.overwrite::<T>(|out, _| kernels::binary(op, true, out, shape, None, a.strided(&strides)));
    }
    let (sa, sb) = (a.broadcast(shape), b.broadcast(shape));
    let mut y = kernels::uninit::<T>(out.numel());
    kernels::binary(op, false, &mut y, shape, Some(a.strided(&sa)), b.strided(&sb));
    Array::new(y, out)
}

fn binary_scalar<T: Float>(op: &BinaryScalar, x: Array, out: &TensorType) -> Array {
    // Products and roots are correctly rounded; general powers are not.
    let power = op.op == Binary::Pow && !op.reverse;
    let scalar = [T::of(op.scalar)];
    let shape = [out.numel()];
    x.overwrite::<T>(|out, source| {
        if power && op.scalar == 0.5 {
            return kernels::unary(Unary::Sqrt, out, source);
        }
        if power && op.scalar == 2.0 {
            return kernels::square(out, source);
        }
        let source = source.map(|data| Strided { data, start: 0, strides: &[1] });
        kernels::binary(op.op, op.reverse, out, &shape, source, Strided { data: &scalar, start: 0, strides: &[0] });
    })
}

fn compare<T: Element + PartialOrd>(op: Compare, a: &Array, b: &Array, out: &TensorType) -> Array {
    let (sa, sb) = (a.broadcast(&out.shape), b.broadcast(&out.shape));
    let mut y = kernels::uninit::<u8>(out.numel());
    kernels::compare::<T>(op, &mut y, &out.shape, a.strided(&sa), b.strided(&sb));
    Array::new(y, out)
}

fn compare_scalar<T: Element + PartialOrd>(op: Compare, x: &Array, scalar: T, out: &TensorType) -> Array {
    let strides = x.broadcast(&out.shape);
    let repeated = vec![0; out.rank()];
    let mut y = kernels::uninit::<u8>(out.numel());
    let scalar = Strided { data: &[scalar], start: 0, strides: &repeated };
    kernels::compare::<T>(op, &mut y, &out.shape, x.strided(&strides), scalar);
    Array::new(y, out)
}

/// `T` has the size of the elements.
fn choose<T: Element>(condition: &Array, a: &Array, b: &Array, out: &TensorType) -> Array {
    let [sc, sa, sb] = [condition, a, b].map(|x| x.broadcast(&out.shape));
    let mut y = kernels::uninit::<T>(out.numel());
    kernels::select::<T>(&mut y, &out.shape, condition.strided(&sc), a.strided(&sa), b.strided(&sb));
    Array::new(y, out)
}

fn clamp<T: Number + PartialOrd>(op: &Clamp, x: Array) -> Array {
    let bound = |v: Option<f64>| v.map(<T as Number>::of);
    x.overwrite::<T>(|out, source| kernels::clamp(out, source, bound(op.min), bound(op.max)))
}

pub(super) fn cast(x: Array, to: DType) -> Array {
    fn from<A: kernels::Convert>(x: &Array, out: &TensorType) -> Array {
        fn typed<A: kernels::Convert, B: kernels::Convert>(x: &Array, out: &TensorType) -> Array {
            let mut y = kernels::uninit::<B>(out.numel());
            kernels::cast(&mut y, x.elements::<A>());
            Array::new(y, out)
        }
        match out.dtype {
            DType::F64 => typed::<A, f64>(x, out),
            DType::F32 => typed::<A, f32>(x, out),
            DType::F16 => typed::<A, half::f16>(x, out),
            DType::BF16 => typed::<A, half::bf16>(x, out),
            DType::I64 => typed::<A, i64>(x, out),
            DType::I32 => typed::<A, i32>(x, out),
            DType::Bool => typed::<A, u8>(x, out),
        }
    }
    if x.dtype == to {
        return x;
    }
    let x = x.contiguous();
    let out = TensorType::new(to, x.shape.clone());
    match (x.dtype, to) {
        (DType::F32, DType::BF16) => {
            let mut y = kernels::uninit::<half::bf16>(out.numel());
            kernels::narrow(&mut y, x.elements::<f32>());
            return Array::new(y, &out);
        }
        (DType::BF16, DType::F32) => {
            let mut y = kernels::uninit::<f32>(out.numel());
            kernels::widen(&mut y, x.elements::<half::bf16>());
            return Array::new(y, &out);
        }
        _ => {}
    }
    match x.dtype {
        DType::F64 => from::<f64>(&x, &out),
        DType::F32 => from::<f32>(&x, &out),
        DType::F16 => from::<half::f16>(&x, &out),
        DType::BF16 => from::<half::bf16>(&x, &out),
        DType::I64 => from::<i64>(&x, &out),
        DType::I32 => from::<i32>(&x, &out),
        DType::Bool => from::<u8>(&x, &out),
    }
}

/// The result and the mask.
fn dropout(op: &Dropout, [x, key]: [Array; 2], outputs: &[TensorType]) -> Ran {
    let key = key.contiguous().elements::<i64>()[0];
    let mask: Vec<u8> = bytemuck::cast_vec(keep_mask(key, op.stream, op.p, outputs[0].numel()));
    let y = with_float!(outputs[0].dtype, T => Ok(masked::<T>(x, &mask, 1.0 / (1.0 - op.p))))?;
    Ok(vec![y, Array::new(mask, &outputs[1])])
}

/// The operand where the mask is set, times `scale`; else 0.
fn masked<T: Float>(x: Array, mask: &[u8], scale: f64) -> Array {
    x.overwrite::<T>(|out, source| kernels::mask_scale(out, source, mask, scale))
}
