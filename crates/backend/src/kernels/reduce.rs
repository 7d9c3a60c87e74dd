//! Sums over whole tensors and along dimensions.

use super::parallel::{each, grain, part, rows_per_partial};
use super::simd::simd;
use super::{Element, Float};

/// Independent sums, so that additions overlap and vectorise.
pub(crate) const LANES: usize = 32;

/// Adds the lanes pairwise.
#[inline(always)]
pub(crate) fn fold<T: Float>(mut lanes: [T; LANES]) -> T {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
        n /= 2;
    }
    lanes[0]
}

/// Sum of `f(x)`, lane by lane.
#[inline(always)]
pub(crate) fn sum_of<T: Float>(x: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for c in whole {
        for i in 0..LANES {
            lanes[i] += f(c[i]);
        }
    }
    for (l, &v) in lanes.iter_mut().zip(rest) {
        *l += f(v);
    }
    fold(lanes)
}

/// Sum of `f(x, y)`, lane by lane.
#[inline(always)]
pub(crate) fn sum_of_two<T: Float>(x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (a, b) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] += f(a[i], b[i]);
        }
    }
    for ((l, &a), &b) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *l += f(a, b);
    }
    fold(lanes)
}

/// The largest element, without NaN; minus infinity if there is none.
#[inline(always)]
pub(crate) fn largest<T: Float>(x: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for c in whole {
        for i in 0..LANES {
            lanes[i] = c[i].larger(lanes[i]);
        }
    }
    for (l, &v) in lanes.iter_mut().zip(rest) {
        *l = v.larger(*l);
    }
    lanes.into_iter().fold(T::NEG_INFINITY, |a, b| b.larger(a))
}

/// Elements of a full sum's chunk.
const CHUNK: usize = 1 << 14;

/// Partial results of the chunks of `x`, in order.
fn partials<T: Float>(x: &[T], f: fn(&[T]) -> f64) -> Vec<f64> {
    let mut out = vec![0.0; x.len().div_ceil(CHUNK)];
    each(&mut out, 1, grain(CHUNK), |i, out| out[0] = f(part(x, i, CHUNK)));
    out
}

/// Sum of all elements. Chunks of 2^14 are summed in the elements' type, and their sums in `f64`.
pub(crate) fn sum<T: Float>(x: &[T]) -> T {
    simd! {
        fn chunk<T: Float>(x: &[T]) -> f64 {
            sum_of(x, |v| v).f64()
        }
    }
    T::of(partials(x, chunk).iter().sum())
}

/// Sum of the squares of all elements, accumulated in `f64` throughout.
pub(crate) fn sum_of_squares<T: Float>(x: &[T]) -> f64 {
    simd! {
        fn chunk<T: Float>(x: &[T]) -> f64 {
            const LANES: usize = 16;
            let mut lanes = [0.0f64; LANES];
            let (whole, rest) = x.as_chunks::<LANES>();
            for c in whole {
                for i in 0..LANES {
                    let v = c[i].f64();
                    lanes[i] += v * v;
                }
            }
            for (l, &v) in lanes.iter_mut().zip(rest) {
                *l += v.f64() * v.f64();
            }
            lanes.iter().sum()
        }
    }
    partials(x, chunk).iter().sum()
}

/// Sums `x [outer, n, inner]` over `n` into `out [outer, inner]`.
pub(crate) fn sum_dim<T: Float>(out: &mut [T], x: &[T], n: usize, inner: usize) {
    assert_eq!(out.len() * n, x.len() * usize::from(n > 0), "sum_dim: {} x {n} against {}", out.len(), x.len());
    if n == 0 || out.is_empty() {
        out.fill(T::ZERO);
        return;
    }
    if inner == 1 && out.len() == 1 {
        out[0] = sum(x);
    } else if inner == 1 {
        sum_rows(out, x, n);
    } else if out.len() == inner {
        sum_columns(out, x);
    } else {
        each(out, inner, grain(n * inner), |i, out| add_columns(out, part(x, i, n * inner)));
    }
}

/// Sums each row of `x [rows, n]`.
fn sum_rows<T: Float>(out: &mut [T], x: &[T], n: usize) {
    simd! {
        fn rows<T: Float>(out: &mut [T], x: &[T], n: usize) {
            for (o, row) in out.iter_mut().zip(x.chunks_exact(n)) {
                *o = sum_of(row, |v| v);
            }
        }
    }
    let chunk = super::parallel::rows_per_chunk(n);
    each(out, chunk, grain(chunk * n), |i, out| rows(out, part(x, i, chunk * n), n));
}

simd! {
    /// `out[j] = Σ_i x[i][j]`, in the order of rows.
    fn add_columns<T: Float>(out: &mut [T], x: &[T]) {
        // A strip of columns fits registers or the first-level cache.
        const STRIP: usize = 256;
        let width = out.len();
        for (s, out) in out.chunks_mut(STRIP).enumerate() {
            out.fill(T::ZERO);
            for row in x.chunks_exact(width) {
                for (o, &v) in out.iter_mut().zip(&row[s * STRIP..]) {
                    *o += v;
                }
            }
        }
    }
}

