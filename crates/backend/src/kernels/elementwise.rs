//! Arithmetic element by element over strided, broadcast operands.

use fusionllm_graph::ops::{Binary, Compare, Logical, Unary};

use super::activation::{self, blocks};
use super::simd::simd;
use super::strided::{Nest, Strided, chunks, fill};
use super::{Element, Float};

simd! {
    fn zip<T: Element, F: Fn(T, T) -> T>(out: &mut [T], b: &[T], f: &F) {
        for (o, &b) in out.iter_mut().zip(b) {
            *o = f(*o, b);
        }
    }

    fn zip_one<T: Element, F: Fn(T, T) -> T>(out: &mut [T], b: T, f: &F) {
        for o in out {
            *o = f(*o, b);
        }
    }
}

/// `out = f(a, b)`. If `a` is not given, it is in `out`.
fn combine<T: Element>(
    out: &mut [T],
    shape: &[usize],
    a: Option<Strided<'_, T>>,
    b: Strided<'_, T>,
    f: impl Fn(T, T) -> T + Sync,
) {
    let nest = Nest::new(shape, [(b.start, b.strides)]);
    let source = a.map(|a| (Nest::new(shape, [(a.start, a.strides)]), a.data));
    let [inner] = nest.inner();
    chunks(out, |chunk, start| {
        if let Some((nest, data)) = &source {
            fill(chunk, nest, start, data);
        }
        nest.runs(start, chunk.len(), |position, len, [at]| {
            let out = &mut chunk[position..position + len];
            match inner {
                1 => zip(out, &b.data[at..at + len], &f),
                0 => zip_one(out, b.data[at], &f),
                _ => {
                    for (i, o) in out.iter_mut().enumerate() {
                        *o = f(*o, b.data[(at as isize + i as isize * inner) as usize]);
                    }
                }
            }
        });
    });
}

/// A [`Binary`] operator on floats: `out = a op b`, or `b op a` if `swapped`. If `a` is not given, it is in `out`.
pub(crate) fn binary<T: Float>(
    op: Binary,
    swapped: bool,
    out: &mut [T],
    shape: &[usize],
    a: Option<Strided<'_, T>>,
    b: Strided<'_, T>,
) {
    macro_rules! run {
        ($f:expr) => {{
            let f = $f;
            match swapped {
                false => combine(out, shape, a, b, f),
                true => combine(out, shape, a, b, move |x, y| f(y, x)),
            }
        }};
    }
    match op {
        Binary::Add => run!(|a: T, b: T| a + b),
        Binary::Sub => run!(|a: T, b: T| a - b),
        Binary::Mul => run!(|a: T, b: T| a * b),
        Binary::Div => run!(|a: T, b: T| a / b),
        Binary::Pow => run!(|a: T, b: T| a.pow(b)),
        // NaN on either side gives NaN.
        Binary::Maximum => run!(|a: T, b: T| if a > b || a.nan() { a } else { b }),
        Binary::Minimum => run!(|a: T, b: T| if a < b || a.nan() { a } else { b }),
        Binary::Fmod => run!(|a: T, b: T| a % b),
        Binary::Remainder => run!(remainder::<T>),
        Binary::FloorDivide => run!(floor_divide::<T>),
    }
}

fn remainder<T: Float>(a: T, b: T) -> T {
    let m = a % b;
    if m != T::ZERO && (b < T::ZERO) != (m < T::ZERO) { m + b } else { m }
}

/// Python's `//`. It is exact even where `a / b` rounds up to an integer.
fn floor_divide<T: Float>(a: T, b: T) -> T {
    if b == T::ZERO {
        return a / b;
    }
    let m = a % b;
    let mut q = (a - m) / b;
    if m != T::ZERO && (b < T::ZERO) != (m < T::ZERO) {
        q -= T::ONE;
    }
    if q == T::ZERO {
        return T::ZERO.copysign(a / b);
    }
    let floor = q.floor();
    if q - floor > T::of(0.5) { floor + T::ONE } else { floor }
}

