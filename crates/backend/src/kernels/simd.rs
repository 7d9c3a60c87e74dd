//! Compiles a kernel for several widths of vectors, and chooses one at run time.
//!
//! The kernels are plain loops that the compiler vectorises. It neither fuses multiplications with additions nor
//! reorders sums, so all versions give the same bits.

/// The vector instructions of the processor.
#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)] // Variants exist on one architecture only.
pub(crate) enum Level {
    /// The target's baseline.
    Base,
    /// x86-64-v3: 256-bit vectors.
    V3,
    /// x86-64-v4: 512-bit vectors.
    V4,
}

impl Level {
    /// The name of the instructions, beyond the target's baseline. `gemm` has kernels of its own for each, which round
    /// sums in other ways.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Self::Base => None,
            Self::V3 => Some("AVX2"),
            Self::V4 => Some("AVX-512"),
        }
    }
}

/// The best level of this processor.
#[inline]
pub(crate) fn level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            return Level::V4;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Level::V3;
        }
    }
    Level::Base
}

/// Defines `fn name<T: Bound, ..>(..)` and compiles its body for each [`Level`]. Functions it calls must be
/// `#[inline(always)]`.
macro_rules! simd {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident<$($g:ident: $bound:path),+>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($g: $bound),+>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<$($g: $bound),+>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            fn v3<$($g: $bound),+>($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            fn v4<$($g: $bound),+>($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match $crate::kernels::simd::level() {
                // SAFETY: `level` has found every feature that `v4` asks for.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::simd::Level::V4 => unsafe { v4($($arg),*) },
                // SAFETY: likewise for `v3`.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::simd::Level::V3 => unsafe { v3($($arg),*) },
                _ => body($($arg),*),
            }
        }
    )*};
}

pub(crate) use simd;
