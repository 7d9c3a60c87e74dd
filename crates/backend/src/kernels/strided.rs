//! Operands that are addressed through strides.

use super::Element;
use super::parallel::{Shared, each, grain, tasks};

/// An operand with a stride for each dimension of the result. Stride 0 repeats an element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<'a, T> {
    /// The memory that contains it.
    pub(crate) data: &'a [T],
    /// Index of the first element.
    pub(crate) start: usize,
    /// Strides along the result's dimensions, in elements.
    pub(crate) strides: &'a [isize],
}

/// Elements of a chunk.
const CHUNK: usize = 4096;

/// Nested loops over a shape with `N` strided operands. Neighbouring dimensions are merged if all operands permit it.
pub(super) struct Nest<const N: usize> {
    /// Sizes, outermost first; never empty.
    sizes: Vec<usize>,
    strides: Vec<[isize; N]>,
    starts: [isize; N],
}

impl<const N: usize> Nest<N> {
    pub(super) fn new(shape: &[usize], operands: [(usize, &[isize]); N]) -> Self {
        let mut sizes: Vec<usize> = Vec::with_capacity(shape.len());
        let mut strides: Vec<[isize; N]> = Vec::with_capacity(shape.len());
        for (d, &size) in shape.iter().enumerate().filter(|(_, n)| **n != 1) {
            let each = operands.map(|(_, s)| s[d]);
            match (sizes.last_mut(), strides.last_mut()) {
                (Some(outer), Some(last)) if (0..N).all(|i| last[i] == each[i] * size as isize) => {
                    *outer *= size;
                    *last = each;
                }
                _ => {
                    sizes.push(size);
                    strides.push(each);
                }
            }
        }
        if sizes.is_empty() {
            sizes.push(shape.iter().product());
            strides.push([0; N]);
        }
        Self { sizes, strides, starts: operands.map(|(s, _)| s as isize) }
    }

    pub(super) fn inner(&self) -> [isize; N] {
        self.strides[self.strides.len() - 1]
    }

    /// Calls `f(position, length, offsets)` for each run of the innermost loop within elements `start..start + len`
    /// of the shape. Positions count from `start`.
    pub(super) fn runs(&self, start: usize, len: usize, mut f: impl FnMut(usize, usize, [usize; N])) {
        let last = self.sizes.len() - 1;
        let mut index = vec![0usize; self.sizes.len()];
        let mut rest = start;
        let mut at = self.starts;
        for d in (0..=last).rev() {
            index[d] = rest % self.sizes[d];
            rest /= self.sizes[d];
            for i in 0..N {
                at[i] += index[d] as isize * self.strides[d][i];
            }
        }
        let mut position = 0;
        while position < len {
            let run = (self.sizes[last] - index[last]).min(len - position);
            f(position, run, at.map(|a| a as usize));
            position += run;
            let mut steps = run;
            for d in (0..=last).rev() {
                for i in 0..N {
                    at[i] += steps as isize * self.strides[d][i];
                }
                index[d] += steps;
                if index[d] < self.sizes[d] {
                    break;
                }
                for i in 0..N {
                    at[i] -= self.sizes[d] as isize * self.strides[d][i];
                }
                index[d] = 0;
                steps = 1;
            }
        }
    }
}

/// Calls `f(chunk, start)` for all chunks of `out`.
pub(super) fn chunks<T: Element>(out: &mut [T], f: impl Fn(&mut [T], usize) + Sync) {
    each(out, CHUNK, grain(CHUNK), |i, chunk| f(chunk, i * CHUNK));
}

/// Fills `out` with a strided operand's elements in row-major order.
pub(crate) fn gather<T: Element>(out: &mut [T], shape: &[usize], x: Strided<'_, T>) {
    let nest = Nest::new(shape, [(x.start, x.strides)]);
    chunks(out, |chunk, start| fill(chunk, &nest, start, x.data));
}

pub(super) fn fill<T: Element>(chunk: &mut [T], nest: &Nest<1>, start: usize, data: &[T]) {
    let [inner] = nest.inner();
    nest.runs(start, chunk.len(), |position, len, [at]| {
        let out = &mut chunk[position..position + len];
        match inner {
            1 => out.copy_from_slice(&data[at..at + len]),
            0 => out.fill(data[at]),
            _ => {
                for (i, o) in out.iter_mut().enumerate() {
                    *o = data[(at as isize + i as isize * inner) as usize];
                }
            }
        }
    });
}

/// The region of a row-major result into which [`put`] writes an operand's elements.
pub(crate) struct Region<'a> {
    /// Shape of the result.
    pub(crate) shape: Vec<usize>,
    /// Index of the first element in each dimension.
    pub(crate) starts: &'a [usize],
    /// Distance of neighbours in each dimension, in elements of that dimension; at least 1.
    pub(crate) steps: &'a [usize],
}

/// Writes the elements of `x`, of shape `shape`, to a region of `out`.
pub(crate) fn put<T: Element>(out: &mut [T], region: &Region<'_>, shape: &[usize], x: Strided<'_, T>) {
    let count: usize = shape.iter().product();
    if count == 0 {
        return;
    }
    let (mut start, mut strides, mut distance) = (0, vec![0; shape.len()], 1);
    for d in (0..shape.len()).rev() {
        // A step behind the end is any step, but its products may not fit.
        let (first, step) = (region.starts[d], region.steps[d].min(region.shape[d]));
        let inside = step > 0 && first + (shape[d] - 1) * step < region.shape[d];
        assert!(inside, "{} elements from {first} by {step} exceed {}", shape[d], region.shape[d]);
        start += first * distance;
        strides[d] = (step * distance) as isize;
        distance *= region.shape[d];
    }
    assert_eq!(out.len(), distance, "result and its shape differ in size");
    let nest = Nest::new(shape, [(start, &strides), (x.start, x.strides)]);
    let [to, from] = nest.inner();
    let out = Shared::new(out);
    tasks(count.div_ceil(CHUNK), grain(CHUNK), &|i| {
        let first = i * CHUNK;
        nest.runs(first, CHUNK.min(count - first), |_, len, [at, source]| {
            if (to, from) == (1, 1) {
                // SAFETY: distinct indices have distinct positions, as the assertion above shows.
                unsafe { out.slice(at, len) }.copy_from_slice(&x.data[source..source + len]);
                return;
            }
            for n in 0..len as isize {
                // SAFETY: as above.
                let place = unsafe { out.slice((at as isize + n * to) as usize, 1) };
                place[0] = x.data[(source as isize + n * from) as usize];
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every third column from column 1, in rows from 2 on, of a larger matrix; the source is transposed.
    #[test]
    fn put_writes_its_region_alone() {
        let (rows, columns) = (100, 70);
        let x: Vec<u32> = (0..rows * columns).collect();
        let mut out = vec![u32::MAX; 110 * 220];
        let region = Region { shape: vec![110, 220], starts: &[2, 1], steps: &[1, 3] };
        let source = Strided { data: &x, start: 0, strides: &[1, 100] };
        put(&mut out, &region, &[rows as usize, columns as usize], source);
        for (n, v) in out.into_iter().enumerate() {
            let (i, j) = (n / 220, n % 220);
            let inside = (2..102).contains(&i) && j % 3 == 1 && j < 211;
            assert_eq!(v, if inside { (i - 2 + (j - 1) / 3 * 100) as u32 } else { u32::MAX }, "{i} {j}");
        }
    }
}
