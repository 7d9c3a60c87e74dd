//! Freed memory that is kept for the next tensor of the same size.
//!
//! A step needs the same sizes again and again. New pages from the system cost as much time as the operators that fill
//! them, so where memory is short, freed blocks are kept as long as there is room for them.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::{self, null_mut};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::memory::live_bytes;

/// Smaller blocks go to the allocator below, which has pools of its own for them.
const LEAST: usize = 64 << 10;
/// Blocks are multiples of a page.
const PAGE: usize = 4096;
/// Every block has this alignment. Blocks of a larger one are not kept.
const ALIGN: usize = 64;
/// Most sizes of which blocks are kept. A model's step has fewer.
const SIZES: usize = 256;

/// Keeps freed blocks, once [`keep_up_to`] says how many. It goes between [`Counting`](super::memory::Counting), which
/// says how many bytes are in use, and an allocator that returns freed blocks to the system at once.
#[derive(Debug)]
pub struct Pooling<A>(pub A);

/// From now on, freed blocks are kept while they and all that is in use take no more than `bytes`.
pub fn keep_up_to(bytes: u64) {
    pool().limit = bytes;
    IN_USE.store(true, Relaxed);
}

static IN_USE: AtomicBool = AtomicBool::new(false);
static POOL: Mutex<Pool> = Mutex::new(Pool { limit: 0, kept: 0, clock: 0, sizes: [Size::NONE; SIZES] });

fn pool() -> MutexGuard<'static, Pool> {
    // It is whole after every statement.
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Pool {
    limit: u64,
    /// Bytes of all kept blocks.
    kept: u64,
    /// Counts what is kept and taken.
    clock: u64,
    sizes: [Size; SIZES],
}

/// The kept blocks of one size. Each begins with the address of the next.
#[derive(Clone, Copy)]
struct Size {
    bytes: usize,
    first: *mut u8,
    /// When a block was kept or taken last.
    used: u64,
}

// SAFETY: the pool owns its blocks, and no other thread knows them.
unsafe impl Send for Pool {}

impl Size {
    const NONE: Self = Self { bytes: 0, first: null_mut(), used: 0 };
}

impl Pool {
    /// Takes the block that was kept last, if there is one of this size.
    fn take(&mut self, bytes: usize) -> Option<*mut u8> {
        let at = self.sizes.iter().position(|size| size.bytes == bytes && !size.first.is_null())?;
        Some(self.take_at(at))
    }

    fn take_at(&mut self, at: usize) -> *mut u8 {
        self.clock += 1;
        let size = &mut self.sizes[at];
        let block = size.first;
        // SAFETY: `keep` wrote the next address there, and the block was the pool's since then.
        size.first = unsafe { block.cast::<*mut u8>().read() };
        size.used = self.clock;
        self.kept -= size.bytes as u64;
        block
    }

    /// Keeps a block of this size; returns whether there was a place for it.
    ///
    /// # Safety
    ///
    /// The block has so many bytes and [`ALIGN`], and nobody uses it.
    unsafe fn keep(&mut self, block: *mut u8, bytes: usize) -> bool {
        let known = self.sizes.iter().position(|size| size.bytes == bytes);
        let Some(at) = known.or_else(|| self.sizes.iter().position(|size| size.first.is_null())) else { return false };
        self.clock += 1;
        let size = &mut self.sizes[at];
        // SAFETY: the caller gives the block away, and it is larger than an address.
        unsafe { block.cast::<*mut u8>().write(size.first) };
        *size = Size { bytes, first: block, used: self.clock };
        self.kept += bytes as u64;
        true
    }

    /// A block of the size that was not needed for longest.
    fn oldest(&mut self) -> Option<(*mut u8, usize)> {
        let sizes = self.sizes.iter().enumerate().filter(|(_, size)| !size.first.is_null());
        let at = sizes.min_by_key(|(_, size)| size.used)?.0;
        Some((self.take_at(at), self.sizes[at].bytes))
    }
}

/// The layout of the block that serves this one, if it is one that may be kept.
fn block(layout: Layout) -> Option<Layout> {
    if layout.size() < LEAST || layout.align() > ALIGN {
        return None;
    }
    Layout::from_size_align(layout.size().checked_next_multiple_of(PAGE)?, ALIGN).ok()
}

impl<A: GlobalAlloc> Pooling<A> {
    /// A kept block for a layout. Without one, this makes room for a new block.
    fn kept(&self, layout: Layout) -> Option<*mut u8> {
        if layout.size() < LEAST || !IN_USE.load(Relaxed) {
            return None;
        }
        let kept = block(layout).and_then(|block| pool().take(block.size()));
        if kept.is_none() {
            self.make_room(live_bytes() + layout.size() as u64);
        }
        kept
    }

    /// Gives kept blocks back until they fit beside what is in use.
    fn make_room(&self, used: u64) {
        let mut pool = pool();
        while used.saturating_add(pool.kept) > pool.limit
            && let Some((old, bytes)) = pool.oldest()
        {
            self.give_back(old, bytes);
        }
    }

    /// Keeps a block that nobody uses any more, or gives it back. It still counts as used, and `more` bytes do not yet.
    fn free(&self, pointer: *mut u8, block: Layout, more: u64) {
        if IN_USE.load(Relaxed) {
            let used = live_bytes() + more;
            self.make_room(used);
            let mut pool = pool();
            // SAFETY: the block has this size, and nobody uses it.
            if used.saturating_add(pool.kept) <= pool.limit && unsafe { pool.keep(pointer, block.size()) } {
                return;
            }
        }
        self.give_back(pointer, block.size());
    }

    fn give_back(&self, block: *mut u8, bytes: usize) {
        // SAFETY: a block has the layout that `block` gave for it, and nobody uses it.
        unsafe { self.0.dealloc(block, Layout::from_size_align_unchecked(bytes, ALIGN)) };
    }
}

// SAFETY: a block that may be kept always has the layout that `block` gives, whether it is new or was kept. Two layouts
// with the same block are interchangeable. All other calls go to `A` unchanged.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Pooling<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the promises that `A` needs, here and below; a block is no smaller than asked for.
        self.kept(layout).unwrap_or_else(|| unsafe { self.0.alloc(block(layout).unwrap_or(layout)) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match self.kept(layout) {
            Some(kept) => {
                // SAFETY: the block has at least so many bytes.
                unsafe { ptr::write_bytes(kept, 0, layout.size()) };
                kept
            }
            // SAFETY: as above.
            None => unsafe { self.0.alloc_zeroed(block(layout).unwrap_or(layout)) },
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        match block(layout) {
            Some(block) => self.free(pointer, block, 0),
            // SAFETY: as above.
            None => unsafe { self.0.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let new = Layout::from_size_align(size, layout.align());
        match (block(layout), new.ok().and_then(block)) {
            (None, None) => {
                if size >= LEAST && IN_USE.load(Relaxed) {
                    self.make_room(live_bytes() + size as u64);
                }
                // SAFETY: as above.
                unsafe { self.0.realloc(pointer, layout, size) }
            }
            (old, new) if old == new => pointer,
            _ => {
                // SAFETY: the caller says that the new layout is valid. Both blocks have the bytes that are copied.
                unsafe {
                    let moved = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
                    if !moved.is_null() {
                        ptr::copy_nonoverlapping(pointer, moved, layout.size().min(size));
                        match block(layout) {
                            Some(block) => self.free(pointer, block, size as u64),
                            None => self.0.dealloc(pointer, layout),
                        }
                    }
                    moved
                }
            }
        }
    }
}
