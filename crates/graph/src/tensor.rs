//! Types of tensors, and tensors as plain bytes in host memory.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::GraphError;

/// Sizes of a tensor's dimensions, outermost first. A scalar has none.
pub type Shape = Vec<usize>;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// Two's complement, 64 bits.
    I64,
    /// Two's complement, 32 bits.
    I32,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Bool => 1,
        }
    }

    /// Whether values of this type have gradients.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16)
    }

    /// The name used in files and printed graphs, as safetensors spells it but in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element type and shape of a value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Sizes of the dimensions.
    pub shape: Shape,
}

impl TensorType {
    /// A type from its parts.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// Number of elements; 1 for a scalar.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes the elements take.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The element count and byte size, unless they overflow: what a stranger's shape must pass first.
    pub fn checked_bytes(&self) -> Option<usize> {
        self.shape.iter().try_fold(self.dtype.size(), |n, &d| n.checked_mul(d))
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

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
        #[doc = concat!("A tensor of `", stringify!($t), "`; the error names both counts if `data` does not fill `shape`.")]
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

    /// A tensor over `data`, whose length must be that of `ty`.
    pub fn from_bytes(ty: TensorType, data: Vec<u8>) -> Result<Self, GraphError> {
        if ty.checked_bytes() != Some(data.len()) {
            return Err(GraphError::Tensor(format!("{ty} does not take {} bytes", data.len())));
        }
        Ok(Self { ty, data: Arc::new(data) })
    }

    /// A tensor of booleans.
    pub fn from_bool(shape: impl Into<Shape>, data: &[bool]) -> Result<Self, GraphError> {
        Self::from_bytes(TensorType::new(DType::Bool, shape), data.iter().map(|&b| b as u8).collect())
    }

    /// All elements zero.
    pub fn zeros(ty: TensorType) -> Self {
        let data = vec![0; ty.bytes()];
        Self { ty, data: Arc::new(data) }
    }

    /// A scalar of float type `dtype`.
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

    /// The elements' bytes, row-major and little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// The bytes, without a copy if this is their only holder.
    pub fn into_bytes(self) -> Vec<u8> {
        Arc::try_unwrap(self.data).unwrap_or_else(|a| a.as_ref().clone())
    }

    /// The same elements under another shape of as many elements.
    pub fn reshaped(self, shape: impl Into<Shape>) -> Result<Self, GraphError> {
        let ty = TensorType::new(self.ty.dtype, shape);
        if ty.checked_bytes() != Some(self.data.len()) {
            return Err(GraphError::Tensor(format!("{} cannot be viewed as {ty}", self.ty)));
        }
        Ok(Self { ty, data: self.data })
    }

    /// Every element widened to `f64` (booleans as 0 and 1): for comparisons and small tensors.
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

    /// The elements converted to `dtype`: floats round to nearest, a float becomes an integer by truncation, a number a boolean by `!= 0`.
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