/// A [`Unary`] operator on floats. It overwrites `out`, which is first copied from `source` if there is one.
pub(crate) fn unary<T: Float>(op: Unary, out: &mut [T], source: Option<&[T]>) {
    macro_rules! run {
        (|$x:ident| $f:expr) => {{
            simd! {
                fn block<T: Float>(y: &mut [T]) {
                    for v in y {
                        let $x = *v;
                        *v = $f;
                    }
                }
            }
            blocks(out, source, |y, _| block(y))
        }};
    }
    match op {
        Unary::Neg => run!(|x| -x),
        Unary::Abs => run!(|x| x.abs()),
        // The sign of NaN is 0, as in ATen.
        Unary::Sign => run!(|x| T::of(f64::from(i8::from(x > T::ZERO) - i8::from(x < T::ZERO)))),
        Unary::Exp => activation::exp(out, source),
        Unary::Log => run!(|x| x.ln()),
        Unary::Log1p => run!(|x| x.ln_1p()),
        Unary::Expm1 => run!(|x| x.exp_m1()),
        Unary::Sqrt => run!(|x| x.sqrt()),
        Unary::Rsqrt => run!(|x| T::ONE / x.sqrt()),
        Unary::Reciprocal => run!(|x| T::ONE / x),
        Unary::Sin => run!(|x| x.sin()),
        Unary::Cos => run!(|x| x.cos()),
        Unary::Tanh => activation::tanh(out, source),
        Unary::Sigmoid => activation::sigmoid(out, source),
        Unary::Erf => activation::erf(out, source),
        Unary::Floor => run!(|x| x.floor()),
        Unary::Ceil => run!(|x| x.ceil()),
        Unary::Round => run!(|x| x.round()),
        Unary::Trunc => run!(|x| x.trunc()),
        Unary::Relu => activation::relu(out, source),
        Unary::Silu => activation::silu(out, source),
        // max(x, 0) + ln(1 + e^-|x|)
        Unary::Softplus => run!(|x| (if x < T::ZERO { T::ZERO } else { x }) + (-x.abs()).exp().ln_1p()),
        Unary::LogicalNot => run!(|x| if x == T::ZERO { T::ONE } else { T::ZERO }),
    }
}

/// Limits elements to a range; NaN stays. It overwrites `out`, which is first copied from `source` if there is one.
pub(crate) fn clamp<T: Element + PartialOrd>(out: &mut [T], source: Option<&[T]>, min: Option<T>, max: Option<T>) {
    chunks(out, |chunk, start| {
        if let Some(source) = source {
            chunk.copy_from_slice(&source[start..start + chunk.len()]);
        }
        for o in chunk {
            if let Some(min) = min {
                *o = if *o < min { min } else { *o };
            }
            if let Some(max) = max {
                *o = if *o > max { max } else { *o };
            }
        }
    });
}

/// `grad` where `x > threshold`, else 0. It overwrites `grad`, which is first copied from `source` if there is one.
pub(crate) fn threshold_backward<T: Float>(grad: &mut [T], source: Option<&[T]>, x: &[T], threshold: f64) {
    simd! {
        fn block<T: Float>(grad: &mut [T], x: &[T], threshold: T) {
            for (g, &x) in grad.iter_mut().zip(x) {
                *g = if x > threshold { *g } else { T::ZERO };
            }
        }
    }
    assert_eq!(grad.len(), x.len(), "gradient and operand differ in length");
    let threshold = T::of(threshold);
    blocks(grad, source, |g, start| block(g, &x[start..start + g.len()], threshold));
}

/// `x²`, correctly rounded. It overwrites `out`, which is first copied from `source` if there is one.
pub(crate) fn square<T: Float>(out: &mut [T], source: Option<&[T]>) {
    simd! {
        fn block<T: Float>(y: &mut [T]) {
            for v in y {
                *v *= *v;
            }
        }
    }
    blocks(out, source, |y, _| block(y));
}

/// `x scale` where the mask is not 0, else 0. It overwrites `out`, which is first copied from `source` if there is one.
pub(crate) fn mask_scale<T: Float>(out: &mut [T], source: Option<&[T]>, mask: &[u8], scale: f64) {
    simd! {
        fn block<T: Float>(y: &mut [T], mask: &[u8], scale: T) {
            for (v, &m) in y.iter_mut().zip(mask) {
                *v = if m != 0 { *v * scale } else { T::ZERO };
            }
        }
    }
    assert_eq!(out.len(), mask.len(), "operand and mask differ in length");
    let scale = T::of(scale);
    blocks(out, source, |y, start| block(y, &mask[start..start + y.len()], scale));
}

/// A comparison: 1 for true, 0 for false.
pub(crate) fn compare<T: Element + PartialOrd>(
    op: Compare,
    out: &mut [u8],
    shape: &[usize],
    a: Strided<'_, T>,
    b: Strided<'_, T>,
) {
    macro_rules! run {
        ($op:tt) => {
            compare_with(out, shape, a, b, |a, b| a $op b)
        };
    }
    match op {
        Compare::Eq => run!(==),
        Compare::Ne => run!(!=),
        Compare::Lt => run!(<),
        Compare::Le => run!(<=),
        Compare::Gt => run!(>),
        Compare::Ge => run!(>=),
    }
}

