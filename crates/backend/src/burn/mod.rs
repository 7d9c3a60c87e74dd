//! The backends on [burn](https://burn.dev) and its own kernels: on the processor, and on graphics adapters.
//!
//! The code that runs operators is generic over burn's backend trait. Operators that burn lacks run by their
//! decomposition or by a generic kernel of this crate.

#[cfg(feature = "wgpu")]
mod adapter;
mod elementwise;
#[cfg(feature = "burn")]
mod flex;
mod index;
mod ops;
mod reduce;
mod shared;
mod spatial;
mod tensor;
mod view;
#[cfg(feature = "wgpu")]
mod wgpu;

#[cfg(feature = "burn")]
pub use flex::Burn;
#[cfg(feature = "wgpu")]
pub use wgpu::Wgpu;
