//! CPU kernels over plain row-major slices, shared by every backend that keeps its tensors in host memory.
//!
//! Two rules hold for all of them. *Determinism*: work is cut into chunks whose sizes follow from the shapes alone, and
//! partial sums are combined in chunk order, so results are the same bits for any number of threads and, matrix products
//! apart, for any x86-64 instruction set. *Memory*: kernels write to slices their caller owns; where an operand may be
//! overwritten, the kernel works in place.
//!
//! Shapes are the caller's contract (operators have inferred them): a slice of the wrong length is a programming error
//! and panics. Only indices are data, and kernels that take them return [`IndexError`].

// Loops over several arrays of one fixed length read best by index.
#![allow(clippy::needless_range_loop)]

mod activation;
mod attention;
mod batch_norm;
mod buffer;
mod cast;
mod conv;
mod depthwise;
mod elementwise;
mod embedding;
mod float;
pub(crate) mod generic;
mod loss;
mod matrix;
mod norm;
mod optimizer;
mod parallel;
mod patches;
mod pool;
mod reduce;
mod simd;
mod softmax;
mod strided;

pub(crate) use activation::*;
pub(crate) use attention::*;
pub(crate) use batch_norm::*;
pub(crate) use buffer::Buffer;
pub(crate) use cast::*;
pub(crate) use conv::*;
pub(crate) use elementwise::*;
pub(crate) use embedding::*;
pub(crate) use float::Float;
pub(crate) use loss::*;
pub(crate) use matrix::*;
pub(crate) use norm::*;
pub(crate) use optimizer::*;
pub(crate) use parallel::uninit;
pub(crate) use pool::*;
pub(crate) use reduce::*;
pub(crate) use softmax::*;
pub(crate) use strided::{Region, Strided, gather, put};

/// An index that points outside of what it addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("index {index} is out of range for size {size}")]
pub(crate) struct IndexError {
    /// The index found.
    pub(crate) index: i64,
    /// The size it must stay below.
    pub(crate) size: usize,
}

/// A type of tensor elements: plain bytes of any content.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {}

impl<T: bytemuck::Pod + Send + Sync> Element for T {}
