//! Compiles a kernel for each width of vectors, and picks one at run time.
//!
//! The kernels are plain loops that the compiler vectorises. It neither fuses multiplications with additions nor
//! reorders sums, so all versions give the same bits.

use pulp::Arch;

/// The name of this processor's vector instructions beyond the target's baseline. `gemm` has kernels of its own for
/// each, which round sums in other ways.
pub(crate) fn instructions() -> Option<&'static str> {
    match Arch::new() {
        #[cfg(target_arch = "x86_64")]
        Arch::V3(_) => Some("AVX2"),
        #[cfg(target_arch = "x86_64")]
        Arch::V4(_) => Some("AVX-512"),
        _ => None,
    }
}

/// Defines `fn name<T: Bound, ..>(..)` and compiles its body for each width. Functions it calls must be
/// `#[inline(always)]`.
macro_rules! simd {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident<$($g:ident: $bound:path),+>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($g: $bound),+>($($arg: $ty),*) $(-> $ret)? {
            // A function of its own: the compiler knows that a function's operands do not overlap.
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<$($g: $bound),+>($($arg: $ty),*) $(-> $ret)? $body

            ::pulp::Arch::new().dispatch(#[inline(always)] || body($($arg),*))
        }
    )*};
}

pub(crate) use simd;
