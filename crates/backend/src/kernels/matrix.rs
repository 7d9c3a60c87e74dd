//! Matrix products over strided operands.

use std::borrow::Cow;

use super::Float;
use super::parallel::{each, grain};
use super::simd::simd;

/// Strides of a matrix, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strides {
    /// The distance from one row to the next.
    pub(crate) row: isize,
    /// The distance from one column to the next.
    pub(crate) column: isize,
}

impl Strides {
    /// Rows of `columns` elements, one after the other.
    pub(crate) fn rows(columns: usize) -> Self {
        Self { row: columns as isize, column: 1 }
    }

    /// Columns of `rows` elements, one after the other.
    #[cfg(test)]
    fn columns(rows: usize) -> Self {
        Self { row: 1, column: rows as isize }
    }

    /// Rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self { row: self.column, column: self.row }
    }
}

/// Sizes of a product: `[m, k] x [k, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Rows of the result.
    pub(crate) m: usize,
    /// Columns of the result.
    pub(crate) n: usize,
    /// Length of the sums.
    pub(crate) k: usize,
}

/// A strided matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    /// The memory the matrix lies in.
    pub(crate) data: &'a [T],
    /// Index of the first element.
    pub(crate) start: usize,
    /// The matrix's strides.
    pub(crate) strides: Strides,
}

impl<'a, T> Matrix<'a, T> {
    /// A row-major matrix at the start of `data`.
    pub(crate) fn rows(data: &'a [T], columns: usize) -> Self {
        Self { data, start: 0, strides: Strides::rows(columns) }
    }

    /// Rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self { strides: self.strides.transposed(), ..self }
    }

    /// The matrix that starts `elements` later.
    pub(crate) fn at(self, elements: usize) -> Self {
        Self { start: self.start + elements, ..self }
    }

    /// The matrix from a row on.
    fn at_row(self, row: usize) -> Self {
        Self { start: (self.start as isize + row as isize * self.strides.row) as usize, ..self }
    }

    /// The matrix from a column on.
    fn at_column(self, column: usize) -> Self {
        self.transposed().at_row(column).transposed()
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

/// The threads of a product: all, or only the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    All,
    One,
}

/// The longest sum that `gemm` adds up at once on any processor. Longer ones are cut into pieces of equal length.
const LONGEST_SUM: usize = 512;

/// `out = scale · a b`, or `out += scale · a b` if `accumulate`.
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

/// Computes [`product`] for a result in memory that several threads write.
///
/// # Safety
/// Every element of the result lies in memory that may be written. Nothing else accesses it during the call.
pub(crate) unsafe fn product_raw<T: Float>(
    Sizes { m, n, k }: Sizes,
    (out, strides): (*mut T, Strides),
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    scale: T,
    accumulate: bool,
    threads: Threads,
) {
    if m * n == 0 {
        return;
    }
    let block = |a: Matrix<'_, T>, b: Matrix<'_, T>, k: usize, accumulate: bool| {
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
    };
    // `gemm` would cut longer sums by the size of the processor's caches, so that their bits depend on it.
    let run = |a: Matrix<'_, T>, b: Matrix<'_, T>| {
        let length = k.div_ceil(k.div_ceil(LONGEST_SUM).max(1)).max(1);
        block(a, b, k.min(length), accumulate);
        for start in (length..k).step_by(length) {
            let (a, b) = (a.at_column(start), b.at_row(start));
            block(a, b, length.min(k - start), true);
        }
    };
    // For these sizes, `gemm` chooses its kernel by strides, too, and each kernel sums in another order.
    if n == 1 || m == 1 {
        let (matrix, rows, vector, step) = match n {
            1 => (a, m, b.transposed(), strides.row),
            _ => (b.transposed(), n, a, strides.column),
        };
        let vector = packed(vector, 1, k);
        // SAFETY: as above.
        unsafe { matrix_vector(Target { out, step, scale, accumulate }, rows, matrix, &vector, threads) };
    } else if m * n <= 256 || k <= 2 {
        let (a, bt) = (packed(a, m, k), packed(b.transposed(), n, k));
        run(Matrix::rows(&a, k), Matrix::rows(&bt, k).transposed());
    } else {
        run(a, b);
    }
}

