use fusionllm_graph::TensorType;
use fusionllm_graph::ops::Conv2d;

use super::{Array, Elements, position};

/// Calls `f` with the positions (in result, operand, weight) of every multiply-add of a convolution.
fn terms(op: &Conv2d, x: &[usize], w: &[usize], y: &[usize], mut f: impl FnMut(usize, usize, usize)) {
    let per_group = y[1] / op.groups;
    for n in 0..y[0] {
        for o in 0..y[1] {
            for i in 0..y[2] {
                for j in 0..y[3] {
                    for c in 0..w[1] {
                        for a in 0..w[2] {
                            for b in 0..w[3] {
                                let row = (i * op.stride[0] + a * op.dilation[0]).checked_sub(op.padding[0]);
                                let column = (j * op.stride[1] + b * op.dilation[1]).checked_sub(op.padding[1]);
                                if let (Some(row), Some(column)) = (row, column)
                                    && row < x[2]
                                    && column < x[3]
                                {
                                    let channel = o / per_group * w[1] + c;
                                    f(
                                        position(y, &[n, o, i, j]),
                                        position(x, &[n, channel, row, column]),
                                        position(w, &[o, c, a, b]),
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

pub(super) fn forward(
    op: &Conv2d,
    x: &Array,
    w: &Array,
    bias: Option<&Array>,
    out: &TensorType,
) -> Result<Elements, String> {
    let (xs, ws) = (x.floats()?, w.floats()?);
    let mut y = vec![0.0; out.numel()];
    if let Some(bias) = bias {
        let plane = out.shape[2] * out.shape[3];
        for (at, y) in y.iter_mut().enumerate() {
            *y = bias.floats()?[at / plane % out.shape[1]];
        }
    }
    terms(op, x.shape(), w.shape(), &out.shape, |at, i, k| y[at] += xs[i] * ws[k]);
    Ok(Elements::Float(y))
}

pub(super) fn input_grad(op: &Conv2d, g: &Array, w: &Array, out: &TensorType) -> Result<Elements, String> {
    let (gs, ws) = (g.floats()?, w.floats()?);
    let mut dx = vec![0.0; out.numel()];
    terms(op, &out.shape, w.shape(), g.shape(), |at, i, k| dx[i] += gs[at] * ws[k]);
    Ok(Elements::Float(dx))
}

pub(super) fn weight_grad(op: &Conv2d, g: &Array, x: &Array, out: &TensorType) -> Result<Elements, String> {
    let (gs, xs) = (g.floats()?, x.floats()?);
    let mut dw = vec![0.0; out.numel()];
    terms(op, x.shape(), &out.shape, g.shape(), |at, i, k| dw[k] += gs[at] * xs[i]);
    Ok(Elements::Float(dw))
}