fn compare_with<T: Element>(
    out: &mut [u8],
    shape: &[usize],
    a: Strided<'_, T>,
    b: Strided<'_, T>,
    f: impl Fn(&T, &T) -> bool + Sync,
) {
    let nest = Nest::new(shape, [(a.start, a.strides), (b.start, b.strides)]);
    let inner = nest.inner();
    chunks(out, |chunk, start| {
        nest.runs(start, chunk.len(), |position, len, [i, j]| {
            let out = &mut chunk[position..position + len];
            match inner {
                [1, 1] => {
                    for ((o, a), b) in out.iter_mut().zip(&a.data[i..i + len]).zip(&b.data[j..j + len]) {
                        *o = f(a, b).into();
                    }
                }
                [1, 0] => {
                    for (o, a) in out.iter_mut().zip(&a.data[i..i + len]) {
                        *o = f(a, &b.data[j]).into();
                    }
                }
                [si, sj] => {
                    for (n, o) in out.iter_mut().enumerate() {
                        let n = n as isize;
                        let (i, j) = ((i as isize + n * si) as usize, (j as isize + n * sj) as usize);
                        *o = f(&a.data[i], &b.data[j]).into();
                    }
                }
            }
        });
    });
}

/// A logical operator on bytes of 0 and 1.
pub(crate) fn logical(op: Logical, out: &mut [u8], shape: &[usize], a: Strided<'_, u8>, b: Strided<'_, u8>) {
    match op {
        Logical::And => combine(out, shape, Some(a), b, |a, b| a & b),
        Logical::Or => combine(out, shape, Some(a), b, |a, b| a | b),
        Logical::Xor => combine(out, shape, Some(a), b, |a, b| a ^ b),
    }
}

/// `a` where the condition is not 0, else `b`.
pub(crate) fn select<T: Element>(
    out: &mut [T],
    shape: &[usize],
    condition: Strided<'_, u8>,
    a: Strided<'_, T>,
    b: Strided<'_, T>,
) {
    let operands = [(condition.start, condition.strides), (a.start, a.strides), (b.start, b.strides)];
    let nest = Nest::new(shape, operands);
    let [sc, sa, sb] = nest.inner();
    chunks(out, |chunk, start| {
        nest.runs(start, chunk.len(), |position, len, [c, i, j]| {
            for (n, o) in chunk[position..position + len].iter_mut().enumerate() {
                let at = |start: usize, stride: isize| (start as isize + n as isize * stride) as usize;
                *o = if condition.data[at(c, sc)] != 0 { a.data[at(i, sa)] } else { b.data[at(j, sb)] };
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T: Float>(op: Binary, a: &[T], b: &[T]) -> Vec<T> {
        let mut out = a.to_vec();
        binary(op, false, &mut out, &[a.len()], None, Strided { data: b, start: 0, strides: &[1] });
        out
    }

    /// Values from PyTorch 2.15.
    #[test]
    fn division_follows_python() {
        let inf = f32::INFINITY;
        let a = [5.0f32, -5.0, 5.0, -5.0, 1.0, -1.0, 0.0, inf, 5.0];
        let b = [3.0f32, 3.0, -3.0, -3.0, 0.0, 0.0, 0.0, 2.0, inf];
        let nan = f32::NAN;
        for (op, want) in [
            (Binary::Fmod, [2.0, -2.0, 2.0, -2.0, nan, nan, nan, nan, 5.0]),
            (Binary::Remainder, [2.0, 1.0, -1.0, -2.0, nan, nan, nan, nan, 5.0]),
            (Binary::FloorDivide, [1.0, -2.0, -2.0, 1.0, inf, -inf, nan, nan, 0.0]),
        ] {
            for (got, want) in with(op, &a, &b).into_iter().zip(want) {
                assert!(got == want || got.is_nan() && want.is_nan(), "{op:?}: {got} {want}");
            }
        }
        assert!(with(Binary::Maximum, &[nan, 1.0], &[1.0, nan]).iter().all(|v| v.is_nan()));
        assert!(with(Binary::Minimum, &[nan, 1.0], &[1.0, nan]).iter().all(|v| v.is_nan()));
    }

    /// Compares transposed, repeated and reversed operands with plain indexing.
    #[test]
    fn strides_address_what_they_say() {
        let shape = [3, 40, 70];
        let a: Vec<f64> = (0..3 * 40 * 70).map(f64::from).collect();
        let b: Vec<f64> = (0..40).map(|i| f64::from(i) * 0.5).collect();
        let (sa, sb) = ([1, -210, 3], [0, 1, 0]);
        let left = Strided { data: &a, start: 39 * 210, strides: &sa };
        let right = Strided { data: &b, start: 0, strides: &sb };
        let mut out = vec![0.0; a.len()];
        binary(Binary::Sub, true, &mut out, &shape, Some(left), right);
        let mut mask = vec![9; a.len()];
        compare(Compare::Lt, &mut mask, &shape, right, left);
        let m = Strided { data: &mask, start: 0, strides: &[2800, 70, 1] };
        let mut chosen = vec![0.0; a.len()];
        select(&mut chosen, &shape, m, left, right);
        for (n, o) in out.iter().enumerate() {
            let (i, j, k) = (n / 2800, n / 70 % 40, n % 70);
            let (x, y) = (a[i + (39 - j) * 210 + k * 3], b[j]);
            assert_eq!(*o, y - x);
            assert_eq!(mask[n], u8::from(y < x));
            assert_eq!(chosen[n], if y < x { x } else { y });
        }
    }
}
