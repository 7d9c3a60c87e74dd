//! Element types, and positions of elements in row-major memory.

use std::borrow::Cow;
use std::cmp::Ordering;

use super::Operand;
use crate::kernels::Element;

/// Runs `$body` with `$T` as the element type of `$dtype`; booleans are bytes.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::fusionllm_graph::DType::Bool => {
                type $T = u8;
                $body
            }
            dtype => $crate::kernels::generic::with_number!(dtype, $T => $body),
        }
    };
}

/// Runs `$body` with `$T` as the element type of `$dtype`; the result is an error for booleans.
macro_rules! with_number {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::fusionllm_graph::DType::F64 => {
                type $T = f64;
                $body
            }
            ::fusionllm_graph::DType::F32 => {
                type $T = f32;
                $body
            }
            ::fusionllm_graph::DType::F16 => {
                type $T = half::f16;
                $body
            }
            ::fusionllm_graph::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            ::fusionllm_graph::DType::I64 => {
                type $T = i64;
                $body
            }
            ::fusionllm_graph::DType::I32 => {
                type $T = i32;
                $body
            }
            ::fusionllm_graph::DType::Bool => Err("needs numbers, got bool".to_string()),
        }
    };
}

pub(crate) use {with_element, with_number};

/// A number. Integer arithmetic wraps around.
pub(crate) trait Number: Element + PartialEq {
    const ZERO: Self;
    const ONE: Self;
    /// Whether the type is an integer, for which division by zero is an error.
    const INTEGER: bool;

