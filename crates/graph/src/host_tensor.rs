//! Tensors as plain bytes in host memory.

use std::fmt;
use std::sync::Arc;

use crate::{DType, GraphError, Shape, TensorType};

/// A tensor in host memory: row-major, little-endian. Clones share the bytes.
#[derive(Clone, PartialEq)]
pub struct HostTensor {
    ty: TensorType,
    data: Arc<Vec<u8>>,
}

impl fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTensor({})", self.ty)
    }
}

macro_rules! constructors {
    ($($new:ident $get:ident $t:ty, $dtype:ident;)*) => {$(
        #[doc = concat!("A tensor of `", stringify!($t), "`. Fails if `data` and `shape` differ in their number of elements.")]
        pub fn $new(shape: impl Into<Shape>, data: &[$t]) -> Result<Self, GraphError> {
            let bytes = data.iter().flat_map(|v| v.to_le_bytes()).collect();
            Self::from_bytes(TensorType::new(DType::$dtype, shape), bytes)
        }

        #[doc = concat!("The elements as `", stringify!($t), "`, or `None` if they are of another type.")]
        pub fn $get(&self) -> Option<Vec<$t>> {
            (self.ty.dtype == DType::$dtype).then(|| {
                self.data
                    .chunks_exact(size_of::<$t>())
                    .map(|c| {
                        let mut b = [0u8; size_of::<$t>()];
                        b.copy_from_slice(c);
                        <$t>::from_le_bytes(b)
                    })
                    .collect()
            })
        }
    )*};
}

impl HostTensor {
    constructors! {
        from_f64 to_f64_exact f64, F64;
        from_f32 to_f32_exact f32, F32;
        from_i64 to_i64 i64, I64;
        from_i32 to_i32 i32, I32;
    }

    /// A tensor with these bytes. Fails unless `data` has the size of `ty`.
    pub fn from_bytes(ty: TensorType, data: Vec<u8>) -> Result<Self, GraphError> {
        if ty.check() != Ok(data.len()) {
            return Err(GraphError::Tensor(format!("{ty} cannot have {} bytes of data", data.len())));
        }
        Ok(Self { ty, data: Arc::new(data) })
    }

    /// A tensor of booleans. Fails if `data` and `shape` differ in their number of elements.
    pub fn from_bool(shape: impl Into<Shape>, data: &[bool]) -> Result<Self, GraphError> {
        Self::from_bytes(TensorType::new(DType::Bool, shape), data.iter().map(|&b| b as u8).collect())
    }

    /// A tensor of zeros.
    pub fn zeros(ty: TensorType) -> Self {
        let data = vec![0; ty.bytes()];
        Self { ty, data: Arc::new(data) }
    }

    /// A scalar, converted to `dtype`.
    pub fn scalar(dtype: DType, value: f64) -> Result<Self, GraphError> {
        Self::from_f64([], &[value])?.cast(dtype)
    }

    /// Element type and shape.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.ty.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// The bytes of the elements, row-major and little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// The bytes. Copies them only if another clone shares them.
    pub fn into_bytes(self) -> Vec<u8> {
        Arc::try_unwrap(self.data).unwrap_or_else(|a| a.as_ref().clone())
    }

    /// The same elements with another shape. Fails if the number of elements differs.
    pub fn reshaped(self, shape: impl Into<Shape>) -> Result<Self, GraphError> {
        let ty = TensorType::new(self.ty.dtype, shape);
        if ty.check() != Ok(self.data.len()) {
            return Err(GraphError::Tensor(format!("{} cannot be viewed as {ty}", self.ty)));
        }
        Ok(Self { ty, data: self.data })
    }

    /// Every element converted to `f64`, with booleans as 0 and 1. It copies the elements, so it is for comparisons and
    /// small tensors.
    pub fn to_f64(&self) -> Vec<f64> {
        let mut all = Vec::with_capacity(self.ty.numel());
        self.for_each(|x| all.push(x));
        all
    }

    /// Gives every element as `f64`, with booleans as 0 and 1.
    fn for_each(&self, mut take: impl FnMut(f64)) {
        fn each<const N: usize>(b: &[u8], f: impl Fn([u8; N]) -> f64, take: &mut impl FnMut(f64)) {
            b.as_chunks::<N>().0.iter().for_each(|chunk| take(f(*chunk)));
        }
        let (b, take) = (&self.data[..], &mut take);
        match self.ty.dtype {
            DType::F64 => each(b, f64::from_le_bytes, take),
            DType::F32 => each(b, |a| f32::from_le_bytes(a).into(), take),
            DType::F16 => each(b, |a| half::f16::from_le_bytes(a).to_f64(), take),
            DType::BF16 => each(b, |a| half::bf16::from_le_bytes(a).to_f64(), take),
            DType::I64 => each(b, |a| i64::from_le_bytes(a) as f64, take),
            DType::I32 => each(b, |a| i32::from_le_bytes(a).into(), take),
            DType::Bool => each(b, |a: [u8; 1]| f64::from(a[0]), take),
        }
    }

    /// The elements converted to `dtype`. Floats round to nearest, to 16 bits by way of f32, as PyTorch does. Floats
    /// become integers by truncation, and numbers become booleans by `!= 0`.
    pub fn cast(&self, dtype: DType) -> Result<Self, GraphError> {
        if dtype == self.ty.dtype {
            return Ok(self.clone());
        }
        let ty = TensorType::new(dtype, self.ty.shape.clone());
        let mut data = Vec::with_capacity(ty.bytes());
        let mut add = |bytes: &[u8]| data.extend_from_slice(bytes);
        match dtype {
            DType::F64 => self.for_each(|x| add(&x.to_le_bytes())),
            DType::F32 => self.for_each(|x| add(&(x as f32).to_le_bytes())),
            DType::F16 => self.for_each(|x| add(&half::f16::from_f32(x as f32).to_le_bytes())),
            DType::BF16 => self.for_each(|x| add(&half::bf16::from_f32(x as f32).to_le_bytes())),
            DType::I64 => self.for_each(|x| add(&(x as i64).to_le_bytes())),
            DType::I32 => match self.ty.dtype {
                // Of a large integer, the lowest 32 bits remain.
                DType::I64 => self.to_i64().iter().flatten().for_each(|i| add(&(*i as i32).to_le_bytes())),
                _ => self.for_each(|x| add(&(x as i32).to_le_bytes())),
            },
            DType::Bool => self.for_each(|x| add(&[(x != 0.0) as u8])),
        }
        Self::from_bytes(ty, data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a number was cut to the upper half of its 64 bits before it was rounded to 16. So one just above the
    /// middle of two neighbours counted as the middle.
    #[test]
    fn the_last_bit_decides_how_a_float_is_rounded() {
        for (dtype, half) in [(DType::BF16, 2f32.powi(-8)), (DType::F16, 2f32.powi(-11))] {
            let (middle, step) = (1.0 + half, 2.0 * half);
            let numbers = [middle - f32::EPSILON, middle, middle + f32::EPSILON];
            let rounded = HostTensor::from_f32([3], &numbers).unwrap().cast(dtype).unwrap();
            assert_eq!(rounded.to_f64(), [1.0, 1.0, f64::from(1.0 + step)], "{dtype}");
        }
    }
}
