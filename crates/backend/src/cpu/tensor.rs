//! Strided tensors over shared memory.

use std::sync::Arc;

use fusionllm_graph::{DType, HostTensor, TensorType};

use crate::kernels::generic::Operand;
use crate::kernels::{self, Buffer, Element, Strided};

const _: () = assert!(cfg!(target_endian = "little"), "tensors in host memory are little-endian");

/// A tensor. Clones and views share its memory; the sole owner of the memory may overwrite it.
#[derive(Debug, Clone)]
pub(super) struct Array {
    data: Arc<Buffer>,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// Distances between neighbours in each dimension, in elements. 0 repeats an element.
    pub(super) strides: Vec<isize>,
    /// Position of the first element.
    pub(super) start: usize,
}

/// Strides of a row-major tensor.
pub(super) fn row_major(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d] as isize;
    }
    strides
}

/// Runs `$body` with `$T` as an unsigned integer of the element type's size, for code that only moves elements.
macro_rules! with_bits {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype.size() {
            8 => {
                type $T = u64;
                $body
            }
            4 => {
                type $T = u32;
                $body
            }
            2 => {
                type $T = u16;
                $body
            }
            _ => {
                type $T = u8;
                $body
            }
        }
    };
}

pub(super) use with_bits;

impl Array {
    /// A row-major tensor over a vector.
    pub(super) fn new<T: Element>(elements: Vec<T>, ty: &TensorType) -> Self {
        Self::from_buffer(Buffer::new(elements), ty)
    }

    /// A tensor without elements.
    pub(super) fn empty(ty: &TensorType) -> Self {
        with_bits!(ty.dtype, T => Self::new::<T>(Vec::new(), ty))
    }

    pub(super) fn from_buffer(buffer: Buffer, ty: &TensorType) -> Self {
        let (shape, strides) = (ty.shape.clone(), row_major(&ty.shape));
        Self { data: Arc::new(buffer), dtype: ty.dtype, shape, strides, start: 0 }
    }

    /// A tensor over a vector that is not in row-major order.
    pub(super) fn with_strides<T: Element>(elements: Vec<T>, ty: &TensorType, strides: &[usize]) -> Self {
        Self { strides: strides.iter().map(|&s| s as isize).collect(), ..Self::new(elements, ty) }
    }

    pub(super) fn from_host(tensor: &HostTensor) -> Self {
        Self::from_buffer(Buffer::copy_of(tensor.bytes(), tensor.dtype().size()), tensor.ty())
    }

    /// Copies the tensor to row-major bytes.
    pub(super) fn to_host(&self) -> Result<HostTensor, String> {
        let x = self.clone().contiguous();
        HostTensor::from_bytes(self.ty(), x.bytes().to_vec()).map_err(|e| e.to_string())
    }

    pub(super) fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.shape.clone())
    }

    pub(super) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The same memory under another layout.
    pub(super) fn view(self, shape: Vec<usize>, strides: Vec<isize>, start: usize) -> Self {
        Self { data: self.data, dtype: self.dtype, shape, strides, start }
    }

    /// Whether the elements are in row-major order without gaps.
    pub(super) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.is_empty()
            || self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected *= size as isize;
                fits
            })
    }

    /// Whether no other tensor shares the memory.
    pub(super) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.data) == 1
    }

    /// The whole memory, of which the elements may be a part.
    pub(super) fn memory<T: Element>(&self) -> &[T] {
        self.data.elements()
    }

    /// The elements of a contiguous tensor.
    pub(super) fn elements<T: Element>(&self) -> &[T] {
        &self.memory()[self.start..self.start + self.numel()]
    }

    /// The bytes of a contiguous tensor.
    pub(super) fn bytes(&self) -> &[u8] {
        let size = self.dtype.size();
        &self.memory()[self.start * size..(self.start + self.numel()) * size]
    }

    /// A contiguous tensor as an operand of a generic kernel.
    pub(super) fn operand<'a>(&'a self, ty: &'a TensorType) -> Operand<'a> {
        Operand { ty, bytes: self.bytes() }
    }

    /// The tensor in row-major order, copied only if it is not so already.
    pub(super) fn contiguous(self) -> Self {
        if self.is_contiguous() {
            return self;
        }
        let ty = self.ty();
        with_bits!(self.dtype, T => {
            let mut out = kernels::uninit::<T>(self.numel());
            kernels::gather(&mut out, &self.shape, self.strided(&self.strides));
            Self::new(out, &ty)
        })
    }

    /// Strides of the tensor when it is broadcast to a shape.
    pub(super) fn broadcast(&self, shape: &[usize]) -> Vec<isize> {
        let missing = shape.len() - self.shape.len();
        (0..shape.len())
            .map(|d| match d.checked_sub(missing) {
                Some(i) if self.shape[i] == shape[d] => self.strides[i],
                _ => 0,
            })
            .collect()
    }

    /// The tensor as a strided operand.
    pub(super) fn strided<'a, T: Element>(&'a self, strides: &'a [isize]) -> Strided<'a, T> {
        Strided { data: self.memory(), start: self.start, strides }
    }

    /// Runs `f(out, source)`. For the sole owner, `out` is the operand's memory and `source` is `None`; else `out` is
    /// new memory.
    pub(super) fn overwrite<T: Element>(self, f: impl FnOnce(&mut [T], Option<&[T]>)) -> Self {
        let mut x = self.contiguous();
        let (start, n) = (x.start, x.numel());
        if let Some(buffer) = Arc::get_mut(&mut x.data) {
            f(&mut buffer.elements_mut()[start..start + n], None);
            return x;
        }
        let mut out = kernels::uninit::<T>(n);
        f(&mut out, Some(x.elements()));
        Self::new(out, &x.ty())
    }

    /// The elements for changes in place: the tensor's own memory for the sole owner, else a copy.
    pub(super) fn change<T: Element>(self) -> Change {
        Change(self.overwrite::<T>(|out, source| {
            if let Some(source) = source {
                out.copy_from_slice(source);
            }
        }))
    }
}

/// A contiguous tensor whose memory has no other owner.
pub(super) struct Change(Array);

impl Change {
    pub(super) fn elements<T: Element>(&mut self) -> &mut [T] {
        let range = self.0.start..self.0.start + self.0.numel();
        &mut Arc::make_mut(&mut self.0.data).elements_mut()[range]
    }

    pub(super) fn done(self) -> Array {
        self.0
    }
}
