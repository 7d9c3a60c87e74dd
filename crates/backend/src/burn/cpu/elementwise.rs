//! Operators that work element by element.

use burn_flex::FlexTensor;
use fusionllm_graph::ops::{Binary, BinaryScalar, Clamp, Compare};
use fusionllm_graph::{DType, TensorType};

use super::tensor::{Scalar, broadcast, contiguous, elements, overwrite, owned, strided};
use crate::host::{self, Element, Strided};

pub(super) fn binary<T: Scalar>(op: Binary, a: FlexTensor, b: FlexTensor, out: &TensorType) -> FlexTensor {
    let dims = &out.shape;
    let fits = |t: &FlexTensor| t.layout().shape()[..] == dims[..] && t.is_contiguous() && t.is_unique();
    if fits(&a) {
        let strides = broadcast(&b, dims);
        return overwrite::<T>(a, |out, _| host::binary(op, false, out, dims, None, strided(&b, &strides)));
    }
    if fits(&b) {
        let strides = broadcast(&a, dims);
        return overwrite::<T>(b, |out, _| host::binary(op, true, out, dims, None, strided(&a, &strides)));
    }
    let (sa, sb) = (broadcast(&a, dims), broadcast(&b, dims));
    let mut y = host::uninit::<T>(out.numel());
    host::binary(op, false, &mut y, dims, Some(strided(&a, &sa)), strided(&b, &sb));
    owned(y, out)
}

pub(super) fn binary_scalar<T: Scalar>(op: &BinaryScalar, x: FlexTensor, out: &TensorType) -> FlexTensor {
    // Products and roots are exact to the last place where general powers are not.
    let square = op.op == Binary::Pow && !op.reverse && op.scalar == 2.0;
    let root = op.op == Binary::Pow && !op.reverse && op.scalar == 0.5;
    let scalar = [T::of(op.scalar)];
    let dims = [out.numel()];
    overwrite::<T>(x, |out, source| {
        if root {
            return host::unary(fusionllm_graph::ops::Unary::Sqrt, out, source);
        }
        if square {
            return host::square(out, source);
        }
        let source = source.map(|data| Strided { data, start: 0, strides: &[1] });
        host::binary(op.op, op.reverse, out, &dims, source, Strided { data: &scalar, start: 0, strides: &[0] });
    })
}

pub(super) fn compare<T: Element + PartialOrd>(
    op: Compare,
    a: &FlexTensor,
    b: &FlexTensor,
    out: &TensorType,
) -> FlexTensor {
    let (sa, sb) = (broadcast(a, &out.shape), broadcast(b, &out.shape));
    let mut y = host::uninit::<u8>(out.numel());
    host::compare::<T>(op, &mut y, &out.shape, strided(a, &sa), strided(b, &sb));
    owned(y, out)
}

pub(super) fn compare_scalar<T: Element + PartialOrd>(
    op: Compare,
    x: &FlexTensor,
    scalar: T,
    out: &TensorType,
) -> FlexTensor {
    let strides = broadcast(x, &out.shape);
    let nowhere = vec![0; out.rank()];
    let mut y = host::uninit::<u8>(out.numel());
    let scalar = Strided { data: &[scalar], start: 0, strides: &nowhere };
    host::compare::<T>(op, &mut y, &out.shape, strided(x, &strides), scalar);
    owned(y, out)
}

/// `T` only has the elements' size.
pub(super) fn choose<T: Element>(
    condition: &FlexTensor,
    a: &FlexTensor,
    b: &FlexTensor,
    out: &TensorType,
) -> FlexTensor {
    let [sc, sa, sb] = [condition, a, b].map(|t| broadcast(t, &out.shape));
    let mut y = host::uninit::<T>(out.numel());
    host::select::<T>(&mut y, &out.shape, strided(condition, &sc), strided(a, &sa), strided(b, &sb));
    owned(y, out)
}

pub(super) fn clamp<T: Scalar>(op: &Clamp, x: FlexTensor) -> FlexTensor {
    overwrite::<T>(x, |out, source| host::clamp(out, source, op.min.map(T::of), op.max.map(T::of)))
}

pub(super) fn cast(x: FlexTensor, from: DType, out: &TensorType) -> FlexTensor {
    fn to<A: host::Number>(x: &FlexTensor, out: &TensorType) -> FlexTensor {
        fn typed<A: host::Number, B: host::Number>(x: &FlexTensor, out: &TensorType) -> FlexTensor {
            let mut y = host::uninit::<B>(out.numel());
            host::cast(&mut y, elements::<A>(x));
            owned(y, out)
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
    if from == out.dtype {
        return x;
    }
    let x = contiguous(x);
    match from {
        DType::F64 => to::<f64>(&x, out),
        DType::F32 => to::<f32>(&x, out),
        DType::F16 => to::<half::f16>(&x, out),
        DType::BF16 => to::<half::bf16>(&x, out),
        DType::I64 => to::<i64>(&x, out),
        DType::I32 => to::<i32>(&x, out),
        DType::Bool => to::<u8>(&x, out),
    }
}

/// The operand where the mask holds, times `scale`; else 0.
pub(super) fn masked<T: Scalar>(x: FlexTensor, mask: &[u8], scale: f64) -> FlexTensor {
    overwrite::<T>(x, |out, source| host::mask_scale(out, source, mask, scale))
}
