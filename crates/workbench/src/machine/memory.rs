//! The memory of this process.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use fusionllm_backend::machine::memory::{resident, room};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts the bytes allocated now and their peak. A program that reports its memory makes this its
/// `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting<A>(pub A);

/// Bytes allocated now; 0 without a [`Counting`] allocator.
pub fn live_bytes() -> u64 {
    LIVE.load(Relaxed) as u64
}

/// The most bytes allocated at once since the last call.
pub fn take_peak() -> u64 {
    let peak = PEAK.swap(LIVE.load(Relaxed), Relaxed);
    peak.max(LIVE.load(Relaxed)) as u64
}

/// Bytes that this process can still allocate: those that the system would give it, and those that it has and that are
/// free, since the allocator keeps what is freed. `None` where the system does not say.
fn free() -> Option<u64> {
    Some(room()?.bytes.saturating_add(resident().saturating_sub(live_bytes())))
}

/// Bytes for the tensors of a run. The system kills a process at its limit, so what it takes beside tensors is left out:
/// the allocator's gaps, code, and buffers of the network.
pub fn for_tensors() -> Option<u64> {
    const LEAST_BESIDE: u64 = 96 << 20;
    let free = free()?;
    let beside = if room()?.limit.is_some() { LEAST_BESIDE.max(free / 6) } else { 0 };
    Some(free.saturating_sub(beside))
}

/// Bytes that this process may come to use in all.
pub fn limit() -> Option<u64> {
    Some(free()?.saturating_add(live_bytes()))
}

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    // Only a new record writes to the shared cache line.
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
}

fn shrink(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

// SAFETY: all calls go to `A` unchanged, and counting allocates nothing.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the promises that `A` needs, here and below.
        let pointer = unsafe { self.0.alloc(layout) };
        if !pointer.is_null() {
            grow(layout.size());
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let pointer = unsafe { self.0.alloc_zeroed(layout) };
        if !pointer.is_null() {
            grow(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.0.dealloc(pointer, layout) };
        shrink(layout.size());
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { self.0.realloc(pointer, layout, size) };
        if !moved.is_null() {
            if size >= layout.size() {
                grow(size - layout.size());
            } else {
                shrink(layout.size() - size);
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::System;

    use super::*;

    /// The counters belong to the process, and this test's own allocator does not count, so one test has them to
    /// itself.
    #[test]
    fn bytes_are_counted_until_they_are_freed() {
        let allocator = Counting(System);
        let small = Layout::from_size_align(1000, 8).unwrap();
        assert_eq!(live_bytes(), 0);
        // SAFETY: layouts are not empty, and each pointer is given back once with its layout.
        unsafe {
            let a = allocator.alloc(small);
            let b = allocator.alloc_zeroed(small);
            assert_eq!(live_bytes(), 2000);
            let a = allocator.realloc(a, small, 5000);
            assert_eq!(live_bytes(), 6000);
            let large = Layout::from_size_align(5000, 8).unwrap();
            let a = allocator.realloc(a, large, 1000);
            allocator.dealloc(a, small);
            assert_eq!((live_bytes(), take_peak()), (1000, 6000));
            assert_eq!(take_peak(), 1000, "from the last time on");
            allocator.dealloc(b, small);
        }
        assert_eq!((live_bytes(), take_peak(), take_peak()), (0, 1000, 0));
    }
}
