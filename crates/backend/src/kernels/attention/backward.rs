use super::{Attention, AttentionSizes, BLOCK, HeadStrides, Heads};
use crate::kernels::Float;
use crate::kernels::matrix::{Matrix, Sizes, Strides, Threads, product, product_raw};
use crate::kernels::parallel::{Shared, tasks, uninit};
use crate::kernels::reduce::sum_of_two;
use crate::kernels::simd::simd;

/// The gradients of attention with respect to queries, keys and values, each with its own strides.
pub(crate) struct AttentionGrads<'a, T> {
    /// `[b, h, l, e]`
    pub(crate) dq: (&'a mut [T], HeadStrides),
    /// `[b, g, s, e]`
    pub(crate) dk: (&'a mut [T], HeadStrides),
    /// `[b, g, s, f]`
    pub(crate) dv: (&'a mut [T], HeadStrides),
}

/// With `P` the attention weights and `dP = dout vᵀ`: `dS = P (dP - Σ dout out)`, `dv = Pᵀ dout`, `dq = scale dS k`,
/// `dk = scale dSᵀ q`. Query heads that share a key head are added in order, and so are blocks of queries.
pub(crate) fn attention_backward<T: Float>(
    grads: AttentionGrads<'_, T>,
    attention: &Attention<'_, T>,
    grad: Heads<'_, T>,
    out: Heads<'_, T>,
    lse: &[T],
) {
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
    let heads_of = |data: &mut [T], strides: HeadStrides, heads: usize, rows: usize, width: usize| {
        let end = (b - 1) * strides[0] + (heads - 1) * strides[1] + (rows - 1) * strides[2] + width;
        assert!(end <= data.len(), "attention: strides {strides:?} exceed a gradient of {n:?}");
        GradientHeads { data: Shared::new(data), strides }
    };
    let (dq, dk, dv) =
        (heads_of(dq, q_strides, h, l, e), heads_of(dk, k_strides, g, s, e), heads_of(dv, v_strides, g, s, f));
    let backward = Backward { attention, grad, out, lse, dq, dk, dv };
    let least = ((1 << 15) / (l * s * e.max(1)).max(1)).max(1);
    tasks(n.pairs(), least, &|pair| backward.key_head(pair / g, pair % g));
}

/// A gradient's memory. Its strides stay within it for all heads and rows.
struct GradientHeads<T> {
    data: Shared<T>,
    strides: HeadStrides,
}

impl<T> GradientHeads<T> {
    fn at(&self, batch: usize, head: usize, row: usize) -> usize {
        batch * self.strides[0] + head * self.strides[1] + row * self.strides[2]
    }

    fn rows(&self) -> Strides {
        Strides { row: self.strides[2] as isize, column: 1 }
    }
}

struct Backward<'a, T> {
    attention: &'a Attention<'a, T>,
    grad: Heads<'a, T>,
    out: Heads<'a, T>,
    lse: &'a [T],
    dq: GradientHeads<T>,
    dk: GradientHeads<T>,
    dv: GradientHeads<T>,
}

/// One block of queries of one head.
#[derive(Clone, Copy)]
struct Block {
    batch: usize,
    head: usize,
    key_head: usize,
    start: usize,
    end: usize,
}

impl<T: Float> Backward<'_, T> {
    /// Computes all gradients that depend on one key head. No two tasks have the same key head.
    fn key_head(&self, batch: usize, key_head: usize) {
        let AttentionSizes { h, g, l, s, e, f, .. } = self.attention.sizes;
        let (mut p, mut dp): (Vec<T>, Vec<T>) = (uninit(BLOCK.min(l) * s), uninit(BLOCK.min(l) * s));
        let mut seen = 0;
        // The last queries see all keys, so they come first: their products set the sums that other blocks add to.
        for head in key_head * (h / g)..(key_head + 1) * (h / g) {
            for block in (0..l.div_ceil(BLOCK)).rev() {
                let (start, end) = (block * BLOCK, l.min((block + 1) * BLOCK));
                let columns = self.attention.visible(end);
                let used = (end - start) * columns;
                let block = Block { batch, head, key_head, start, end };
                self.block(block, &mut p[..used], &mut dp[..used], seen >= columns);
                seen = seen.max(columns);
            }
        }
        // Keys after the last query.
        for row in seen..s {
            // SAFETY: the strides stay within the gradients; this task alone writes these heads.
            unsafe {
                self.dk.data.slice(self.dk.at(batch, key_head, row), e).fill(T::ZERO);
                self.dv.data.slice(self.dv.at(batch, key_head, row), f).fill(T::ZERO);
            }
        }
    }

    /// Writes the gradient of a block of queries. It adds to the gradients of keys and values if `add`, else it sets
    /// them.
    fn block(&self, block: Block, p: &mut [T], dp: &mut [T], add: bool) {
        let Block { batch, head, key_head, start, end } = block;
        let AttentionSizes { h, l, e, f, .. } = self.attention.sizes;
        let Attention { q, k, v, scale, .. } = self.attention;
        let (rows, columns) = (end - start, self.attention.visible(end));
        let (k, v, scale) = (k.head(batch, key_head), v.head(batch, key_head), T::of(*scale));
        self.attention.scores(p, batch, head, start, end);
        let dout = self.grad.head(batch, head).at(start * self.grad.strides[2]);
        let sizes = Sizes { m: rows, n: columns, k: f };
        product(sizes, (&mut *dp, Strides::rows(columns)), dout, v.transposed(), T::ONE, false, Threads::One);
        let mut delta = [T::ZERO; BLOCK];
        for (i, d) in delta[..rows].iter_mut().enumerate() {
            *d = dot(self.grad.row(batch, head, start + i, f), self.out.row(batch, head, start + i, f));
        }
        let first = (batch * h + head) * l + start;
        score_grads(p, dp, columns, &self.lse[first..first + rows], &delta);
        let (p, ds) = (Matrix::rows(&*p, columns), Matrix::rows(&*dp, columns));
        let q = q.head(batch, head).at(start * q.strides[2]);
        let (dq, dk, dv) = (&self.dq, &self.dk, &self.dv);
        // SAFETY: the strides stay within the gradients; this task alone writes these heads.
        unsafe {
            let out = dq.data.ptr().add(dq.at(batch, head, start));
            let sizes = Sizes { m: rows, n: e, k: columns };
            product_raw(sizes, (out, dq.rows()), ds, k, scale, false, Threads::One);
            let out = dk.data.ptr().add(dk.at(batch, key_head, 0));
            let sizes = Sizes { m: columns, n: e, k: rows };
            product_raw(sizes, (out, dk.rows()), ds.transposed(), q, scale, add, Threads::One);
            let out = dv.data.ptr().add(dv.at(batch, key_head, 0));
            let sizes = Sizes { m: columns, n: f, k: rows };
            product_raw(sizes, (out, dv.rows()), p.transposed(), dout, T::ONE, add, Threads::One);
        }
    }
}

simd! {
    /// Replaces scores by weights, and the weights' gradient by the scores' gradient.
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

    fn dot<T: Float>(x: &[T], y: &[T]) -> T {
        sum_of_two(x, y, |x, y| x * y)
    }
}
