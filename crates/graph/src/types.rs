//! Element types, shapes and types of tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The sizes of a tensor's dimensions, outermost first. Empty for a scalar.
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
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// The size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Bool => 1,
        }
    }

    /// Whether this is a floating-point type. Only such values have gradients.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16)
    }

    /// The type in which numbers of this type are summed: `F32` for 16-bit floats, which are too coarse for sums.
    pub fn accumulator(self) -> Self {
        match self {
            Self::F16 | Self::BF16 => Self::F32,
            dtype => dtype,
        }
    }

    /// The name in files and printed graphs. It is the name that safetensors uses, in lower case.
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
    /// The type of tensors with this element type and shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// The largest size in bytes, 256 TiB. The sum of 2^15 such sizes still fits 64 bits.
    pub const MAX_BYTES: usize = 1 << 48;

    /// The largest number of dimensions, as in PyTorch.
    pub const MAX_RANK: usize = 64;

    /// Number of elements; 1 for a scalar. Saturates where [`Self::check`] fails.
    pub fn numel(&self) -> usize {
        self.shape.iter().fold(1, |n: usize, &d| n.saturating_mul(d))
    }

    /// The size in bytes. Saturates where [`Self::check`] fails.
    pub fn bytes(&self) -> usize {
        self.numel().saturating_mul(self.dtype.size())
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Checks a type from a file or a peer, and returns its size in bytes. Arithmetic on sizes relies on this check.
    ///
    /// # Errors
    ///
    /// The type has more than [`Self::MAX_RANK`] dimensions, or its size exceeds [`Self::MAX_BYTES`]. Dimensions of
    /// size 0 count as 1 in that size, so the product of any of its dimensions is within the limit, too.
    pub fn check(&self) -> Result<usize, String> {
        if self.rank() > Self::MAX_RANK {
            return Err(format!("a tensor of {} dimensions, but at most {} are possible", self.rank(), Self::MAX_RANK));
        }
        let within = |n: &usize| *n <= Self::MAX_BYTES;
        let size = self.shape.iter().try_fold(self.dtype.size(), |n, &d| n.checked_mul(d.max(1)).filter(within));
        size.map(|_| self.bytes()).ok_or_else(|| format!("{self} is larger than any memory"))
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}
