//! Two-dimensional convolution and its gradients, as matrix products over patches.

use super::Float;
use super::convolution::Convolution;
use super::depthwise;
use super::matrix::{Matrix, Sizes, Strides, Threads, product, product_raw};
use super::parallel::{Shared, each, grain, tasks, uninit};
use super::patches::{DEPTH, STEP, WIDEST, add_patches, patches, row_spans, rows_of, tile_width};

/// Writes the convolution of `x` with `weight`, plus `bias [o]`, to `y`.
pub(crate) fn conv2d<T: Float>(y: &mut [T], g: &Convolution, x: &[T], weight: &[T], bias: Option<&[T]>) {
    g.check(x.len(), weight.len(), y.len());
    assert!(bias.is_none_or(|b| b.len() == g.o), "convolution: the bias does not fit {g:?}");
    if y.is_empty() {
        return;
    }
    let (cg, og) = g.group();
    if cg == 1 && og == 1 {
        return depthwise::forward(y, g, x, weight, bias);
    }
    let depth = cg * g.taps();
    if depth == 0 {
        for (i, plane) in y.chunks_exact_mut(g.plane_out()).enumerate() {
            plane.fill(bias.map_or(T::ZERO, |b| b[i % g.o]));
        }
        return;
    }
    let weight = Matrix::rows(weight, depth);
    // With kernels of one element, the pixels of large images need no copy.
    let direct = g.pointwise() && g.plane_out() >= 4 * STEP;
    let (per, count) = if direct { (g.plane_out(), g.n) } else { (g.n * g.plane_out(), 1) };
    let width = if direct { per.min(2 * WIDEST) } else { tile_width(per) };
    let tiles = per.div_ceil(width);
    let y = Shared::new(y);
    // Channels of one product.
    let block = (DEPTH / g.taps()).clamp(1, cg);
    tasks(count * g.groups * tiles, 1, &|task| {
        let (image, group, tile) = (task / tiles / g.groups, task / tiles % g.groups, task % tiles);
        let pixels = tile * width..per.min((tile + 1) * width);
        let wide = pixels.len();
        let weight = weight.at(group * og * depth);
        let bias = |o: usize| bias.map_or(T::ZERO, |b| b[group * og + o]);
        if direct {
            let start = (image * g.c + group * cg) * g.plane_in() + pixels.start;
            let x = Matrix { data: x, start, strides: Strides::rows(g.plane_in()) };
            let first = (image * g.o + group * og) * g.plane_out() + pixels.start;
            for o in 0..og {
                // SAFETY: tiles are disjoint.
                unsafe { y.slice(first + o * g.plane_out(), wide) }.fill(bias(o));
            }
            let sizes = Sizes { m: og, n: wide, k: cg };
            // SAFETY: as above; `slice` has checked the bounds of every row.
            unsafe {
                let out = (y.ptr().add(first), Strides::rows(g.plane_out()));
                product_raw(sizes, out, weight, x, T::ONE, true, Threads::One);
            }
            return;
        }
        let tile = row_spans(g, pixels);
        let columns = &mut uninit(block * g.taps() * wide)[..];
        let result = &mut uninit(og * wide)[..];
        for from in (0..cg).step_by(block) {
            let channels = from..cg.min(from + block);
            let k = channels.len() * g.taps();
            let columns = &mut columns[..k * wide];
            patches(columns, g, x, group * cg + channels.start..group * cg + channels.end, &tile, wide);
            let sizes = Sizes { m: og, n: wide, k };
            let weight = weight.at(from * g.taps());
            let out = (&mut *result, Strides::rows(wide));
            product(sizes, out, weight, Matrix::rows(columns, wide), T::ONE, from > 0, Threads::One);
        }
        for (o, row) in result.chunks_exact(wide).enumerate() {
            let bias = bias(o);
            for s in &tile {
                let plane = (s.image * g.o + group * og + o) * g.plane_out();
                // SAFETY: as above.
                let out = unsafe { y.slice(plane + s.row * g.output[1] + s.column, s.len) };
                for (out, v) in out.iter_mut().zip(&row[s.position..]) {
                    *out = *v + bias;
                }
            }
        }
    });
}

