//! Scaled dot-product attention that never holds the whole score matrix.
//!
//! Queries are taken in blocks. A block's scores against all keys it can see are one product, its weights another; backward
//! computes them again from the saved logarithm of the softmax's denominator (Dao et al., "FlashAttention", 2022).

use super::Float;
use super::matrix::{Matrix, Sizes, Strides, Threads, product, product_raw};
use super::parallel::{Shared, tasks, uninit};
use super::reduce::{largest, sum_of, sum_of_two};
use super::simd::simd;

/// Queries in a block.
const BLOCK: usize = 64;

/// Sizes of an attention: `q [b, h, l, e]`, `k [b, g, s, e]`, `v [b, g, s, f]`; `g` divides `h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttentionSizes {
    /// Batch.
    pub(crate) b: usize,
    /// Query heads.
    pub(crate) h: usize,
    /// Key and value heads.
    pub(crate) g: usize,
    /// Queries.
    pub(crate) l: usize,
    /// Keys.
    pub(crate) s: usize,
    /// Width of queries and keys.
    pub(crate) e: usize,
    /// Width of values.
    pub(crate) f: usize,
}

impl AttentionSizes {
    /// Products for one operand's heads may run side by side: how many `(batch, key head)` pairs there are.
    fn pairs(&self) -> usize {
        self.b * self.g
    }
}

/// A `[batch, head, row, column]` operand whose rows are contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads<'a, T> {
    /// The memory it lies in.
    pub(crate) data: &'a [T],
    /// Index of the first element.
    pub(crate) start: usize,
    /// Distances of batches, heads and rows.
    pub(crate) strides: [usize; 3],
}

impl<'a, T> Heads<'a, T> {
    /// A row-major `[_, heads, rows, columns]` operand.
    pub(crate) fn contiguous(data: &'a [T], heads: usize, rows: usize, columns: usize) -> Self {
        Self { data, start: 0, strides: [heads * rows * columns, rows * columns, columns] }
    }

    fn head(&self, b: usize, h: usize) -> Matrix<'a, T> {
        Matrix {
            data: self.data,
            start: self.start + b * self.strides[0] + h * self.strides[1],
            strides: Strides { row: self.strides[2] as isize, column: 1 },
        }
    }

    fn row(&self, b: usize, h: usize, row: usize, width: usize) -> &'a [T] {
        let start = self.start + b * self.strides[0] + h * self.strides[1] + row * self.strides[2];
        &self.data[start..start + width]
    }
}

/// Which keys a query sees, beside causality.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MaskData<'a, T> {
    /// Nonzero takes part.
    Bool(&'a [u8]),
    /// Added to the scores.
    Added(&'a [T]),
}

/// A mask that broadcasts to `[b, h, l, s]`: strides may be 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mask<'a, T> {
    /// Its elements.
    pub(crate) data: MaskData<'a, T>,
    /// Index of the first element.
    pub(crate) start: usize,
    /// Distances along the four dimensions.
    pub(crate) strides: [usize; 4],
}

/// What both directions share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attention<'a, T> {
    /// Sizes.
    pub(crate) sizes: AttentionSizes,
    /// Queries.
    pub(crate) q: Heads<'a, T>,
    /// Keys.
    pub(crate) k: Heads<'a, T>,
    /// Values.
    pub(crate) v: Heads<'a, T>,
    /// Mask beside causality.
    pub(crate) mask: Option<Mask<'a, T>>,
    /// Query `i` sees keys `0 ..= i` alone.
    pub(crate) causal: bool,
    /// Factor of the scores.
    pub(crate) scale: f64,
}

impl<T: Float> Attention<'_, T> {
    /// Keys that some of the queries below `end` see.
    fn visible(&self, end: usize) -> usize {
        if self.causal { self.sizes.s.min(end) } else { self.sizes.s }
    }

    /// `scale q kᵀ + mask` of queries `start..end` of one head into `scores [end - start, visible]`.
    fn scores(&self, scores: &mut [T], b: usize, h: usize, start: usize, end: usize) {
        let AttentionSizes { h: heads, g, e, .. } = self.sizes;
        let columns = self.visible(end);
        let q = self.q.head(b, h).at(start * self.q.strides[2]);
        let k = self.k.head(b, h / (heads / g)).transposed();
        let sizes = Sizes { m: end - start, n: columns, k: e };
        product(sizes, (scores, Strides::rows(columns)), q, k, T::of(self.scale), false, Threads::One);
        for (i, row) in scores.chunks_exact_mut(columns.max(1)).enumerate() {
            if self.causal {
                row[columns.min(start + i + 1)..].fill(T::NEG_INFINITY);
            }
            if let Some(mask) = &self.mask {
                let [sb, sh, sl, ss] = mask.strides;
                let first = mask.start + b * sb + h * sh + (start + i) * sl;
                match mask.data {
                    MaskData::Bool(m) => {
                        for (j, v) in row.iter_mut().enumerate() {
                            *v = if m[first + j * ss] != 0 { *v } else { T::NEG_INFINITY };
                        }
                    }
                    MaskData::Added(m) => {
                        for (j, v) in row.iter_mut().enumerate() {
                            *v += m[first + j * ss];
                        }
                    }
                }
            }
        }
    }
}