/// The elements of a matrix in row-major order, copied only if needed.
fn packed<'a, T: Float>(x: Matrix<'a, T>, rows: usize, columns: usize) -> Cow<'a, [T]> {
    in_bounds(x.data.len(), x.start, x.strides, rows, columns);
    let row_major = x.strides.column == 1 && (rows == 1 || x.strides.row == columns as isize);
    if rows * columns == 0 {
        return Cow::Borrowed(&[]);
    }
    if row_major {
        return Cow::Borrowed(&x.data[x.start..x.start + rows * columns]);
    }
    let at =
        |i: usize, j: usize| (x.start as isize + i as isize * x.strides.row + j as isize * x.strides.column) as usize;
    Cow::Owned((0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))).map(|(i, j)| x.data[at(i, j)]).collect())
}

/// The place of a product with a vector in memory, and the way in which it is written.
#[derive(Clone, Copy)]
struct Target<T> {
    out: *mut T,
    step: isize,
    scale: T,
    accumulate: bool,
}

// SAFETY: tasks write elements of their own.
unsafe impl<T: Send> Send for Target<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Target<T> {}

impl<T: Float> Target<T> {
    /// # Safety
    /// The same as for [`product_raw`]. `i` is a row of the result.
    unsafe fn put(&self, i: usize, sum: T) {
        // SAFETY: the caller's promise.
        unsafe {
            let out = self.out.offset(i as isize * self.step);
            let v = self.scale * sum;
            *out = if self.accumulate { *out + v } else { v };
        }
    }
}

/// Rows of one task.
const ROWS: usize = 64;
/// Partial sums of an element of a matrix-vector product. Summand `i` goes to sum `i % SUMS` for any layout of the
/// matrix.
const SUMS: usize = 16;

/// `matrix [rows, k] vector [k]`.
///
/// # Safety
/// The same as for [`product_raw`].
unsafe fn matrix_vector<T: Float>(to: Target<T>, rows: usize, matrix: Matrix<'_, T>, vector: &[T], threads: Threads) {
    let k = vector.len();
    in_bounds(matrix.data.len(), matrix.start, matrix.strides, rows, k);
    let task = |task: usize| {
        let rows = task * ROWS..rows.min((task + 1) * ROWS);
        let mut sums = [[T::ZERO; SUMS]; ROWS];
        let sums = &mut sums[..rows.len()];
        let start = matrix.start as isize + rows.start as isize * matrix.strides.row;
        match matrix.strides {
            Strides { column: 1, row } => by_rows(sums, matrix.data, start, row, vector),
            Strides { row: 1, column } => by_columns(sums, matrix.data, start, column, vector),
            Strides { row, column } => {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, &v) in vector.iter().enumerate() {
                        let at = start + i as isize * row + j as isize * column;
                        sums[j % SUMS] += matrix.data[at as usize] * v;
                    }
                }
            }
        }
        for (i, sums) in rows.zip(sums) {
            // SAFETY: the caller's promise; each row is one task's.
            unsafe { to.put(i, fold(*sums)) };
        }
    };
    let tasks = rows.div_ceil(ROWS);
    if threads == Threads::All {
        super::parallel::tasks(tasks, grain(ROWS * k), &task);
    } else {
        (0..tasks).for_each(task);
    }
}

fn fold<T: Float>(mut sums: [T; SUMS]) -> T {
    let mut n = SUMS / 2;
    while n > 0 {
        for i in 0..n {
            sums[i] += sums[i + n];
        }
        n /= 2;
    }
    sums[0]
}

simd! {
    fn by_rows<T: Float>(sums: &mut [[T; SUMS]], data: &[T], start: isize, row: isize, vector: &[T]) {
        for (i, sums) in sums.iter_mut().enumerate() {
            let x = &data[(start + i as isize * row) as usize..][..vector.len()];
            let ((xs, x_rest), (vs, v_rest)) = (x.as_chunks::<SUMS>(), vector.as_chunks::<SUMS>());
            let mut acc = *sums;
            for (x, v) in xs.iter().zip(vs) {
                for l in 0..SUMS {
                    acc[l] += x[l] * v[l];
                }
            }
            for ((s, &x), &v) in acc.iter_mut().zip(x_rest).zip(v_rest) {
                *s += x * v;
            }
            *sums = acc;
        }
    }

    fn by_columns<T: Float>(sums: &mut [[T; SUMS]], data: &[T], start: isize, column: isize, vector: &[T]) {
        // Sixteen rows at once, with transposed sums.
        for (block, sums) in sums.chunks_mut(16).enumerate() {
            let mut acc = [[T::ZERO; 16]; SUMS];
            for (l, acc) in acc.iter_mut().enumerate() {
                for (j, &v) in vector.iter().enumerate().skip(l).step_by(SUMS) {
                    let at = (start + (block * 16) as isize + j as isize * column) as usize;
                    for (a, &x) in acc.iter_mut().zip(&data[at..at + sums.len()]) {
                        *a += x * v;
                    }
                }
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                for l in 0..SUMS {
                    sums[l] = acc[l][i];
                }
            }
        }
    }
}

