//! Convolution with one channel in each group. Each tap adds a multiple of a row of the operand to a row of the result.

use super::Float;
use super::convolution::Convolution;
use super::parallel::{each, grain};
use super::reduce::sum_of_two;
use super::simd::simd;

/// Calls `f(tap, result range, operand start, operand step)` for every tap and every row of the result that lies
/// inside the operand. Positions count from the plane's start.
#[inline(always)]
fn rows(g: &Convolution, mut f: impl FnMut(usize, std::ops::Range<usize>, usize, usize)) {
    for tap in 0..g.taps() {
        let (ky, kx) = (tap / g.kernel[1], tap % g.kernel[1]);
        let wide = g.inside(1, kx);
        if wide.is_empty() {
            continue;
        }
        for row in g.inside(0, ky) {
            let y = row * g.stride[0] + ky * g.dilation[0] - g.padding[0];
            let x = wide.start * g.stride[1] + kx * g.dilation[1] - g.padding[1];
            let start = row * g.output[1];
            f(tap, start + wide.start..start + wide.end, y * g.input[1] + x, g.stride[1]);
        }
    }
}

simd! {
    fn plane<T: Float>(y: &mut [T], g: &Convolution, x: &[T], weight: &[T], bias: T) {
        y.fill(bias);
        rows(g, |tap, to, from, step| {
            let w = weight[tap];
            if step == 1 {
                for (y, &x) in y[to].iter_mut().zip(&x[from..]) {
                    *y += w * x;
                }
            } else {
                for (y, &x) in y[to].iter_mut().zip(x[from..].iter().step_by(step)) {
                    *y += w * x;
                }
            }
        });
    }

    fn plane_input_grad<T: Float>(dx: &mut [T], g: &Convolution, dy: &[T], weight: &[T]) {
        dx.fill(T::ZERO);
        rows(g, |tap, from, to, step| {
            let w = weight[tap];
            if step == 1 {
                for (dx, &dy) in dx[to..].iter_mut().zip(&dy[from]) {
                    *dx += w * dy;
                }
            } else {
                for (dx, &dy) in dx[to..].iter_mut().step_by(step).zip(&dy[from]) {
                    *dx += w * dy;
                }
            }
        });
    }

    fn plane_weight_grad<T: Float>(dw: &mut [T], g: &Convolution, dy: &[T], x: &[T]) {
        rows(g, |tap, to, from, step| {
            let dy = &dy[to];
            if step == 1 {
                dw[tap] += sum_of_two(dy, &x[from..from + dy.len()], |a, b| a * b);
            } else {
                for (&dy, &x) in dy.iter().zip(x[from..].iter().step_by(step)) {
                    dw[tap] += dy * x;
                }
            }
        });
    }
}

/// Computes the result of [`conv2d`](super::conv2d).
pub(super) fn forward<T: Float>(y: &mut [T], g: &Convolution, x: &[T], weight: &[T], bias: Option<&[T]>) {
    let taps = g.taps();
    each(y, g.plane_out(), grain(g.plane_out() * taps), |i, y| {
        let (c, x) = (i % g.c, &x[i * g.plane_in()..][..g.plane_in()]);
        plane(y, g, x, &weight[c * taps..][..taps], bias.map_or(T::ZERO, |b| b[c]));
    });
}

/// Computes the result of [`conv2d_input_grad`](super::conv2d_input_grad).
pub(super) fn input_grad<T: Float>(dx: &mut [T], g: &Convolution, dy: &[T], weight: &[T]) {
    let taps = g.taps();
    each(dx, g.plane_in(), grain(g.plane_in() * taps), |i, dx| {
        let (c, dy) = (i % g.c, &dy[i * g.plane_out()..][..g.plane_out()]);
        plane_input_grad(dx, g, dy, &weight[c * taps..][..taps]);
    });
}

/// Computes the result of [`conv2d_weight_grad`](super::conv2d_weight_grad). Images are added in order.
pub(super) fn weight_grad<T: Float>(dw: &mut [T], g: &Convolution, dy: &[T], x: &[T]) {
    let taps = g.taps();
    each(dw, taps, grain(g.n * g.plane_out() * taps), |c, dw| {
        dw.fill(T::ZERO);
        for image in 0..g.n {
            let plane = image * g.c + c;
            let (dy, x) = (&dy[plane * g.plane_out()..], &x[plane * g.plane_in()..]);
            plane_weight_grad(dw, g, &dy[..g.plane_out()], &x[..g.plane_in()]);
        }
    });
}