    fn of(v: f64) -> Self;
    fn add(self, o: Self) -> Self;
    fn sub(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    /// C's `%`. It has the sign of the dividend.
    fn fmod(self, o: Self) -> Self;
    /// Python's `%`. It has the sign of the divisor.
    fn remainder(self, o: Self) -> Self;
    /// Python's `//`, which rounds down.
    fn floor_divide(self, o: Self) -> Self;
    fn negate(self) -> Self;
    fn magnitude(self) -> Self;
    /// -1, 0 or 1.
    fn sign(self) -> Self;
    fn nan(self) -> bool;
    /// Compares by value. NaN is the largest.
    fn order(self, o: Self) -> Ordering;

    /// Whether `o` replaces `self` as the extremum so far. NaN replaces every number and is never replaced.
    fn yields(self, o: Self, better: Ordering) -> bool {
        !self.nan() && (o.nan() || o.order(self) == better)
    }
}

macro_rules! float {
    ($t:ty, $wide:ty, $of:expr, $widen:expr, $narrow:expr) => {
        impl Number for $t {
            const ZERO: Self = <$t>::from_bits(0);
            const ONE: Self = $of;
            const INTEGER: bool = false;

            fn of(v: f64) -> Self {
                let f: fn(f64) -> $t = $narrow;
                f(v)
            }

            fn add(self, o: Self) -> Self {
                self + o
            }

            fn sub(self, o: Self) -> Self {
                self - o
            }

            fn mul(self, o: Self) -> Self {
                self * o
            }

            fn fmod(self, o: Self) -> Self {
                self % o
            }

            fn remainder(self, o: Self) -> Self {
                let r = self % o;
                if r != Self::ZERO && (r < Self::ZERO) != (o < Self::ZERO) { r + o } else { r }
            }

            // As in Python, the remainder is subtracted first: 1 // 0.1 is 9, because 1 % 0.1 is not 0.
            fn floor_divide(self, o: Self) -> Self {
                let widen: fn($t) -> $wide = $widen;
                let (a, b) = (widen(self), widen(o));
                if b == 0.0 {
                    return self / o;
                }
                let r = a % b;
                let mut q = (a - r) / b;
                if r != 0.0 && (r < 0.0) != (b < 0.0) {
                    q -= 1.0;
                }
                let floor = q.floor();
                let q = if q - floor > 0.5 { floor + 1.0 } else { floor };
                Self::of(f64::from(q))
            }

            fn negate(self) -> Self {
                -self
            }

            fn magnitude(self) -> Self {
                if self < Self::ZERO { -self } else { self }
            }

            fn sign(self) -> Self {
                if self > Self::ZERO {
                    Self::ONE
                } else if self < Self::ZERO {
                    -Self::ONE
                } else {
                    Self::ZERO
                }
            }

            fn nan(self) -> bool {
                self.is_nan()
            }

            fn order(self, o: Self) -> Ordering {
                self.partial_cmp(&o).unwrap_or_else(|| self.is_nan().cmp(&o.is_nan()))
            }
        }
    };
}

float!(f64, f64, 1.0, |v| v, |v| v);
float!(f32, f32, 1.0, |v| v, |v| v as f32);
float!(half::f16, f32, half::f16::ONE, half::f16::to_f32, |v| half::f16::from_f32(v as f32));
float!(half::bf16, f32, half::bf16::ONE, half::bf16::to_f32, |v| half::bf16::from_f32(v as f32));

macro_rules! integer {
    ($t:ty) => {
        impl Number for $t {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const INTEGER: bool = true;

            fn of(v: f64) -> Self {
                v as $t
            }

            fn add(self, o: Self) -> Self {
                self.wrapping_add(o)
            }

            fn sub(self, o: Self) -> Self {
                self.wrapping_sub(o)
            }

            fn mul(self, o: Self) -> Self {
                self.wrapping_mul(o)
            }

            fn fmod(self, o: Self) -> Self {
                self.wrapping_rem(o)
            }

            fn remainder(self, o: Self) -> Self {
                let r = self.wrapping_rem(o);
                if r != 0 && (r < 0) != (o < 0) { r + o } else { r }
            }

            fn floor_divide(self, o: Self) -> Self {
                let q = self.wrapping_div(o);
                if self.wrapping_rem(o) != 0 && (self < 0) != (o < 0) { q - 1 } else { q }
            }

            fn negate(self) -> Self {
                self.wrapping_neg()
            }

            fn magnitude(self) -> Self {
                self.wrapping_abs()
            }

            fn sign(self) -> Self {
                self.signum()
            }

            fn nan(self) -> bool {
                false
            }

            fn order(self, o: Self) -> Ordering {
                self.cmp(&o)
            }
        }
    };
}

integer!(i64);
integer!(i32);

/// The elements of an operand of element type `T`. They are copied only where they are not aligned.
pub(super) fn elements<'a, T: Element>(x: &Operand<'a>) -> Cow<'a, [T]> {
    match bytemuck::try_cast_slice(x.bytes) {
        Ok(s) => Cow::Borrowed(s),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(x.bytes)),
    }
}

/// For each element of shape `target`: the position of its operand in a row-major tensor that is broadcast from
/// `shape`.
pub(super) fn broadcast_offsets(shape: &[usize], target: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; target.len()];
    let mut stride = 1;
    for (d, &n) in shape.iter().enumerate().rev() {
        if n > 1 {
            strides[target.len() - shape.len() + d] = stride;
        }
        stride *= n;
    }
    strided_offsets(target, &strides)
}

/// `Σ index · stride` for every index of `shape`, in row-major order.
pub(super) fn strided_offsets(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    // The dimensions before one of size 0 may be larger than any memory.
    if shape.contains(&0) {
        return Vec::new();
    }
    let mut offsets = vec![0];
    for (&n, &stride) in shape.iter().zip(strides) {
        offsets = offsets.iter().flat_map(|&o| (0..n).map(move |i| o + i * stride)).collect();
    }
    offsets
}

/// The product of the dimensions before `dim`, its size, and the product of the dimensions after it.
pub(super) fn around(shape: &[usize], dim: usize) -> (usize, usize, usize) {
    (shape[..dim].iter().product(), shape[dim], shape[dim + 1..].iter().product())
}