/// The gradient of [`conv2d`]'s operand from the result's gradient.
pub(crate) fn conv2d_input_grad<T: Float>(dx: &mut [T], g: &Convolution, dy: &[T], weight: &[T]) {
    g.check(dx.len(), weight.len(), dy.len());
    if dx.is_empty() {
        return;
    }
    let (cg, og) = g.group();
    if cg == 1 && og == 1 {
        return depthwise::input_grad(dx, g, dy, weight);
    }
    if og * g.taps() * dy.len() == 0 {
        return dx.fill(T::ZERO);
    }
    match transposed(g) {
        Some(back) => conv2d(dx, &back, dy, &flipped(g, weight), None),
        None => strided_input_grad(dx, g, dy, weight),
    }
}

/// For stride 1, the convolution with flipped kernels that maps the result's gradient to the operand's.
fn transposed(g: &Convolution) -> Option<Convolution> {
    let mut padding = [0; 2];
    for d in 0..2 {
        padding[d] = (g.dilation[d] * (g.kernel[d] - 1)).checked_sub(g.padding[d])?;
    }
    (g.stride == [1, 1]).then_some(Convolution { c: g.o, input: g.output, o: g.c, output: g.input, padding, ..*g })
}

/// Kernels rotated by 180 degrees. Input and output channels are exchanged within each group.
fn flipped<T: Float>(g: &Convolution, weight: &[T]) -> Vec<T> {
    let ((cg, og), taps) = (g.group(), g.taps());
    let mut out = uninit(weight.len());
    each(&mut out, og * taps, grain(og * taps), |i, out| {
        let (group, c) = (i / cg, i % cg);
        for (o, out) in out.chunks_exact_mut(taps).enumerate() {
            let kernel = &weight[((group * og + o) * cg + c) * taps..][..taps];
            for (out, v) in out.iter_mut().zip(kernel.iter().rev()) {
                *out = *v;
            }
        }
    });
    out
}

/// The operand's gradient: products with the transposed weight, added patch by patch. Each task has its own images.
fn strided_input_grad<T: Float>(dx: &mut [T], g: &Convolution, dy: &[T], weight: &[T]) {
    let ((cg, og), taps) = (g.group(), g.taps());
    let depth = cg * taps;
    let images = WIDEST.div_ceil(g.plane_out()).clamp(1, g.n.div_ceil(8).max(1));
    let block = (DEPTH / taps).clamp(1, cg);
    each(dx, images * g.c * g.plane_in(), 1, |task, dx| {
        let gradient = &mut uninit(og * WIDEST)[..];
        let columns = &mut uninit(block * taps * WIDEST)[..];
        dx.fill(T::ZERO);
        let image = task * images;
        let last = g.n.min(image + images) * g.plane_out();
        for start in (image * g.plane_out()..last).step_by(WIDEST) {
            let pixels = start..last.min(start + WIDEST);
            let wide = pixels.len();
            let tile = row_spans(g, pixels);
            for group in 0..g.groups {
                let gradient = &mut gradient[..og * wide];
                rows_of(gradient, g, dy, group * og, &tile, wide);
                for from in (0..cg).step_by(block) {
                    let channels = cg.min(from + block) - from;
                    let columns = &mut columns[..channels * taps * wide];
                    let sizes = Sizes { m: channels * taps, n: wide, k: og };
                    let w = Matrix::rows(weight, depth).at(group * og * depth + from * taps).transposed();
                    let out = (&mut *columns, Strides::rows(wide));
                    product(sizes, out, w, Matrix::rows(gradient, wide), T::ONE, false, Threads::One);
                    let first = group * cg + from;
                    add_patches(dx, g, image, first..first + channels, &tile, columns, wide);
                }
            }
        }
    });
}

/// Pixels that one product sums for a weight's gradient.
const SPAN: usize = 384;
/// Most elements of all partial gradients.
const PARTIALS: usize = 1 << 21;

