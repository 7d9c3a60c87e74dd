//! Kernels for processors. They work on slices and know no tensors.
//!
//! *Determinism*: shapes alone decide how work is cut into chunks, and partial sums are added in chunk order. Results
//! have the same bits for any number of threads. Except for matrix products, they have the same bits for any x86-64
//! instruction set.
//!
//! *Memory*: kernels write to slices that the caller owns. Most can overwrite an operand.
//!
//! *Errors*: the caller checks shapes, and a slice of the wrong length panics. Indices are data, so a bad index is an
//! [`IndexError`].
//!
//! [`generic`] kernels are simple loops. All others are tuned.

// Loops over several arrays of one length are clearer with indices.
#![allow(clippy::needless_range_loop)]

mod activation;
mod attention;
mod batch_norm;
mod buffer;
mod cast;
mod conv;
mod convolution;
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
pub(crate) mod simd;
mod softmax;
mod strided;

pub(crate) use activation::*;
pub(crate) use attention::*;
pub(crate) use batch_norm::*;
pub(crate) use buffer::Buffer;
pub(crate) use cast::*;
pub(crate) use conv::*;
pub(crate) use convolution::Convolution;
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

/// An index out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("index {index} is out of range for size {size}")]
pub(crate) struct IndexError {
    /// The index found.
    pub(crate) index: i64,
    /// The bound that the index must be below.
    pub(crate) size: usize,
}

/// An element type. Any bytes are a valid element.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {}

impl<T: bytemuck::Pod + Send + Sync> Element for T {}