/// Least number of products that run side by side, with one thread each, if each is below [`LARGE`].
const SIDE_BY_SIDE: usize = 2;
/// Multiply-adds from which one product uses all threads better than several side by side.
const LARGE: usize = 1 << 26;

/// `out[i] = a[i] b[i]` for every `i`. `out` is a row-major `[batch, m, n]`; `a_starts` and `b_starts` are the first
/// elements of the operands of each product.
///
/// The bits of the result depend on operands and sizes alone, not on strides or the number of threads.
pub(crate) fn matmul<T: Float>(
    out: &mut [T],
    sizes: Sizes,
    (a, a_strides, a_starts): (&[T], Strides, &[usize]),
    (b, b_strides, b_starts): (&[T], Strides, &[usize]),
) {
    let Sizes { m, n, k } = sizes;
    let batch = a_starts.len();
    assert!(b_starts.len() == batch && out.len() == batch * m * n, "matmul: {batch} products of {sizes:?}");
    if m * n == 0 {
        return;
    }
    let one = |i: usize, out: &mut [T], threads| {
        let a = Matrix { data: a, start: a_starts[i], strides: a_strides };
        let b = Matrix { data: b, start: b_starts[i], strides: b_strides };
        product(sizes, (out, Strides::rows(n)), a, b, T::ONE, false, threads);
    };
    let work = m * n * k.max(1);
    if batch >= SIDE_BY_SIDE && work < LARGE {
        let least = ((1 << 16) / work).max(1);
        each(out, m * n, least, |i, out| one(i, out, Threads::One));
    } else {
        for (i, out) in out.chunks_exact_mut(m * n).enumerate() {
            one(i, out, Threads::All);
        }
    }
}

