//! Dropout, losses and updates of parameters.

use fusionllm_graph::CounterRng;
use fusionllm_graph::ops::{AdamwStep, Dropout, SgdStep};

use super::{Array, Elements};

pub(super) fn dropout(op: &Dropout, x: &Array, key: &Array) -> Result<Vec<Elements>, String> {
    let rng = CounterRng::new(key.ints()?[0] as u64);
    let keep: Vec<bool> = (0..x.ty.numel()).map(|i| f64::from(rng.uniform(i as u64, op.stream)) >= op.p).collect();
    let y = x.floats()?.iter().zip(&keep).map(|(v, &k)| if k { v / (1.0 - op.p) } else { 0.0 }).collect();
    Ok(vec![Elements::Float(y), Elements::Int(keep.into_iter().map(i64::from).collect())])
}

pub(super) fn dropout_backward(scale: f64, g: &Array, mask: &Array) -> Result<Elements, String> {
    let pairs = g.floats()?.iter().zip(mask.ints()?);
    Ok(Elements::Float(pairs.map(|(g, &m)| if m != 0 { g * scale } else { 0.0 }).collect()))
}

/// The class of each row, or `None` if it is ignored.
fn classes(ignore: i64, logits: &Array, target: &Array) -> Result<Vec<Option<usize>>, String> {
    let c = logits.shape()[1];
    let class = |&t: &i64| match usize::try_from(t) {
        _ if t == ignore => Ok(None),
        Ok(i) if i < c => Ok(Some(i)),
        _ => Err(format!("target {t} is out of range for {c} classes")),
    };
    target.ints()?.iter().map(class).collect()
}

pub(super) fn cross_entropy(ignore: i64, logits: &Array, target: &Array) -> Result<Vec<Elements>, String> {
    let (v, c) = (logits.floats()?, logits.shape()[1]);
    let classes = classes(ignore, logits, target)?;
    let (mut lses, mut sum, mut count) = (Vec::new(), 0.0, 0.0);
    for (r, class) in classes.into_iter().enumerate() {
        let row = &v[r * c..(r + 1) * c];
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        if let Some(class) = class {
            sum += lse - row[class];
            count += 1.0;
        }
        lses.push(lse);
    }
    Ok(vec![Elements::Float(vec![sum / count]), Elements::Float(lses)])
}

pub(super) fn cross_entropy_backward(ignore: i64, x: &[Array]) -> Result<Elements, String> {
    let (g, v, c, lse) = (x[0].floats()?[0], x[1].floats()?, x[1].shape()[1], x[3].floats()?);
    let classes = classes(ignore, &x[1], &x[2])?;
    let count = classes.iter().flatten().count() as f64;
    let mut d = vec![0.0; v.len()];
    for (r, class) in classes.into_iter().enumerate() {
        let Some(class) = class else { continue };
        for j in 0..c {
            let p = (v[r * c + j] - lse[r]).exp();
            d[r * c + j] = (p - if j == class { 1.0 } else { 0.0 }) * g / count;
        }
    }
    Ok(Elements::Float(d))
}

pub(super) fn adamw(op: &AdamwStep, x: &[Array]) -> Result<Vec<Elements>, String> {
    let [mut p, g, mut m, mut v] = [0, 1, 2, 3].map(|i| x[i].floats().map(<[f64]>::to_vec).unwrap_or_default());
    let &[lr, c1, c2, factor] = x[4].floats()? else { return Err("hyper must have four elements".into()) };
    for i in 0..p.len() {
        let g = g[i] * factor;
        m[i] = op.beta1 * m[i] + (1.0 - op.beta1) * g;
        v[i] = op.beta2 * v[i] + (1.0 - op.beta2) * g * g;
        p[i] -= lr * op.weight_decay * p[i];
        p[i] -= lr / c1 * m[i] / ((v[i] / c2).sqrt() + op.eps);
    }
    Ok([p, m, v].map(Elements::Float).into())
}

pub(super) fn sgd(op: &SgdStep, x: &[Array]) -> Result<Vec<Elements>, String> {
    let [mut p, g, mut m] = [0, 1, 2].map(|i| x[i].floats().map(<[f64]>::to_vec).unwrap_or_default());
    let &[lr, factor] = x[3].floats()? else { return Err("hyper must have two elements".into()) };
    for i in 0..p.len() {
        let g = g[i] * factor + op.weight_decay * p[i];
        m[i] = op.momentum * m[i] + g;
        p[i] -= lr * if op.nesterov { g + op.momentum * m[i] } else { m[i] };
    }
    Ok([p, m].map(Elements::Float).into())
}
