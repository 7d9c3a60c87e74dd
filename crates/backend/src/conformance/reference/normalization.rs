use fusionllm_graph::ops::{BatchNorm, LayerNorm};

use super::{Array, Elements};

fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    (mean, values.map(|v| (v - mean).powi(2)).sum::<f64>() / n)
}

/// Number and width of the rows that a normalisation over the last `dims` dimensions sees.
fn rows(x: &Array, dims: usize) -> (usize, usize) {
    let (lead, last) = x.shape().split_at(x.ty.rank() - dims);
    (lead.iter().product(), last.iter().product())
}

pub(super) fn layer_norm(op: &LayerNorm, x: &[Array]) -> Result<Vec<Elements>, String> {
    let v = x[0].floats()?;
    let (count, width) = rows(&x[0], op.dims);
    let weight = x.get(1).map(Array::floats).transpose()?;
    let bias = x.get(2).map(Array::floats).transpose()?;
    let (mut y, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
    for r in 0..count {
        let row = &v[r * width..(r + 1) * width];
        let (mean, var) = moments(row.iter().copied());
        let rstd = 1.0 / (var + op.eps).sqrt();
        for (j, v) in row.iter().enumerate() {
            y.push((v - mean) * rstd * weight.map_or(1.0, |w| w[j]) + bias.map_or(0.0, |b| b[j]));
        }
        means.push(mean);
        rstds.push(rstd);
    }
    Ok([y, means, rstds].map(Elements::Float).into())
}

/// With x̂ = (x - mean) rstd and h = g w, over one normalised group: dx = rstd (h - mean(h) - x̂ mean(h x̂)).
fn input_grad(h: &[f64], xhat: &[f64], rstd: f64) -> Vec<f64> {
    let n = h.len() as f64;
    let m1 = h.iter().sum::<f64>() / n;
    let m2 = h.iter().zip(xhat).map(|(h, x)| h * x).sum::<f64>() / n;
    h.iter().zip(xhat).map(|(h, x)| rstd * (h - m1 - x * m2)).collect()
}

pub(super) fn layer_norm_input_grad(dims: usize, x: &[Array]) -> Result<Elements, String> {
    let (g, v, mean, rstd) = (x[0].floats()?, x[1].floats()?, x[2].floats()?, x[3].floats()?);
    let weight = x.get(4).map(Array::floats).transpose()?;
    let (count, width) = rows(&x[1], dims);
    let mut dx = Vec::with_capacity(v.len());
    for r in 0..count {
        let h: Vec<f64> = (0..width).map(|j| g[r * width + j] * weight.map_or(1.0, |w| w[j])).collect();
        let xhat: Vec<f64> = (0..width).map(|j| (v[r * width + j] - mean[r]) * rstd[r]).collect();
        dx.extend(input_grad(&h, &xhat, rstd[r]));
    }
    Ok(Elements::Float(dx))
}

pub(super) fn layer_norm_weight_grad(dims: usize, x: &[Array]) -> Result<Vec<Elements>, String> {
    let (g, v, mean, rstd) = (x[0].floats()?, x[1].floats()?, x[2].floats()?, x[3].floats()?);
    let (count, width) = rows(&x[1], dims);
    let (mut dw, mut db) = (vec![0.0; width], vec![0.0; width]);
    for r in 0..count {
        for j in 0..width {
            let at = r * width + j;
            dw[j] += g[at] * (v[at] - mean[r]) * rstd[r];
            db[j] += g[at];
        }
    }
    Ok(vec![Elements::Float(dw), Elements::Float(db)])
}

/// The positions of each channel's elements.
fn channels(x: &Array) -> Vec<Vec<usize>> {
    let plane: usize = x.shape()[2..].iter().product();
    let c = x.shape()[1];
    let mut at = vec![Vec::new(); c];
    for i in 0..x.ty.numel() {
        at[i / plane % c].push(i);
    }
    at
}

pub(super) fn batch_norm(op: &BatchNorm, x: &[Array]) -> Result<Vec<Elements>, String> {
    let v = x[0].floats()?;
    let (weight, bias, old_mean, old_var) = (x[1].floats()?, x[2].floats()?, x[3].floats()?, x[4].floats()?);
    let mut y = vec![0.0; v.len()];
    let [mut means, mut rstds, mut new_mean, mut new_var] = [const { Vec::new() }; 4];
    for (c, at) in channels(&x[0]).into_iter().enumerate() {
        let (mean, var) = moments(at.iter().map(|&i| v[i]));
        let rstd = 1.0 / (var + op.eps).sqrt();
        for &i in &at {
            y[i] = (v[i] - mean) * rstd * weight[c] + bias[c];
        }
        let n = at.len() as f64;
        means.push(mean);
        rstds.push(rstd);
        new_mean.push((1.0 - op.momentum) * old_mean[c] + op.momentum * mean);
        new_var.push((1.0 - op.momentum) * old_var[c] + op.momentum * var * n / (n - 1.0));
    }
    Ok([y, means, rstds, new_mean, new_var].map(Elements::Float).into())
}

pub(super) fn batch_norm_input_grad(x: &[Array]) -> Result<Elements, String> {
    let (g, v, mean, rstd, weight) = (x[0].floats()?, x[1].floats()?, x[2].floats()?, x[3].floats()?, x[4].floats()?);
    let mut dx = vec![0.0; v.len()];
    for (c, at) in channels(&x[1]).into_iter().enumerate() {
        let h: Vec<f64> = at.iter().map(|&i| g[i] * weight[c]).collect();
        let xhat: Vec<f64> = at.iter().map(|&i| (v[i] - mean[c]) * rstd[c]).collect();
        for (i, d) in at.into_iter().zip(input_grad(&h, &xhat, rstd[c])) {
            dx[i] = d;
        }
    }
    Ok(Elements::Float(dx))
}

pub(super) fn batch_norm_weight_grad(x: &[Array]) -> Result<Vec<Elements>, String> {
    let (g, v, mean, rstd) = (x[0].floats()?, x[1].floats()?, x[2].floats()?, x[3].floats()?);
    let (mut dw, mut db) = (Vec::new(), Vec::new());
    for (c, at) in channels(&x[1]).into_iter().enumerate() {
        dw.push(at.iter().map(|&i| g[i] * (v[i] - mean[c]) * rstd[c]).sum());
        db.push(at.iter().map(|&i| g[i]).sum());
    }
    Ok(vec![Elements::Float(dw), Elements::Float(db)])
}
