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
        fn each<const N: usize>(b: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            b.chunks_exact(N)
                .map(|c| {
                    let mut a = [0u8; N];
                    a.copy_from_slice(c);
                    f(a)
                })
                .collect()
        }
        let b = &self.data[..];
        match self.ty.dtype {
            DType::F64 => each(b, f64::from_le_bytes),
            DType::F32 => each(b, |a| f32::from_le_bytes(a).into()),
            DType::F16 => each(b, |a| half::f16::from_le_bytes(a).to_f64()),
            DType::BF16 => each(b, |a| half::bf16::from_le_bytes(a).to_f64()),
            DType::I64 => each(b, |a| i64::from_le_bytes(a) as f64),
            DType::I32 => each(b, |a| i32::from_le_bytes(a).into()),
            DType::Bool => each(b, |a: [u8; 1]| f64::from(a[0])),
        }
    }

    /// The elements converted to `dtype`. Floats round to nearest; floats become integers by truncation, numbers become
    /// booleans by `!= 0`.
    pub fn cast(&self, dtype: DType) -> Result<Self, GraphError> {
        if dtype == self.ty.dtype {
            return Ok(self.clone());
        }
        let ty = TensorType::new(dtype, self.ty.shape.clone());
        let integers = match self.ty.dtype {
            DType::I64 => self.to_i64(),
            _ => None,
        };
        let v = self.to_f64();
        let data: Vec<u8> = match dtype {
            DType::F64 => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F32 => v.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            DType::F16 => v.iter().flat_map(|x| half::f16::from_f64(*x).to_le_bytes()).collect(),
            DType::BF16 => v.iter().flat_map(|x| half::bf16::from_f64(*x).to_le_bytes()).collect(),
            DType::I64 => v.iter().flat_map(|x| (*x as i64).to_le_bytes()).collect(),
            DType::I32 => match integers {
                Some(i) => i.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
                None => v.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
            },
            DType::Bool => v.iter().map(|x| (*x != 0.0) as u8).collect(),
        };
        Self::from_bytes(ty, data)
    }
}
