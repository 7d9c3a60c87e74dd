//! Memory for results, and work for threads.

use rayon::prelude::*;

use super::Element;

/// The least elements of a task. To hand a smaller task to another thread costs more than it saves.
const TASK: usize = 1 << 15;

/// Least number of chunks of `chunk` elements that a thread takes.
pub(crate) fn grain(chunk: usize) -> usize {
    (TASK / chunk.max(1)).max(1)
}

/// Runs `f(0), f(1), .. f(n - 1)`, of which each thread takes at least `least`. It is not generic, so that it is
/// compiled only once.
pub(crate) fn tasks(n: usize, least: usize, f: &(dyn Fn(usize) + Sync)) {
    if n <= least {
        (0..n).for_each(f);
    } else {
        (0..n).into_par_iter().with_min_len(least).for_each(f);
    }
}

/// Runs `f(i, chunk)` for every chunk of a slice. The last chunk may be shorter.
pub(crate) fn each<T: Send>(out: &mut [T], chunk: usize, least: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let (n, len, out) = (out.len().div_ceil(chunk), out.len(), Shared::new(out));
    tasks(n, least, &|i| {
        // SAFETY: each task has a chunk of its own.
        let out = unsafe { out.slice(i * chunk, chunk.min(len - i * chunk)) };
        f(i, out);
    });
}

/// Runs `f` like [`each`], over two slices with the same number of chunks.
pub(crate) fn each2<T: Send, U: Send>(
    (a, chunk_a): (&mut [T], usize),
    (b, chunk_b): (&mut [U], usize),
    least: usize,
    f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    assert_eq!(a.len().div_ceil(chunk_a), b.len().div_ceil(chunk_b), "results have different numbers of chunks");
    let (len, b) = (b.len(), Shared::new(b));
    each(a, chunk_a, least, |i, a| {
        // SAFETY: each task has a chunk of its own.
        let b = unsafe { b.slice(i * chunk_b, chunk_b.min(len - i * chunk_b)) };
        f(i, a, b);
    });
}

/// Chunk `i` of a slice. The last chunk may be shorter.
pub(crate) fn part<T>(x: &[T], i: usize, chunk: usize) -> &[T] {
    &x[i * chunk..x.len().min((i + 1) * chunk)]
}

/// Rows in a chunk of about `TASK / 4` elements: small enough to balance threads, large enough to be worth handing
/// over.
pub(crate) fn rows_per_chunk(width: usize) -> usize {
    (TASK / 4 / width.max(1)).max(1)
}

/// Rows in a chunk that has its own partial result. There are at most 16 chunks.
pub(crate) fn rows_per_partial(rows: usize, width: usize) -> usize {
    rows_per_chunk(width).max(rows.div_ceil(16))
}

/// A vector of `len` unspecified elements, for kernels that write all of them. Clearing it first would take as long
/// as many kernels.
pub(crate) fn uninit<T: Element>(len: usize) -> Vec<T> {
    let mut v: Vec<T> = Vec::with_capacity(len);
    let p = v.as_mut_ptr();
    // SAFETY: the compiler must assume that the (empty) assembly writes to the memory it is given the address of, so
    // its bytes count as initialised, with values it cannot know; any bytes are a valid `T` (`Pod`). `len` is the
    // capacity.
    unsafe {
        std::arch::asm!("/* {0} */", in(reg) p, options(nostack, preserves_flags));
        v.set_len(len);
    }
    v
}

/// A mutable slice that tasks share. Each task writes its own elements.
pub(crate) struct Shared<T>(*mut T, usize);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: whoever calls `slice` promises that no two tasks touch the same element.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(s: &mut [T]) -> Self {
        Self(s.as_mut_ptr(), s.len())
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// While the result lives, nothing else may access these elements. The slice given to `new` must still be borrowed.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.1), "{start} + {len} exceeds {}", self.1);
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }

    /// The address of the first element, for matrix products with strided results.
    pub(crate) fn ptr(self) -> *mut T {
        self.0
    }
}