/// `x weightᵀ + bias`: `x [m, k]` and `weight [n, k]` with any strides, `bias [n]`, `out [m, n]` row-major.
pub(crate) fn linear<T: Float>(
    out: &mut [T],
    sizes: Sizes,
    x: Matrix<'_, T>,
    weight: Matrix<'_, T>,
    bias: Option<&[T]>,
) {
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
    each(out, chunk, grain(chunk), |_, rows| {
        for r in rows.chunks_exact_mut(row.len()) {
            r.copy_from_slice(row);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: usize, phase: f64) -> Vec<f32> {
        (0..n).map(|i| (i as f64 * 1.618 + phase).sin() as f32).collect()
    }

    /// `[rows, columns]` row-major elements laid out column by column.
    fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
    }

    /// Every second element of a longer row.
    fn spread(x: &[f32]) -> Vec<f32> {
        x.iter().flat_map(|&v| [v, 9.0]).collect()
    }

    /// Large, small and thin products match the definition, with the same bits for every layout and number of threads.
    #[test]
    fn products_depend_on_elements_alone() {
        let sizes =
            [(1, 1, 1), (1, 300, 77), (300, 1, 77), (1, 5, 3), (16, 16, 40), (2, 100, 65), (17, 19, 33), (100, 50, 2)];
        let large = [(65, 64, 100), (193, 257, 300), (70, 130, 700), (48, 8, 513), (33, 9, 20), (600, 20, 30)];
        for (m, n, k) in sizes.into_iter().chain(large) {
            let (a, b) = (sample(m * k, 0.1), sample(k * n, 0.2));
            let (at, bt) = (transposed(&a, m, k), transposed(&b, k, n));
            let (a2, b2) = (spread(&a), spread(&b));
            let wide = |columns: usize| Strides { row: 2 * columns as isize, column: 2 };
            let a = [(&a, Strides::rows(k)), (&at, Strides::columns(m)), (&a2, wide(k))];
            let b = [(&b, Strides::rows(n)), (&bt, Strides::columns(k)), (&b2, wide(n))];
            let sizes = Sizes { m, n, k };
            let run = |(a, sa): (&Vec<f32>, Strides), (b, sb): (&Vec<f32>, Strides), threads| {
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                    let mut out = vec![7.0; m * n];
                    matmul(&mut out, sizes, (a, sa, &[0]), (b, sb, &[0]));
                    out
                })
            };
            let first = run(a[0], b[0], 1);
            for (i, v) in first.iter().enumerate() {
                let want: f64 =
                    (0..k).map(|j| f64::from(a[0].0[i / n * k + j]) * f64::from(b[0].0[j * n + i % n])).sum();
                assert!((f64::from(*v) - want).abs() < 1e-5 * (k as f64).sqrt() + 1e-6, "{sizes:?} at {i}: {v} {want}");
            }
            for a in a {
                for b in b {
                    assert!(run(a, b, 2) == first, "{sizes:?} with {:?} and {:?}", a.1, b.1);
                }
            }
        }
    }

    /// The sum of a long product is cut into two pieces here, whatever caches this machine has.
    #[test]
    fn long_sums_are_those_of_their_pieces() {
        let (m, n, k) = (70, 90, 1000);
        let (a, b) = (sample(m * k, 0.1), sample(k * n, 0.2));
        let (a, b) = (Matrix::rows(&a, k), Matrix::rows(&b, n));
        for accumulate in [false, true] {
            let [mut whole, mut pieces] = [vec![0.5_f32; m * n], vec![0.5_f32; m * n]];
            product(Sizes { m, n, k }, (&mut whole, Strides::rows(n)), a, b, 0.7, accumulate, Threads::All);
            for (i, start) in [0, 500].into_iter().enumerate() {
                let (a, b) = (a.at_column(start), b.at_row(start));
                let sizes = Sizes { m, n, k: 500 };
                product(sizes, (&mut pieces, Strides::rows(n)), a, b, 0.7, accumulate || i > 0, Threads::One);
            }
            assert!(whole == pieces);
        }
    }

    /// A batch of products, and a scaled product that is added to every second column of a result.
    #[test]
    fn batches_and_strided_results() {
        let (a, b) = (sample(3 * 4 * 5, 0.1), sample(3 * 5 * 6, 0.2));
        let mut out = vec![0.0; 3 * 4 * 6];
        matmul(
            &mut out,
            Sizes { m: 4, n: 6, k: 5 },
            (&a, Strides::rows(5), &[0, 20, 40]),
            (&b, Strides::rows(6), &[0, 30, 60]),
        );
        let at = |p: usize, i: usize, j: usize| -> f32 {
            (0..5).map(|l| a[p * 20 + i * 5 + l] * b[p * 30 + l * 6 + j]).sum()
        };
        for (i, v) in out.iter().enumerate() {
            assert!((v - at(i / 24, i / 6 % 4, i % 6)).abs() < 1e-5);
        }
        for (m, n) in [(4, 6), (4, 1), (1, 6)] {
            let mut out = vec![1.0; 2 * 4 * 6];
            let strides = Strides { row: 12, column: 2 };
            let (a, b) = (Matrix::rows(&a, 5), Matrix::rows(&b, 6));
            product(Sizes { m, n, k: 5 }, (&mut out, strides), a, b, 2.0, true, Threads::One);
            for (i, v) in out.iter().enumerate() {
                let (row, column) = (i / 12, i % 12);
                let inside = row < m && column % 2 == 0 && column / 2 < n;
                let want = if inside { 1.0 + 2.0 * at(0, row, column / 2) } else { 1.0 };
                assert!((v - want).abs() < 1e-5, "{m} {n} at {i}: {v} {want}");
            }
        }
    }

    #[test]
    fn linear_adds_its_bias() {
        let (x, w, bias) = (sample(3 * 5, 0.1), sample(40 * 5, 0.2), sample(40, 0.3));
        let mut out = vec![0.0; 3 * 40];
        linear(&mut out, Sizes { m: 3, n: 40, k: 5 }, Matrix::rows(&x, 5), Matrix::rows(&w, 5), Some(&bias));
        for (i, v) in out.iter().enumerate() {
            let want: f32 = (0..5).map(|l| x[i / 40 * 5 + l] * w[i % 40 * 5 + l]).sum::<f32>() + bias[i % 40];
            assert!((v - want).abs() < 1e-5);
        }
    }
}
