//! Output buffers, and how work is cut for threads.

use super::Element;

/// Below this many elements a thread hand-over costs more than it saves.
const TASK: usize = 1 << 15;

/// How many chunks of `chunk` elements a thread takes at least: for `with_min_len`.
pub(crate) fn grain(chunk: usize) -> usize {
    (TASK / chunk.max(1)).max(1)
}

/// Rows in a chunk of about `TASK / 4` elements: enough chunks to balance threads, each large enough to be worth a hand-over.
pub(crate) fn rows_per_chunk(width: usize) -> usize {
    (TASK / 4 / width.max(1)).max(1)
}

/// Rows in a chunk when every chunk holds a partial result of its own: at most 16 chunks.
pub(crate) fn rows_per_partial(rows: usize, width: usize) -> usize {
    rows_per_chunk(width).max(rows.div_ceil(16))
}

/// A vector of `len` unspecified numbers, for kernels that write every element: clearing it first would cost as much as many
/// kernels do.
pub fn uninit<T: Element>(len: usize) -> Vec<T> {
    let mut v: Vec<T> = Vec::with_capacity(len);
    let p = v.as_mut_ptr();
    // SAFETY: the compiler must assume that the (empty) assembly writes to the memory it is given the address of, so its
    // bytes count as initialised, with values it cannot know; any bytes are a valid `T` (`Pod`). `len` is the capacity.
    unsafe {
        std::arch::asm!("/* {0} */", in(reg) p, options(nostack, preserves_flags));
        v.set_len(len);
    }
    v
}

/// A mutable slice that tasks share, each writing places of its own.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(*mut T, usize);

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
    /// While the result lives nothing else may access these elements, and the slice given to `new` must still be borrowed.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.1), "{start} + {len} exceeds {}", self.1);
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }

    /// The first element's address, for matrix products with strided results.
    pub(crate) fn ptr(self) -> *mut T {
        self.0
    }
}
