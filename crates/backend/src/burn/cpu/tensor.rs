//! burn-flex's tensors as slices for the host kernels, and back, without copies where their layout allows.

use burn_backend::{Bytes, DType as BurnType, Element as BurnElement, TensorMetadata};
use burn_flex::{Flex, FlexTensor, Layout};
use fusionllm_graph::TensorType;

use super::super::tensor::{Data, burn_type, shape};
use crate::host::{self, Element, Float, Strided};

/// An element type of both worlds.
pub(super) trait Scalar: Float + BurnElement {}

impl Scalar for f32 {}
impl Scalar for f64 {}

/// The tensor, whichever its kind.
pub(super) fn inner(data: Data<Flex>) -> FlexTensor {
    match data {
        Data::Float(t) | Data::Int(t) | Data::Bool(t) => t,
    }
}

/// A tensor of the kind its element type says.
pub(super) fn outer(tensor: FlexTensor) -> Data<Flex> {
    match tensor.dtype() {
        BurnType::Bool(_) => Data::Bool(tensor),
        t if t.is_float() => Data::Float(tensor),
        _ => Data::Int(tensor),
    }
}

/// All memory of a tensor, of which its elements may be a part.
pub(super) fn memory<T: Element>(t: &FlexTensor) -> &[T] {
    bytemuck::cast_slice(t.bytes())
}

/// The elements of a contiguous tensor.
pub(super) fn elements<T: Element>(t: &FlexTensor) -> &[T] {
    let start = t.layout().start_offset();
    &memory(t)[start..start + t.layout().num_elements()]
}

/// A row-major tensor over a vector.
pub(super) fn owned<T: Element>(v: Vec<T>, ty: &TensorType) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(v), Layout::contiguous(shape(&ty.shape)), burn_type(ty.dtype))
}

/// A tensor over a vector in an order of its own.
pub(super) fn arranged<T: Element>(v: Vec<T>, ty: &TensorType, strides: &[usize]) -> FlexTensor {
    let strides = strides.iter().map(|&s| s as isize).collect();
    FlexTensor::new(Bytes::from_elems(v), Layout::new(shape(&ty.shape), strides, 0), burn_type(ty.dtype))
}

/// The tensor in row-major order: itself where it is so already.
pub(super) fn contiguous(t: FlexTensor) -> FlexTensor {
    fn copied<T: Element>(t: &FlexTensor) -> FlexTensor {
        let dims = t.layout().shape().to_vec();
        let mut out = host::uninit::<T>(t.layout().num_elements());
        let strides = t.layout().strides();
        host::gather(&mut out, &dims, Strided { data: memory(t), start: t.layout().start_offset(), strides });
        FlexTensor::new(Bytes::from_elems(out), Layout::contiguous(shape(&dims)), t.dtype())
    }
    if t.is_contiguous() {
        return t;
    }
    match t.dtype().size() {
        8 => copied::<u64>(&t),
        4 => copied::<u32>(&t),
        2 => copied::<u16>(&t),
        _ => copied::<u8>(&t),
    }
}

/// Runs `f(out, source)`: `out` is the operand's own memory and `source` is `None` where nobody else holds it, else new memory.
pub(super) fn overwrite<T: Element + BurnElement>(x: FlexTensor, f: impl FnOnce(&mut [T], Option<&[T]>)) -> FlexTensor {
    let mut x = contiguous(x);
    let (start, n) = (x.layout().start_offset(), x.layout().num_elements());
    if let Some(memory) = x.try_storage_mut::<T>() {
        f(&mut memory[start..start + n], None);
        return x;
    }
    let mut out = host::uninit::<T>(n);
    f(&mut out, Some(elements(&x)));
    FlexTensor::new(Bytes::from_elems(out), Layout::contiguous(x.shape()), x.dtype())
}

/// The elements to change in place: the tensor's own memory where nobody else holds it, else a copy.
pub(super) fn change<T: Element + BurnElement>(x: FlexTensor) -> Change {
    let x = overwrite::<T>(x, |out, source| {
        if let Some(source) = source {
            out.copy_from_slice(source);
        }
    });
    Change(x)
}

/// A contiguous tensor that nobody else holds.
pub(super) struct Change(FlexTensor);

impl Change {
    pub(super) fn elements<T: Element + BurnElement>(&mut self) -> &mut [T] {
        let (start, n) = (self.0.layout().start_offset(), self.0.layout().num_elements());
        &mut self.0.storage_mut::<T>()[start..start + n]
    }

    pub(super) fn done(self) -> FlexTensor {
        self.0
    }
}

/// A tensor's strides when broadcast to a shape.
pub(super) fn broadcast(t: &FlexTensor, dims: &[usize]) -> Vec<isize> {
    let own = t.layout().shape();
    let missing = dims.len() - own.num_dims();
    (0..dims.len())
        .map(|d| match d.checked_sub(missing) {
            Some(i) if own[i] == dims[d] => t.layout().strides()[i],
            _ => 0,
        })
        .collect()
}

/// A tensor as a strided operand.
pub(super) fn strided<'a, T: Element>(t: &'a FlexTensor, strides: &'a [isize]) -> Strided<'a, T> {
    Strided { data: memory(t), start: t.layout().start_offset(), strides }
}