/// Where a `[batch, head, row, column]` result goes: distances of batches, heads and rows in its memory.
pub(crate) type HeadStrides = [usize; 3];

/// `out = softmax(scale q kᵀ + mask) v` with `lse [b, h, l]`, the logarithm of the softmax's denominator. A query that sees nothing gets
/// 0, and minus infinity for `lse`. `out` holds all of `[b, h, l, f]` in the order its strides say.
pub(crate) fn attention<T: Float>(
    out: &mut [T],
    out_strides: HeadStrides,
    lse: &mut [T],
    attention: &Attention<'_, T>,
) {
    simd! {
        fn weights<T: Float>(scores: &mut [T], columns: usize, inverse: &mut [T], lse: &mut [T]) {
            for (row, (inverse, lse)) in scores.chunks_exact_mut(columns).zip(inverse.iter_mut().zip(lse)) {
                let max = largest(row);
                if max == T::NEG_INFINITY {
                    row.fill(T::ZERO);
                    (*inverse, *lse) = (T::ZERO, T::NEG_INFINITY);
                    continue;
                }
                for v in row.iter_mut() {
                    *v = (*v - max).exp();
                }
                let sum = sum_of(row, |v| v);
                (*inverse, *lse) = (T::ONE / sum, max + sum.ln());
            }
        }
    }
    let n = attention.sizes;
    let AttentionSizes { b, h, l, s, f, .. } = n;
    assert!(out.len() == b * h * l * f && lse.len() == b * h * l, "attention: results of {n:?}");
    if s == 0 {
        out.fill(T::ZERO);
        lse.fill(T::NEG_INFINITY);
        return;
    }
    let blocks = l.div_ceil(BLOCK);
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    let least = ((1 << 15) / (BLOCK * s * n.e.max(1)).max(1)).max(1);
    // Large blocks last: a causal head's later queries see more keys.
    tasks(b * h * blocks, least, &|task| {
        let mut inverse = [T::ZERO; BLOCK];
        let (pair, block) = (task / blocks, task % blocks);
        let (bi, hi) = (pair / h, pair % h);
        let (start, end) = (block * BLOCK, l.min((block + 1) * BLOCK));
        let (rows, columns) = (end - start, attention.visible(end));
        let scores = &mut uninit(rows * columns)[..];
        attention.scores(scores, bi, hi, start, end);
        // SAFETY: each task has rows of its own.
        weights(scores, columns, &mut inverse, unsafe { lse.slice(pair * l + start, rows) });
        let v = attention.v.head(bi, hi / (h / n.g));
        let base = bi * out_strides[0] + hi * out_strides[1];
        let sizes = Sizes { m: rows, n: f, k: columns };
        let first = base + start * out_strides[2];
        // SAFETY: as above; `row` checks that the block's rows lie in the result.
        let row = |i: usize| unsafe { out.slice(first + i * out_strides[2], f) };
        let (_, _) = (row(0), row(rows - 1));
        let strides = Strides { row: out_strides[2] as isize, column: 1 };
        let weights = Matrix::rows(scores, columns);
        // SAFETY: as above.
        unsafe {
            product_raw(sizes, (out.ptr().add(first), strides), weights, v, T::ONE, false, Threads::One);
        }
        for (i, inverse) in inverse[..rows].iter().enumerate() {
            for v in row(i) {
                *v *= *inverse;
            }
        }
    });
}

