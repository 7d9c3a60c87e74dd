//! Matrix products over strided operands.

use rayon::prelude::*;

use super::Float;

/// Strides of a matrix, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// From one row to the next.
    pub row: isize,
    /// From one column to the next.
    pub column: isize,
}

impl Strides {
    /// Rows of `columns` elements, one after the other.
    pub fn rows(columns: usize) -> Self {
        Self { row: columns as isize, column: 1 }
    }

    /// The transpose of rows of `columns` elements.
    pub fn columns(rows: usize) -> Self {
        Self { row: 1, column: rows as isize }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { row: self.column, column: self.row }
    }
}

/// Sizes of a product: `[m, k] x [k, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
}

/// A strided operand: its memory, where it starts, and its strides.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    /// The memory the matrix lies in.
    pub data: &'a [T],
    /// Index of the first element.
    pub start: usize,
    /// Its strides.
    pub strides: Strides,
}

impl<'a, T> Matrix<'a, T> {
    /// A row-major matrix that starts where `data` does.
    pub fn rows(data: &'a [T], columns: usize) -> Self {
        Self { data, start: 0, strides: Strides::rows(columns) }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { strides: self.strides.transposed(), ..self }
    }

    /// The same matrix, `elements` further on.
    pub fn at(self, elements: usize) -> Self {
        Self { start: self.start + elements, ..self }
    }

    fn pointer(&self, rows: usize, columns: usize) -> *const T {
        in_bounds(self.data.len(), self.start, self.strides, rows, columns);
        // SAFETY: `in_bounds` has shown the first element to lie within the slice (or the matrix to be empty).
        unsafe { self.data.as_ptr().add(self.start.min(self.data.len())) }
    }
}

/// Panics unless every element of a matrix lies within `len`.
fn in_bounds(len: usize, start: usize, strides: Strides, rows: usize, columns: usize) {
    if rows == 0 || columns == 0 {
        return;
    }
    let (r, c) = ((rows - 1) as isize * strides.row, (columns - 1) as isize * strides.column);
    let (low, high) = (r.min(0) + c.min(0), r.max(0) + c.max(0));
    let inside = start as isize + low >= 0 && start as isize + high < len as isize;
    assert!(inside, "a {rows} x {columns} matrix at {start} with {strides:?} exceeds {len} elements");
}

/// Whether a product uses all threads or the caller's alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    All,
    One,
}

/// `out = scale · a b`, added to what is there if `accumulate`. `out` has strides of its own.
pub(crate) fn product<T: Float>(
    sizes: Sizes,
    out: (&mut [T], Strides),
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    scale: T,
    accumulate: bool,
    threads: Threads,
) {
    in_bounds(out.0.len(), 0, out.1, sizes.m, sizes.n);
    // SAFETY: the result is in bounds and exclusively borrowed.
    unsafe { product_raw(sizes, (out.0.as_mut_ptr(), out.1), a, b, scale, accumulate, threads) }
}

/// As [`product`], for a result that other threads write elsewhere.
///
/// # Safety
/// Every element of the result lies in memory that may be written, and nothing else accesses it meanwhile.
pub(crate) unsafe fn product_raw<T: Float>(
    Sizes { m, n, k }: Sizes,
    (out, strides): (*mut T, Strides),
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    scale: T,
    accumulate: bool,
    threads: Threads,
) {
    let (pa, pb) = (a.pointer(m, k), b.pointer(k, n));
    let parallelism = match threads {
        Threads::All => gemm::Parallelism::Rayon(0),
        Threads::One => gemm::Parallelism::None,
    };
    // SAFETY: `pointer` has checked both operands, the caller answers for the result.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
            strides.column,
            strides.row,
            accumulate,
            pa,
            a.strides.column,
            a.strides.row,
            pb,
            b.strides.column,
            b.strides.row,
            T::ONE,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Batches of at least this many products, each below the size given next, run side by side, one thread each.
const SIDE_BY_SIDE: usize = 2;
/// Multiply-adds from which a single product feeds all threads better than several at once.
const LARGE: usize = 1 << 26;

/// `out[i] = a[i] b[i]` for every `i`: `out` is `[batch, m, n]`, row-major; `a_starts` and `b_starts` say where the operands of
/// each product begin, relative to `a.start` and `b.start`.
///
/// The bits of the result depend on the sizes and the strides, not on the number of threads.
pub fn matmul<T: Float>(
    out: &mut [T],
    sizes: Sizes,
    a: Matrix<'_, T>,
    a_starts: &[usize],
    b: Matrix<'_, T>,
    b_starts: &[usize],
) {
    let Sizes { m, n, k } = sizes;
    let batch = a_starts.len();
    assert!(b_starts.len() == batch && out.len() == batch * m * n, "matmul: {batch} products of {sizes:?}");
    if m * n == 0 {
        return;
    }
    let one = |i: usize, out: &mut [T], threads| {
        let (a, b) = (a.at(a_starts[i]), b.at(b_starts[i]));
        product(sizes, (out, Strides::rows(n)), a, b, T::ONE, false, threads);
    };
    let work = m * n * k.max(1);
    if batch >= SIDE_BY_SIDE && work < LARGE {
        let least = ((1 << 16) / work).max(1);
        out.par_chunks_mut(m * n).with_min_len(least).enumerate().for_each(|(i, out)| one(i, out, Threads::One));
    } else {
        for (i, out) in out.chunks_exact_mut(m * n).enumerate() {
            one(i, out, Threads::All);
        }
    }
}

/// `x weightᵀ + bias`: `x [m, k]` and `weight [n, k]` with any strides, `bias [n]`, `out [m, n]` row-major.
pub fn linear<T: Float>(out: &mut [T], sizes: Sizes, x: Matrix<'_, T>, weight: Matrix<'_, T>, bias: Option<&[T]>) {
    assert_eq!(out.len(), sizes.m * sizes.n, "linear: result of {sizes:?}");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), sizes.n, "linear: bias of {sizes:?}");
        repeat_row(out, bias);
    }
    product(sizes, (out, Strides::rows(sizes.n)), x, weight.transposed(), T::ONE, bias.is_some(), Threads::All);
}

/// Fills `out` with copies of `row`.
fn repeat_row<T: Float>(out: &mut [T], row: &[T]) {
    if row.is_empty() {
        return;
    }
    let chunk = super::parallel::rows_per_chunk(row.len()) * row.len();
    out.par_chunks_mut(chunk).with_min_len(super::parallel::grain(chunk)).for_each(|rows| {
        for r in rows.chunks_exact_mut(row.len()) {
            r.copy_from_slice(row);
        }
    });
}
