//! Scaled dot-product attention without the whole score matrix in memory.
//!
//! Queries are processed in blocks. The scores of a block against all keys it can see are one product. Its weights
//! times the values are another. The backward pass computes the weights again from the saved logarithm of the
//! softmax's denominator (Dao et al., "FlashAttention", 2022).

mod backward;

use super::Float;
use super::matrix::{Matrix, Sizes, Strides, Threads, product, product_raw};
use super::parallel::{Shared, tasks, uninit};
use super::reduce::{largest, sum_of};
use super::simd::simd;

pub(crate) use backward::{AttentionGrads, attention_backward};

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
    /// Number of `(batch, key head)` pairs, whose gradients are independent.
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
    #[cfg(test)]
    fn contiguous(data: &'a [T], heads: usize, rows: usize, columns: usize) -> Self {
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

/// A mask's elements.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MaskData<'a, T> {
    /// A key with a nonzero element is visible.
    Bool(&'a [u8]),
    /// Numbers that are added to the scores.
    Added(&'a [T]),
}

/// A mask that broadcasts to `[b, h, l, s]`. Strides may be 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mask<'a, T> {
    /// Elements.
    pub(crate) data: MaskData<'a, T>,
    /// Index of the first element.
    pub(crate) start: usize,
    /// Distances along the four dimensions.
    pub(crate) strides: [usize; 4],
}

/// Operands of the forward and the backward pass.
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
    /// The mask, in addition to causality.
    pub(crate) mask: Option<Mask<'a, T>>,
    /// Whether query `i` sees only keys `0 ..= i`.
    pub(crate) causal: bool,
    /// Factor of the scores.
    pub(crate) scale: f64,
}

impl<T: Float> Attention<'_, T> {
    /// Number of keys that queries below `end` see.
    fn visible(&self, end: usize) -> usize {
        if self.causal { self.sizes.s.min(end) } else { self.sizes.s }
    }

    /// Writes `scale q kᵀ + mask` for queries `start..end` of one head to `scores [end - start, visible]`.
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

/// Distances of batches, heads and rows in the memory of a `[batch, head, row, column]` result.
pub(crate) type HeadStrides = [usize; 3];

/// `out = softmax(scale q kᵀ + mask) v`, of shape `[b, h, l, f]` and the given strides.
///
/// `lse [b, h, l]` becomes the logarithm of the softmax's denominator. A query that sees no key gets 0, and minus
/// infinity in `lse`.
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