/// The gradients of [`attention`] with respect to queries, keys and values, each in memory of its own strides.
pub(crate) struct AttentionGrads<'a, T> {
    /// `[b, h, l, e]`
    pub(crate) dq: (&'a mut [T], HeadStrides),
    /// `[b, g, s, e]`
    pub(crate) dk: (&'a mut [T], HeadStrides),
    /// `[b, g, s, f]`
    pub(crate) dv: (&'a mut [T], HeadStrides),
}

/// With `P` the attention weights and `dP = dout vᵀ`: `dS = P (dP - Σ dout out)`, `dv = Pᵀ dout`, `dq = scale dS k`,
/// `dk = scale dSᵀ q`. Heads that read one key head add up in their order, as blocks of queries do.
pub(crate) fn attention_backward<T: Float>(
    grads: AttentionGrads<'_, T>,
    attention: &Attention<'_, T>,
    grad: Heads<'_, T>,
    out: Heads<'_, T>,
    lse: &[T],
) {
    simd! {
        /// Turns scores into weights and the gradient of the weights into that of the scores.
        fn score_grads<T: Float>(p: &mut [T], dp: &mut [T], columns: usize, lse: &[T], delta: &[T]) {
            let each = p.chunks_exact_mut(columns).zip(dp.chunks_exact_mut(columns)).zip(lse.iter().zip(delta));
            for ((p, dp), (&lse, &delta)) in each {
                if lse == T::NEG_INFINITY {
                    p.fill(T::ZERO);
                    dp.fill(T::ZERO);
                    continue;
                }
                for (p, dp) in p.iter_mut().zip(dp) {
                    let w = (*p - lse).exp();
                    *p = w;
                    *dp = w * (*dp - delta);
                }
            }
        }
    }
    let n = attention.sizes;
    let AttentionSizes { b, h, g, l, s, e, f } = n;
    let ((dq, q_strides), (dk, k_strides), (dv, v_strides)) = (grads.dq, grads.dk, grads.dv);
    assert!(dq.len() == b * h * l * e && dk.len() == b * g * s * e && dv.len() == b * g * s * f, "{n:?}");
    assert_eq!(lse.len(), b * h * l, "attention: lse of {n:?}");
    if b * h * l * s == 0 {
        for d in [dq, dk, dv] {
            d.fill(T::ZERO);
        }
        return;
    }
    let ends = |data: &[T], st: HeadStrides, heads: usize, rows: usize, width: usize| {
        let last = (b - 1) * st[0] + (heads - 1) * st[1] + (rows - 1) * st[2] + width;
        assert!(last <= data.len(), "attention: strides {st:?} exceed a gradient of {n:?}");
    };
    ends(dq, q_strides, h, l, e);
    ends(dk, k_strides, g, s, e);
    ends(dv, v_strides, g, s, f);
    let (dq, dk, dv) = (Shared::new(dq), Shared::new(dk), Shared::new(dv));
    let scale = T::of(attention.scale);
    let rows_of = |strides: HeadStrides| Strides { row: strides[2] as isize, column: 1 };
    let least = ((1 << 15) / (l * s * e.max(1)).max(1)).max(1);
    tasks(n.pairs(), least, &|pair| {
        let (mut p, mut dp): (Vec<T>, Vec<T>) = (uninit(BLOCK.min(l) * s), uninit(BLOCK.min(l) * s));
        let (bi, gi) = (pair / g, pair % g);
        let at = |st: HeadStrides, head: usize| bi * st[0] + head * st[1];
        let (k, v) = (attention.k.head(bi, gi), attention.v.head(bi, gi));
        let mut seen = 0;
        // The last queries come first: they see all keys, so that their products set what others add to.
        for hi in gi * (h / g)..(gi + 1) * (h / g) {
            for block in (0..l.div_ceil(BLOCK)).rev() {
                let (start, end) = (block * BLOCK, l.min((block + 1) * BLOCK));
                let (rows, columns) = (end - start, attention.visible(end));
                let (p, dp) = (&mut p[..rows * columns], &mut dp[..rows * columns]);
                attention.scores(p, bi, hi, start, end);
                let dout = grad.head(bi, hi).at(start * grad.strides[2]);
                let sizes = Sizes { m: rows, n: columns, k: f };
                let strides = Strides::rows(columns);
                product(sizes, (&mut *dp, strides), dout, v.transposed(), T::ONE, false, Threads::One);
                let mut delta = [T::ZERO; BLOCK];
                for (i, d) in delta[..rows].iter_mut().enumerate() {
                    *d = dot(grad.row(bi, hi, start + i, f), out.row(bi, hi, start + i, f));
                }
                let first = (bi * h + hi) * l + start;
                score_grads(p, dp, columns, &lse[first..first + rows], &delta);
                let (p, ds) = (Matrix::rows(&*p, columns), Matrix::rows(&*dp, columns));
                let q = attention.q.head(bi, hi).at(start * attention.q.strides[2]);
                let new = seen < columns;
                seen = seen.max(columns);
                // SAFETY: `ends` has checked the strides; this task alone writes these heads.
                unsafe {
                    let out = dq.ptr().add(at(q_strides, hi) + start * q_strides[2]);
                    let sizes = Sizes { m: rows, n: e, k: columns };
                    product_raw(sizes, (out, rows_of(q_strides)), ds, k, scale, false, Threads::One);
                    let out = dk.ptr().add(at(k_strides, gi));
                    let sizes = Sizes { m: columns, n: e, k: rows };
                    product_raw(sizes, (out, rows_of(k_strides)), ds.transposed(), q, scale, !new, Threads::One);
                    let out = dv.ptr().add(at(v_strides, gi));
                    let sizes = Sizes { m: columns, n: f, k: rows };
                    product_raw(sizes, (out, rows_of(v_strides)), p.transposed(), dout, T::ONE, !new, Threads::One);
                }
            }
        }
        // Keys behind the last query.
        for row in seen..s {
            // SAFETY: as above.
            unsafe {
                dk.slice(at(k_strides, gi) + row * k_strides[2], e).fill(T::ZERO);
                dv.slice(at(v_strides, gi) + row * v_strides[2], f).fill(T::ZERO);
            }
        }
    });
}

simd! {
    fn dot<T: Float>(x: &[T], y: &[T]) -> T {
        sum_of_two(x, y, |x, y| x * y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        sizes: AttentionSizes,
        causal: bool,
        mask: Option<Vec<f64>>,
    }

    fn cases() -> Vec<Case> {
        let plain = AttentionSizes { b: 2, h: 4, g: 2, l: 5, s: 7, e: 3, f: 6 };
        let mask: Vec<f64> =
            (0..5 * 7).map(|i| if i < 7 || i % 3 == 0 { f64::NEG_INFINITY } else { (i as f64).sin() }).collect();
        vec![
            Case { sizes: plain, causal: false, mask: None },
            Case { sizes: plain, causal: true, mask: None },
            Case { sizes: plain, causal: false, mask: Some(mask.clone()) },
            Case { sizes: plain, causal: true, mask: Some(mask) },
            // More than one block, more queries than keys and the other way round.
            Case { sizes: AttentionSizes { b: 1, h: 1, g: 1, l: 150, s: 70, e: 4, f: 4 }, causal: true, mask: None },
            Case { sizes: AttentionSizes { b: 1, h: 2, g: 1, l: 70, s: 150, e: 4, f: 4 }, causal: true, mask: None },
        ]
    }

    fn sample(n: usize, phase: f64) -> Vec<f64> {
        (0..n).map(|i| (i as f64 * 1.618 + phase).sin()).collect()
    }

    /// The definition, element by element.
    fn reference(c: &Case, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let AttentionSizes { b, h, g, l, s, e, f } = c.sizes;
        let (mut out, mut lses) = (vec![0.0; b * h * l * f], vec![f64::NEG_INFINITY; b * h * l]);
        for (bi, hi, i) in (0..b * h * l).map(|t| (t / (h * l), t / l % h, t % l)) {
            let gi = hi / (h / g);
            let score = |j: usize| -> f64 {
                if c.causal && j > i {
                    return f64::NEG_INFINITY;
                }
                let dot: f64 =
                    (0..e).map(|x| q[((bi * h + hi) * l + i) * e + x] * k[((bi * g + gi) * s + j) * e + x]).sum();
                dot * 0.5 + c.mask.as_ref().map_or(0.0, |m| m[i * s + j])
            };
            let sum: f64 = (0..s).map(|j| score(j).exp()).sum();
            if sum == 0.0 {
                continue;
            }
            lses[(bi * h + hi) * l + i] = sum.ln();
            for x in 0..f {
                out[((bi * h + hi) * l + i) * f + x] =
                    (0..s).map(|j| score(j).exp() / sum * v[((bi * g + gi) * s + j) * f + x]).sum();
            }
        }
        (out, lses)
    }

    fn with<'a>(c: &'a Case, q: &'a [f64], k: &'a [f64], v: &'a [f64]) -> Attention<'a, f64> {
        let AttentionSizes { h, g, l, s, e, f, .. } = c.sizes;
        Attention {
            sizes: c.sizes,
            q: Heads::contiguous(q, h, l, e),
            k: Heads::contiguous(k, g, s, e),
            v: Heads::contiguous(v, g, s, f),
            mask: c.mask.as_ref().map(|m| Mask { data: MaskData::Added(m), start: 0, strides: [0, 0, s, 1] }),
            causal: c.causal,
            scale: 0.5,
        }
    }

    fn operands(n: AttentionSizes) -> [Vec<f64>; 3] {
        [sample(n.b * n.h * n.l * n.e, 0.1), sample(n.b * n.g * n.s * n.e, 0.2), sample(n.b * n.g * n.s * n.f, 0.3)]
    }

    fn close(a: &[f64], b: &[f64], tolerance: f64) {
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!(a == b || (a - b).abs() < tolerance, "{i}: {a} {b}");
        }
    }

    #[test]
    fn forward_matches_the_definition() {
        for c in cases() {
            let n = c.sizes;
            let [q, k, v] = operands(n);
            let (mut out, mut lse) = (vec![7.0; n.b * n.h * n.l * n.f], vec![7.0; n.b * n.h * n.l]);
            attention(&mut out, [n.h * n.l * n.f, n.l * n.f, n.f], &mut lse, &with(&c, &q, &k, &v));
            let (want, want_lse) = reference(&c, &q, &k, &v);
            close(&out, &want, 1e-12);
            close(&lse, &want_lse, 1e-12);
            // The same with heads inside rows, as a projection leaves them.
            let mut across = vec![7.0; out.len()];
            attention(&mut across, [n.h * n.l * n.f, n.f, n.h * n.f], &mut lse, &with(&c, &q, &k, &v));
            for (i, v) in out.iter().enumerate() {
                let (x, l, h, b) = (i % n.f, i / n.f % n.l, i / (n.f * n.l) % n.h, i / (n.f * n.l * n.h));
                assert_eq!(*v, across[((b * n.l + l) * n.h + h) * n.f + x]);
            }
        }
    }

    /// L = Σ g out; the gradients against (L(+h) - L(-h)) / 2h along a direction for each operand.
    #[test]
    fn gradients_match_differences() {
        for c in cases() {
            let n = c.sizes;
            let ops = operands(n);
            let g = sample(n.b * n.h * n.l * n.f, 0.9);
            let (out, lse) = reference(&c, &ops[0], &ops[1], &ops[2]);
            let mut grads = [vec![7.0; ops[0].len()], vec![7.0; ops[1].len()], vec![7.0; ops[2].len()]];
            let [dq, dk, dv] = &mut grads;
            attention_backward(
                AttentionGrads {
                    dq: (dq, [n.h * n.l * n.e, n.l * n.e, n.e]),
                    dk: (dk, [n.g * n.s * n.e, n.s * n.e, n.e]),
                    dv: (dv, [n.g * n.s * n.f, n.s * n.f, n.f]),
                },
                &with(&c, &ops[0], &ops[1], &ops[2]),
                Heads::contiguous(&g, n.h, n.l, n.f),
                Heads::contiguous(&out, n.h, n.l, n.f),
                &lse,
            );
            for which in 0..3 {
                for seed in 0..5 {
                    let direction = sample(ops[which].len(), 10.0 + f64::from(seed) * 3.7);
                    let loss = |h: f64| -> f64 {
                        let mut o = ops.clone();
                        o[which].iter_mut().zip(&direction).for_each(|(x, d)| *x += h * d);
                        reference(&c, &o[0], &o[1], &o[2]).0.iter().zip(&g).map(|(a, b)| a * b).sum()
                    };
                    let want = (loss(1e-5) - loss(-1e-5)) / 2e-5;
                    let got: f64 = grads[which].iter().zip(&direction).map(|(a, b)| a * b).sum();
                    assert!((got - want).abs() < 1e-7, "operand {which} of {n:?}: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn same_bits_for_any_number_of_threads() {
        let c =
            Case { sizes: AttentionSizes { b: 2, h: 3, g: 3, l: 130, s: 130, e: 16, f: 16 }, causal: true, mask: None };
        let n = c.sizes;
        let [q, k, v] = operands(n).map(|x| x.into_iter().map(|v| v as f32).collect::<Vec<_>>());
        let a = Attention {
            sizes: n,
            q: Heads::contiguous(&q, n.h, n.l, n.e),
            k: Heads::contiguous(&k, n.g, n.s, n.e),
            v: Heads::contiguous(&v, n.g, n.s, n.f),
            mask: None,
            causal: true,
            scale: 0.25,
        };
        let run = |threads| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                let st = [n.h * n.l * n.f, n.l * n.f, n.f];
                let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; n.b * n.h * n.l]);
                attention(&mut out, st, &mut lse, &a);
                let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; q.len()], vec![0.0; q.len()]);
                let grads = AttentionGrads { dq: (&mut dq, st), dk: (&mut dk, st), dv: (&mut dv, st) };
                let view = Heads::contiguous(&out, n.h, n.l, n.f);
                attention_backward(grads, &a, view, view, &lse);
                (out, lse, dq, dk, dv)
            })
        };
        assert!(run(1) == run(3));
    }
}
