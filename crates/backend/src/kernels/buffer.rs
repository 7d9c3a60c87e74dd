use super::Element;
use super::parallel::uninit;

/// The memory of a tensor: elements of any type, aligned for their size.
#[derive(Debug, Clone)]
pub(crate) enum Buffer {
    Bytes(Vec<u8>),
    Words16(Vec<u16>),
    Words32(Vec<u32>),
    Words64(Vec<u64>),
}

impl Buffer {
    pub(crate) fn new<T: Element>(elements: Vec<T>) -> Self {
        match size_of::<T>() {
            8 => Self::Words64(bytemuck::cast_vec(elements)),
            4 => Self::Words32(bytemuck::cast_vec(elements)),
            2 => Self::Words16(bytemuck::cast_vec(elements)),
            _ => Self::Bytes(bytemuck::cast_vec(elements)),
        }
    }

    /// Copies the bytes of elements of `size` bytes each.
    pub(crate) fn copy_of(bytes: &[u8], size: usize) -> Self {
        fn copied<T: Element>(bytes: &[u8]) -> Buffer {
            let mut elements = uninit::<T>(bytes.len() / size_of::<T>());
            bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
            Buffer::new(elements)
        }
        match size {
            8 => copied::<u64>(bytes),
            4 => copied::<u32>(bytes),
            2 => copied::<u16>(bytes),
            _ => copied::<u8>(bytes),
        }
    }

    /// The elements as `T`, whose size must be that of the elements.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        match self {
            Self::Bytes(v) => bytemuck::cast_slice(v),
            Self::Words16(v) => bytemuck::cast_slice(v),
            Self::Words32(v) => bytemuck::cast_slice(v),
            Self::Words64(v) => bytemuck::cast_slice(v),
        }
    }

    /// The elements as [`elements`](Self::elements) returns them, to be changed.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        match self {
            Self::Bytes(v) => bytemuck::cast_slice_mut(v),
            Self::Words16(v) => bytemuck::cast_slice_mut(v),
            Self::Words32(v) => bytemuck::cast_slice_mut(v),
            Self::Words64(v) => bytemuck::cast_slice_mut(v),
        }
    }
}