/// Sums the columns of `x [rows, out.len()]`, by at most 16 partial rows that are added in order.
pub(crate) fn sum_columns<T: Float>(out: &mut [T], x: &[T]) {
    let width = out.len();
    if width == 0 {
        return;
    }
    let rows = x.len() / width;
    let chunk = rows_per_partial(rows, width);
    if rows <= chunk {
        add_columns(out, x);
        return;
    }
    let mut partial = vec![T::ZERO; rows.div_ceil(chunk) * width];
    each(&mut partial, width, 1, |i, p| add_columns(p, part(x, i, chunk * width)));
    add_columns(out, &partial);
}

/// Folds `x [outer, n, inner]` over `n` with `f`, in order: `out [outer, inner]`. `n` is at least 1.
pub(crate) fn fold_dim<T: Element>(out: &mut [T], x: &[T], n: usize, inner: usize, f: impl Fn(T, T) -> T + Sync) {
    assert!(n > 0 && out.len() * n == x.len(), "fold_dim: {} x {n} against {}", out.len(), x.len());
    if out.is_empty() {
        return;
    }
    each(out, inner, grain(n * inner), |i, out| {
        let (first, rest) = part(x, i, n * inner).split_at(inner);
        out.copy_from_slice(first);
        for row in rest.chunks_exact(inner) {
            for (o, &v) in out.iter_mut().zip(row) {
                *o = f(*o, v);
            }
        }
    });
}

/// Writes the position along `n` of the first largest (or smallest) element of `x [outer, n, inner]` to `out [outer,
/// inner]`. NaN is more extreme than any number.
#[allow(clippy::eq_op)] // Only NaN differs from itself.
pub(crate) fn arg_extremum<T: Element + PartialOrd>(out: &mut [i64], x: &[T], n: usize, inner: usize, largest: bool) {
    assert!(n > 0 && out.len() * n == x.len(), "arg_extremum: {} x {n} against {}", out.len(), x.len());
    each(out, 1, grain(n), |i, out| {
        let x = &x[i / inner * n * inner + i % inner..];
        let (mut best, mut at) = (x[0], 0);
        for j in 1..n {
            let v = x[j * inner];
            let better = if largest { v > best } else { v < best } || (v != v && best == best);
            if better {
                (best, at) = (v, j);
            }
        }
        out[0] = at as i64;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect()
    }

    #[test]
    fn sums_match_f64() {
        for n in [0, 1, 31, 33, CHUNK, CHUNK + 1, 5 * CHUNK + 77] {
            let x = sample(n);
            let want: f64 = x.iter().map(|&v| f64::from(v)).sum();
            assert!((f64::from(sum(&x)) - want).abs() < 1e-3, "{n}");
            let want: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            assert!((sum_of_squares(&x) - want).abs() <= 1e-12 * want, "{n}");
        }
    }

    #[test]
    fn sums_along_a_dimension() {
        for (outer, n, inner) in [(3, 5, 7), (1, 70_000, 3), (70, 300, 1), (1, 0, 4), (2, 1, 1), (5, 40, 600)] {
            let x = sample(outer * n * inner);
            let mut out = vec![9.0; outer * inner];
            sum_dim(&mut out, &x, n, inner);
            for o in 0..outer {
                for j in 0..inner {
                    let want: f64 = (0..n).map(|i| f64::from(x[(o * n + i) * inner + j])).sum();
                    assert!((f64::from(out[o * inner + j]) - want).abs() < 1e-2, "{outer} {n} {inner}");
                }
            }
        }
    }

    #[test]
    fn extrema_and_folds() {
        let nan = f32::NAN;
        let x = [1.0, 5.0, 5.0, nan, 2.0, nan, -1.0, 0.0];
        let mut at = [9; 2];
        arg_extremum(&mut at, &x, 4, 1, true);
        assert_eq!(at, [3, 1]);
        let mut at = [9; 1];
        arg_extremum(&mut at, &x[..3], 3, 1, true);
        assert_eq!(at, [1]);
        let mut out = [0; 2];
        fold_dim(&mut out, &[1, 2, 3, 4, 5, 6], 3, 2, |a: i64, b| a * b);
        assert_eq!(out, [15, 48]);
    }

    #[test]
    fn same_bits_for_any_number_of_threads() {
        let x = sample(1_000_003);
        let run = |threads| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                let mut columns = vec![0.0; 101];
                sum_columns(&mut columns, &x[..101 * 9900]);
                (sum(&x).to_bits(), sum_of_squares(&x).to_bits(), columns)
            })
        };
        assert_eq!(run(1), run(3));
    }
}
