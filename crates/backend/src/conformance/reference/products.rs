use fusionllm_graph::TensorType;
use fusionllm_graph::ops::ScaledDotProductAttention;

use super::{Array, Elements, indices, position};

pub(super) fn matmul(a: &Array, b: &Array, out: &TensorType) -> Result<Elements, String> {
    let (x, y) = (a.floats()?, b.floats()?);
    let k = a.shape()[a.ty.rank() - 1];
    // Positions in the operands of the matrices that a result's leading index reads.
    let lead = |t: &Array| Array::filled(TensorType::new(t.ty.dtype, &t.shape()[..t.ty.rank() - 2]), 0.0);
    let (la, lb) = (lead(a), lead(b));
    let (m, n) = (a.shape()[a.ty.rank() - 2], b.shape()[b.ty.rank() - 1]);
    let product = indices(&out.shape).map(|i| {
        let (batch, at) = i.split_at(i.len() - 2);
        let (pa, pb) = (la.broadcast_at(batch), lb.broadcast_at(batch));
        (0..k).map(|l| x[(pa * m + at[0]) * k + l] * y[(pb * k + l) * n + at[1]]).sum()
    });
    Ok(Elements::Float(product.collect()))
}

pub(super) fn linear(x: &Array, w: &Array, bias: Option<&Array>) -> Result<Elements, String> {
    let (out, inner) = (w.shape()[0], w.shape()[1]);
    let rows: usize = x.shape()[..x.ty.rank() - 1].iter().product();
    let (xs, ws) = (x.floats()?, w.floats()?);
    let bias = bias.map(Array::floats).transpose()?;
    let mut y = Vec::with_capacity(rows * out);
    for r in 0..rows {
        for o in 0..out {
            let sum: f64 = (0..inner).map(|i| xs[r * inner + i] * ws[o * inner + i]).sum();
            y.push(sum + bias.map_or(0.0, |b| b[o]));
        }
    }
    Ok(Elements::Float(y))
}

/// Sizes of an attention, and the weights P of every query.
struct Attention<'a> {
    q: &'a Array,
    k: &'a Array,
    v: &'a Array,
    /// `scale q kᵀ + mask` as `[b, h, l, s]`. It is minus infinity for a masked key.
    scores: Vec<f64>,
    /// Shape of the scores.
    shape: [usize; 4],
}

impl<'a> Attention<'a> {
    fn new(
        op: &ScaledDotProductAttention,
        q: &'a Array,
        k: &'a Array,
        v: &'a Array,
        mask: Option<&Array>,
    ) -> Result<Self, String> {
        let shape = [q.shape()[0], q.shape()[1], q.shape()[2], k.shape()[2]];
        let width = q.shape()[3];
        let (qs, ks) = (q.floats()?, k.floats()?);
        let mut scores = Vec::new();
        for i in indices(&shape) {
            let [b, h, l, s] = [i[0], i[1], i[2], i[3]];
            let g = h / (shape[1] / k.shape()[1]);
            let dot: f64 = (0..width)
                .map(|e| qs[position(q.shape(), &[b, h, l, e])] * ks[position(k.shape(), &[b, g, s, e])])
                .sum();
            let mut score = op.scale * dot;
            if let Some(mask) = mask {
                let at = mask.broadcast_at(&i);
                match &mask.elements {
                    Elements::Float(m) => score += m[at],
                    Elements::Int(m) if m[at] == 0 => score = f64::NEG_INFINITY,
                    Elements::Int(_) => {}
                }
            }
            if op.is_causal && s > l {
                score = f64::NEG_INFINITY;
            }
            scores.push(score);
        }
        Ok(Self { q, k, v, scores, shape })
    }

    fn rows(&self) -> usize {
        self.shape[0] * self.shape[1] * self.shape[2]
    }

    /// `ln Σ exp` of a row's scores, or minus infinity if all are masked.
    fn lse(&self, row: usize) -> f64 {
        let s = self.shape[3];
        let row = &self.scores[row * s..(row + 1) * s];
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY { max } else { max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() }
    }

    fn weight(&self, row: usize, s: usize, lse: f64) -> f64 {
        if lse == f64::NEG_INFINITY { 0.0 } else { (self.scores[row * self.shape[3] + s] - lse).exp() }
    }

    /// The position of a key head's rows, `[b, h / group, s]` of `of`.
    fn key_row(&self, of: &Array, row: usize, s: usize) -> usize {
        let [_, heads, queries, keys] = self.shape;
        let (b, h) = (row / queries / heads, row / queries % heads);
        let groups = of.shape()[1];
        (b * groups + h / (heads / groups)) * keys + s
    }
}

pub(super) fn attention(op: &ScaledDotProductAttention, x: &[Array]) -> Result<Vec<Elements>, String> {
    let a = Attention::new(op, &x[0], &x[1], &x[2], x.get(3))?;
    let (v, f) = (a.v.floats()?, a.v.shape()[3]);
    let lse: Vec<f64> = (0..a.rows()).map(|r| a.lse(r)).collect();
    let mut out = Vec::with_capacity(a.rows() * f);
    for (row, &lse) in lse.iter().enumerate() {
        for j in 0..f {
            let sum = (0..a.shape[3]).map(|s| match a.weight(row, s, lse) {
                0.0 => 0.0,
                p => p * v[a.key_row(a.v, row, s) * f + j],
            });
            out.push(sum.sum());
        }
    }
    Ok(vec![Elements::Float(out), Elements::Float(lse)])
}

// With P = exp(S - lse): dV = Pᵀ G, dS = P (G Vᵀ - Σ G out), dQ = scale dS K, dK = scale dSᵀ Q.
pub(super) fn attention_backward(op: &ScaledDotProductAttention, x: &[Array]) -> Result<Vec<Elements>, String> {
    let a = Attention::new(op, &x[1], &x[2], &x[3], x.get(6))?;
    let (g, q, k, v) = (x[0].floats()?, a.q.floats()?, a.k.floats()?, a.v.floats()?);
    let (out, lse) = (x[4].floats()?, x[5].floats()?);
    let (e, f) = (a.q.shape()[3], a.v.shape()[3]);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for row in 0..a.rows() {
        let delta: f64 = (0..f).map(|j| g[row * f + j] * out[row * f + j]).sum();
        for s in 0..a.shape[3] {
            let p = a.weight(row, s, lse[row]);
            let (kr, vr) = (a.key_row(a.k, row, s), a.key_row(a.v, row, s));
            let dp: f64 = (0..f).map(|j| g[row * f + j] * v[vr * f + j]).sum();
            let ds = p * (dp - delta);
            for j in 0..f {
                dv[vr * f + j] += p * g[row * f + j];
            }
            for j in 0..e {
                dq[row * e + j] += op.scale * ds * k[kr * e + j];
                dk[kr * e + j] += op.scale * ds * q[row * e + j];
            }
        }
    }
    Ok(vec![Elements::Float(dq), Elements::Float(dk), Elements::Float(dv)])
}
