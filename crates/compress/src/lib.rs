//! Codecs: lossy compression of tensors of f32 and bf16.
//!
//! [`Encoder::encode`] writes into a reusable buffer. [`decode`] writes into a slice of the length that the receiver
//! expects, so received bytes never decide how much memory is allocated. The bytes name their codec: the receiver
//! need not know which [`Codec`] the sender chose.
//!
//! Codecs compute with f32. The type of a tensor's own numbers is its [`Element`], which both ends know. It decides how
//! large the tensor is without a codec, and to what decoded numbers are rounded.
//!
//! The encoded size depends on the type and the number of elements alone ([`Codec::bytes`]), so a planner knows it in
//! advance. The only exception are tensors that no codec can represent.
//!
//! # Wire form, version 3
//!
//! All numbers are little-endian. Bits are counted from the lowest.
//!
//! ```text
//!   0         1         2         3         4                   8
//!   +---------+---------+---------+---------+-------------------+----- ~ -----+
//!   | version | form    | detail  | zero    | elements n, u32   | body        |
//!   +---------+---------+---------+---------+-------------------+----- ~ -----+
//!
//!   form 0  exact    detail 1: out of range, that is, an element is not finite or beyond 2^120
//!                    [n f32 | n bf16, as the tensor's own numbers]
//!   form 1  bf16     [n bf16]
//!   form 2  int      detail: bits of a code, plus 16 if rotated. m = n, or if rotated n rounded up to 64
//!                    [seed u32, if rotated] [m integers]
//!   form 3  nvfp4    b = n / 16, rounded up
//!                    [scale f32] [b scales E4M3] [b blocks of 8 bytes: byte j has element 2j low, 2j + 1 high, as E2M1]
//!   form 4  top-k    detail: the format of the values, 0: f32, 1: bf16, else integers of so many bits
//!                    [k u32] [indices] [k f32 | k bf16 | scales bf16, k codes]
//!   form 5  masked   detail as in form 4. The indices are those of another tensor, which the receiver has sent
//!                    [k u32] [k f32 | k bf16 | scales bf16, k codes]
//! ```
//!
//! **Integers** of 3, 4, 5, 6 or 8 bits stand in blocks of 32 that share a scale: first one bf16 scale for each block,
//! then the codes. Codes of 8 bits are bytes with a sign. Of codes with fewer bits, half of all codes is added, so that
//! they are not negative. Each block then has its planes of four bytes: plane p has bit p of each code, and its byte j
//! those of the codes j, j + 8, j + 16, j + 24, j + 4, j + 12, j + 20 and j + 28. Instead of planes 0 to 3, codes of 4
//! bits and more have 16 bytes: byte j has four bits of code j low, and of code j + 16 high. The last block is filled up,
//! except that codes of 8 bits end with the last element.
//!
//! **Kept values** that are integers have a scale for each span of the tensor's elements. A span has 64 elements. It has
//! twice as many, and so on, while fewer than 16 of them are kept on average. The codes stand in blocks of 32 as above.
//!
//! **Indices** of kept elements have one of two forms. The smaller one for this n and k is used:
//!
//! - A bitmap of n bits.
//! - Elias-Fano coding (Elias 1974, Fano 1971). The l lower bits of each index are written as they are, in ascending
//!   order: k·l bits, filled up to a byte. Then follow k + ((n - 1) >> l) bits. The bit at (index >> l) + rank is set
//!   for each index. Of ⌊log2 ⌊n / k⌋⌋ and its neighbours, l is the smallest that minimises the size.
//!
//! Fixed-width differences between neighbouring indices would take more: their width must fit the largest difference,
//! several times the mean. Their size would also depend on the data. With these two forms k follows exactly from the
//! requested ratio.
//!
//! **Rotation** ([`IntBlocks::rotate`]) makes 64 numbers share each outlier. The tensor is cut into pieces of 64 rows
//! and 16 columns. The rest is filled up with zeros and cut into pieces of 64 rows and one column. Signs are flipped at
//! random, by the seed that is sent. Then each column goes through the orthonormal Hadamard transform of size 64.

mod adatopk;
mod block;
mod codec;
mod decode;
mod element;
mod encode;
mod float;
mod index;
mod mask;
mod measure;
mod noise;
mod nvfp4;
mod rotate;
mod select;
mod sparse;
mod wire;

pub use adatopk::adatopk;
pub use block::Bits;
pub use codec::{Codec, IntBlocks, TopK, ValueFormat};
pub use decode::{DecodeError, Decoded, decode};
pub use element::Element;
pub use encode::{EncodeError, Encoded, Encoder};
pub use mask::Mask;
pub use measure::{relative_error, stable_rank};
pub use wire::{HEADER_BYTES, VERSION, exact_bytes};