/// The gradient of [`conv2d`]'s weight: partial sums over fixed parts of the pixels, added in order.
pub(crate) fn conv2d_weight_grad<T: Float>(dw: &mut [T], g: &Convolution, dy: &[T], x: &[T]) {
    g.check(x.len(), dw.len(), dy.len());
    if dw.is_empty() {
        return;
    }
    if dy.is_empty() {
        return dw.fill(T::ZERO);
    }
    let ((cg, og), taps) = (g.group(), g.taps());
    if cg == 1 && og == 1 {
        return depthwise::weight_grad(dw, g, dy, x);
    }
    let pixels = g.n * g.plane_out();
    // A task has some of the channels. If there are few channels, it has a part of the pixels, too.
    let block = (DEPTH / 2 / taps).clamp(1, cg);
    let blocks = cg.div_ceil(block);
    let spans = pixels.div_ceil(SPAN);
    let parts = 16usize.div_ceil(blocks * g.groups).min(PARTIALS / dw.len()).clamp(1, spans);
    let spans_each = spans.div_ceil(parts);
    let parts = spans.div_ceil(spans_each);
    let count = parts * g.groups * blocks;
    // Each task's gradient, transposed: `[channels x kernel, o]`, side by side for all groups and blocks of a part.
    let mut partial = uninit(parts * dw.len());
    let shared = Shared::new(&mut partial);
    tasks(count, 1, &|task| {
        let (part, group, b) = (task / blocks / g.groups, task / blocks % g.groups, task % blocks);
        let channels = b * block..cg.min((b + 1) * block);
        let rows = channels.len() * taps;
        let start = (part * g.groups + group) * cg * taps * og + channels.start * taps * og;
        // SAFETY: tasks have rows of their own.
        let out = unsafe { shared.slice(start, rows * og) };
        let columns = &mut uninit(rows * SPAN)[..];
        let gradient = &mut uninit(og * SPAN)[..];
        for span in part * spans_each..spans.min((part + 1) * spans_each) {
            let pixels = span * SPAN..pixels.min((span + 1) * SPAN);
            let wide = pixels.len();
            let tile = row_spans(g, pixels);
            let columns = &mut columns[..rows * wide];
            patches(columns, g, x, group * cg + channels.start..group * cg + channels.end, &tile, wide);
            let gradient = &mut gradient[..og * wide];
            rows_of(gradient, g, dy, group * og, &tile, wide);
            let sizes = Sizes { m: rows, n: og, k: wide };
            let again = span > part * spans_each;
            let dy = Matrix::rows(gradient, wide).transposed();
            let to = (&mut *out, Strides::rows(og));
            product(sizes, to, Matrix::rows(columns, wide), dy, T::ONE, again, Threads::One);
        }
    });
    let size = dw.len();
    each(dw, cg * taps, grain(cg * taps), |o, dw| {
        let first = o / og * cg * taps * og + o % og;
        for (r, d) in dw.iter_mut().enumerate() {
            let mut sum = partial[first + r * og];
            for part in 1..parts {
                sum += partial[part * size + first + r * og];
            }
            *d = sum;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn geometries() -> Vec<Convolution> {
        let make = |n, c, input: [usize; 2], o, kernel: [usize; 2], stride, padding, dilation, groups| {
            let size = |d: usize, s: [usize; 2], p: [usize; 2], dl: [usize; 2]| {
                (input[d] + 2 * p[d] - dl[d] * (kernel[d] - 1) - 1) / s[d] + 1
            };
            let output = [size(0, stride, padding, dilation), size(1, stride, padding, dilation)];
            Convolution { n, c, input, o, kernel, output, stride, padding, dilation, groups }
        };
        vec![
            make(2, 3, [9, 8], 4, [3, 3], [1, 1], [1, 1], [1, 1], 1),
            make(3, 4, [7, 10], 6, [3, 2], [2, 3], [2, 1], [2, 1], 2),
            make(2, 5, [6, 6], 3, [1, 1], [1, 1], [0, 0], [1, 1], 1),
            make(2, 5, [20, 13], 3, [1, 1], [1, 1], [0, 0], [1, 1], 1),
            make(2, 4, [7, 7], 3, [1, 1], [2, 2], [0, 0], [1, 1], 1),
            make(2, 4, [9, 9], 4, [3, 3], [1, 1], [1, 1], [1, 1], 4),
            make(2, 4, [9, 11], 4, [3, 5], [2, 1], [0, 2], [1, 2], 4),
            make(1, 3, [5, 5], 6, [3, 3], [1, 1], [1, 1], [1, 1], 3),
            make(2, 2, [2, 2], 2, [1, 1], [1, 1], [3, 3], [1, 1], 1),
            make(20, 3, [16, 16], 5, [7, 7], [2, 2], [3, 3], [1, 1], 1),
            make(1, 130, [5, 6], 9, [3, 3], [1, 1], [1, 1], [1, 1], 1),
        ]
    }

    fn sample(n: usize, phase: f64) -> Vec<f64> {
        (0..n).map(|i| (i as f64 * 1.618 + phase).sin()).collect()
    }

    /// Calls `f(x index, weight index, y index)` for every product that the definition sums.
    fn terms(g: &Convolution, mut f: impl FnMut(usize, usize, usize)) {
        let (cg, og) = g.group();
        for (n, o) in (0..g.n * g.o).map(|i| (i / g.o, i % g.o)) {
            for (oy, ox) in (0..g.plane_out()).map(|i| (i / g.output[1], i % g.output[1])) {
                for (c, ky, kx) in
                    (0..cg * g.taps()).map(|i| (i / g.taps(), i / g.kernel[1] % g.kernel[0], i % g.kernel[1]))
                {
                    let y = (oy * g.stride[0] + ky * g.dilation[0]).checked_sub(g.padding[0]);
                    let x = (ox * g.stride[1] + kx * g.dilation[1]).checked_sub(g.padding[1]);
                    let (Some(y), Some(x)) = (y, x) else { continue };
                    if y < g.input[0] && x < g.input[1] {
                        f(
                            ((n * g.c + o / og * cg + c) * g.input[0] + y) * g.input[1] + x,
                            ((o * cg + c) * g.kernel[0] + ky) * g.kernel[1] + kx,
                            ((n * g.o + o) * g.output[0] + oy) * g.output[1] + ox,
                        );
                    }
                }
            }
        }
    }

    fn close(what: &str, g: &Convolution, a: &[f64], b: &[f64]) {
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() < 1e-10, "{what} of {g:?} at {i}: {a} {b}");
        }
    }

    /// y = Σ x w; dx = Σ dy w; dw = Σ dy x, over the terms of the definition.
    #[test]
    fn all_three_match_the_definition() {
        for g in geometries() {
            let (cg, _) = g.group();
            let x = sample(g.n * g.c * g.plane_in(), 0.1);
            let w = sample(g.o * cg * g.taps(), 0.2);
            let dy = sample(g.n * g.o * g.plane_out(), 0.3);
            let bias = sample(g.o, 0.4);
            let mut want = (vec![0.0; dy.len()], vec![0.0; x.len()], vec![0.0; w.len()]);
            for (i, v) in want.0.iter_mut().enumerate() {
                *v = bias[i / g.plane_out() % g.o];
            }
            terms(&g, |ix, iw, iy| {
                want.0[iy] += x[ix] * w[iw];
                want.1[ix] += dy[iy] * w[iw];
                want.2[iw] += dy[iy] * x[ix];
            });
            let (mut y, mut dx, mut dw) = (vec![7.0; dy.len()], vec![7.0; x.len()], vec![7.0; w.len()]);
            conv2d(&mut y, &g, &x, &w, Some(&bias));
            conv2d_input_grad(&mut dx, &g, &dy, &w);
            conv2d_weight_grad(&mut dw, &g, &dy, &x);
            close("result", &g, &y, &want.0);
            close("input gradient", &g, &dx, &want.1);
            close("weight gradient", &g, &dw, &want.2);
        }
    }

    #[test]
    fn same_bits_for_any_number_of_threads() {
        for g in geometries() {
            let cast = |v: Vec<f64>| v.into_iter().map(|v| v as f32).collect::<Vec<f32>>();
            let x = cast(sample(g.n * g.c * g.plane_in(), 0.1));
            let w = cast(sample(g.o * g.group().0 * g.taps(), 0.2));
            let run = |threads| {
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                    let mut y = vec![0.0; g.n * g.o * g.plane_out()];
                    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
                    conv2d(&mut y, &g, &x, &w, None);
                    conv2d_input_grad(&mut dx, &g, &y, &w);
                    conv2d_weight_grad(&mut dw, &g, &y, &x);
                    (y, dx, dw)
                })
            };
            assert!(run(1) == run(3), "{g:?}");
        }
    }
}
