//! The memory that a decoder takes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;

use fusionllm_workbench::machine::memory::{Counting, live_bytes, take_peak};

/// The most bytes that a decoder gets, whatever its input. With more, the machine would suffer before the test failed.
const MOST: usize = 1 << 30;

struct Bounded(Counting<System>);

#[global_allocator]
static ALLOCATOR: Bounded = Bounded(Counting(System));

/// Whether so many more bytes fit. If not, the process ends after this message.
fn fits(bytes: usize) -> bool {
    let fits = bytes < MOST && (live_bytes() as usize) < MOST;
    if !fits {
        let _ = std::io::stderr().write_all(b"a decoder wants more than a gibibyte: see the last case above\n");
    }
    fits
}

// SAFETY: all calls go to the system's allocator unchanged, or fail as an allocator may.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the promises that the inner allocator needs, here and below.
        if fits(layout.size()) { unsafe { self.0.alloc(layout) } } else { std::ptr::null_mut() }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        if fits(layout.size()) { unsafe { self.0.alloc_zeroed(layout) } } else { std::ptr::null_mut() }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        if fits(size) { unsafe { self.0.realloc(pointer, layout, size) } } else { std::ptr::null_mut() }
    }
}

/// The most bytes that `f` has at once, besides those from before.
pub(crate) fn peak<T>(f: impl FnOnce() -> T) -> (T, u64) {
    take_peak();
    let before = live_bytes();
    let result = f();
    (result, take_peak().saturating_sub(before))
}
