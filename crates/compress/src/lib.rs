//! Codecs: a tensor of f32 becomes fewer bytes, and comes back as nearly the same tensor.
//!
//! [`Encoder::encode`] writes into a buffer that is used again and again; [`decode`] writes into a slice of the length that the
//! receiver expects, so a stranger's bytes decide no allocation: they decode, or they are an error. Which
//! [`Codec`] a sender chose is its own business, since the bytes say what they are. Sizes depend on the number of elements
//! alone ([`Codec::bytes`]), which is what a planner needs; the only exception are tensors that a codec cannot hold.
//!
//! # Wire form, version 1
//!
//! All numbers are little-endian, bits are counted from the lowest.
//!
//! ```text
//!   0         1         2         3         4                   8
//!   +---------+---------+---------+---------+-------------------+----- ~ -----+
//!   | version | form    | detail  | zero    | elements n, u32   | body        |
//!   +---------+---------+---------+---------+-------------------+----- ~ -----+
//!
//!   form 0  exact    detail 1: not finite, or beyond 2^120, so no other form would do
//!                    n f32
//!   form 1  bf16     n bf16
//!   form 2  int8     detail 1: rotated. m = n, rotated: n rounded up to 64; b = m / 32, rounded up
//!                    [seed u32, if rotated] [b scales bf16] [m codes i8]
//!   form 3  int4     as int8, but
//!                    [b blocks of 16 bytes: byte j holds element j in its low half, j + 16 in its high half, each plus 8]
//!   form 4  nvfp4    b = n / 16, rounded up
//!                    [scale f32] [b scales E4M3] [b blocks of 8 bytes: byte j holds element 2j low, 2j + 1 high, as E2M1]
//!   form 5  top-k    detail: how values are held, 0: f32, 1: bf16, 2: int8 in blocks of 32
//!                    [k u32] [indices] [k f32 | k bf16 | b = k / 32, rounded up, scales bf16, then k codes i8]
//! ```
//!
//! **Indices** of kept elements take one of two forms, whichever is smaller for this n and k:
//!
//! - a bitmap of n bits;
//! - differences between the indices' upper parts in unary, and their l lower bits as they are (Elias 1974, Fano 1971): k·l bits of lower
//!   parts in ascending order, filled up to a byte; then k + ((n - 1) >> l) bits, of which those at (index >> l) + rank are set. l minimises the size.
//!
//! Against differences of one fixed width this is smaller (the width would be the largest difference's, several times the mean) and, more
//! important here, its size is known before the data are: k follows exactly from the ratio that was asked for.
//!
//! **Rotation** ([`Codec::Int`]): the tensor is taken in pieces of 64 rows of 16 elements, and what is left, filled up with zeros, in pieces of 64 rows of one.
//! Signs are flipped at random (by the seed, which is sent), and each column goes through the orthonormal Hadamard transform of size 64, so that an
//! outlier is shared by 64 numbers.

mod adatopk;
mod block;
mod codec;
mod decode;
mod encode;
mod float;
mod index;
mod measure;
mod noise;
mod nvfp4;
mod rotate;
mod select;
mod wire;

pub use adatopk::adatopk;
pub use codec::{Bits, Codec, IntBlocks, TopK, Values};
pub use decode::{DecodeError, Decoded, decode};
pub use encode::{EncodeError, Encoded, Encoder};
pub use measure::{relative_error, stable_rank};
pub use wire::{HEADER, VERSION, exact_bytes};
