//! Patches of a convolution's operand as a matrix `[channels x kernel, pixels]` ("im2col", Chellapilla et al., 2006).
//!
//! One cache-sized tile of the matrix exists at a time. A tile's pixels may come from several images, so that small
//! images still make large products.

use std::ops::Range;

use super::Float;
use super::convolution::Convolution;

/// Most rows of patches in one product: the length of its sums.
pub(super) const DEPTH: usize = 576;
/// Most pixels of a tile.
pub(super) const WIDEST: usize = 240;
/// Pixels that the widest vector kernels take at once.
pub(super) const STEP: usize = 48;

/// Pixels of a tile: a multiple of [`STEP`], so that threads share about eight tiles.
pub(super) fn tile_width(pixels: usize) -> usize {
    (pixels.div_ceil(8).div_ceil(STEP) * STEP).clamp(STEP, WIDEST)
}

/// Consecutive pixels of a result's row within a tile.
pub(super) struct RowSpan {
    /// Where they start in the tile.
    pub(super) position: usize,
    pub(super) image: usize,
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) len: usize,
}

/// Cuts pixels, counted over all images, into parts of rows.
pub(super) fn row_spans(g: &Convolution, pixels: Range<usize>) -> Vec<RowSpan> {
    let mut out = Vec::new();
    let mut p = pixels.start;
    while p < pixels.end {
        let (image, at) = (p / g.plane_out(), p % g.plane_out());
        let (row, column) = (at / g.output[1], at % g.output[1]);
        let len = (g.output[1] - column).min(pixels.end - p);
        out.push(RowSpan { position: p - pixels.start, image, row, column, len });
        p += len;
    }
    out
}

/// Writes the patches of some channels as `[channels x kernel, tile]`.
pub(super) fn patches<T: Float>(
    out: &mut [T],
    g: &Convolution,
    x: &[T],
    channels: Range<usize>,
    tile: &[RowSpan],
    width: usize,
) {
    let [_, w] = g.input;
    let rows = out.chunks_exact_mut(width);
    let taps = channels.flat_map(|c| (0..g.taps()).map(move |t| (c, t / g.kernel[1], t % g.kernel[1])));
    for (out, (c, ky, kx)) in rows.zip(taps) {
        let (tall, wide) = (g.inside(0, ky), g.inside(1, kx));
        for s in tile {
            let out = &mut out[s.position..s.position + s.len];
            let (first, end) = (wide.start.max(s.column), wide.end.min(s.column + s.len));
            if !tall.contains(&s.row) || first >= end {
                out.fill(T::ZERO);
                continue;
            }
            let y = s.row * g.stride[0] + ky * g.dilation[0] - g.padding[0];
            let start = ((s.image * g.c + c) * g.input[0] + y) * w;
            let from = start + first * g.stride[1] + kx * g.dilation[1] - g.padding[1];
            out[..first - s.column].fill(T::ZERO);
            out[end - s.column..].fill(T::ZERO);
            let out = &mut out[first - s.column..end - s.column];
            if g.stride[1] == 1 {
                copy(out, &x[from..from + end - first]);
            } else {
                for (o, v) in out.iter_mut().zip(x[from..].iter().step_by(g.stride[1])) {
                    *o = *v;
                }
            }
        }
    }
}

/// The reverse of [`patches`]: adds a tile's elements to the places they came from.
pub(super) fn add_patches<T: Float>(
    dx: &mut [T],
    g: &Convolution,
    image: usize,
    channels: Range<usize>,
    tile: &[RowSpan],
    columns: &[T],
    width: usize,
) {
    let [_, w] = g.input;
    let taps = channels.flat_map(|c| (0..g.taps()).map(move |t| (c, t / g.kernel[1], t % g.kernel[1])));
    for (column, (c, ky, kx)) in columns.chunks_exact(width).zip(taps) {
        let (tall, wide) = (g.inside(0, ky), g.inside(1, kx));
        for s in tile {
            let (first, end) = (wide.start.max(s.column), wide.end.min(s.column + s.len));
            if !tall.contains(&s.row) || first >= end {
                continue;
            }
            let y = s.row * g.stride[0] + ky * g.dilation[0] - g.padding[0];
            let start = (((s.image - image) * g.c + c) * g.input[0] + y) * w;
            let to = start + first * g.stride[1] + kx * g.dilation[1] - g.padding[1];
            let from = &column[s.position + first - s.column..s.position + end - s.column];
            for (d, v) in dx[to..].iter_mut().step_by(g.stride[1]).zip(from) {
                *d += *v;
            }
        }
    }
}

/// Copies; for short runs a loop is faster than a call.
#[inline(always)]
fn copy<T: Copy>(out: &mut [T], x: &[T]) {
    if x.len() < 32 {
        for (o, v) in out.iter_mut().zip(x) {
            *o = *v;
        }
    } else {
        out.copy_from_slice(x);
    }
}

/// Copies a tile of the result's gradient to `out [channels, tile]`, for channels from `first` on.
pub(super) fn rows_of<T: Float>(
    out: &mut [T],
    g: &Convolution,
    dy: &[T],
    first: usize,
    tile: &[RowSpan],
    width: usize,
) {
    for (o, out) in out.chunks_exact_mut(width).enumerate() {
        for s in tile {
            let start = (s.image * g.o + first + o) * g.plane_out() + s.row * g.output[1] + s.column;
            copy(&mut out[s.position..s.position + s.len], &dy[start..start + s.len]);
        }
    }
}
