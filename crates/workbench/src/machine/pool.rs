//! Freed memory that is kept for the next tensors.
//!
//! New pages from the system cost as much time as the operators that fill them. So where memory is short, freed pages
//! are kept as long as there is room for them. Free neighbours become one range, since a step needs memory for
//! activations first, and then the same memory for gradients of other sizes.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::memory::live_bytes;

/// Smaller blocks go to the allocator below, which has pools of its own for them.
const LEAST: usize = 64 << 10;
/// Blocks are multiples of this, and begin at one. It is the largest page that is usual: systems with 4 KiB take it as
/// four pages.
const PAGE: usize = 16 << 10;
/// Addresses for each byte that may be kept. A block that finds no room between others takes fresh ones.
const ADDRESSES: usize = 4;

/// Keeps freed blocks, once [`keep_up_to`] says how many. It goes between [`Counting`](super::memory::Counting), which
/// says how many bytes are in use, and an allocator that returns freed blocks to the system at once.
#[derive(Debug)]
pub struct Pooling<A>(pub A);

/// From now on, freed blocks are kept while they and all that is in use take no more than `bytes`. Where the system has
/// no addresses for that, nothing is kept.
pub fn keep_up_to(bytes: u64) {
    let mut pool = pool();
    pool.limit = bytes;
    let most = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_mul(ADDRESSES));
    if pool.addresses.is_empty()
        && let Some(addresses) = most.and_then(|most| most.checked_next_multiple_of(PAGE)).and_then(system::reserve)
    {
        pool.addresses = addresses.clone();
        pool.put(Free { pages: 0..addresses.len() / PAGE, is_kept: false });
        BEGIN.store(addresses.start, Relaxed);
        END.store(addresses.end, Relaxed);
    }
}

/// Bytes that are kept now, and all bytes that came new from the system.
pub fn kept_and_taken() -> (u64, u64) {
    let pool = pool();
    ((pool.kept * PAGE) as u64, pool.taken)
}

/// The pool's addresses. They never change once they are set.
static BEGIN: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static POOL: Mutex<Pool> = Mutex::new(Pool::new());

fn pool() -> MutexGuard<'static, Pool> {
    // It is whole after every statement.
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a block is the pool's.
fn is_pooled(block: *mut u8) -> bool {
    (BEGIN.load(Relaxed)..END.load(Relaxed)).contains(&block.addr())
}

/// The pages of the pool. Its own lists are in small blocks, which the pool does not serve.
struct Pool {
    addresses: Range<usize>,
    limit: u64,
    /// Free ranges by their first page: where each ends, and whether its pages are kept. No two of the same kind are
    /// neighbours.
    free: BTreeMap<usize, (usize, bool)>,
    /// The same ranges, by whether they are kept, their number of pages and their first page.
    by_size: BTreeSet<(bool, usize, usize)>,
    /// The number of kept pages.
    kept: usize,
    /// All bytes that came new from the system.
    taken: u64,
}

/// A free range of pages.
struct Free {
    pages: Range<usize>,
    /// Whether the system's memory is still there. The pages are zero otherwise.
    is_kept: bool,
}

/// Pages for a block.
struct Taken {
    pages: Range<usize>,
    /// Whether all of them are zero.
    is_zero: bool,
}

impl Pool {
    const fn new() -> Self {
        Self { addresses: 0..0, limit: 0, free: BTreeMap::new(), by_size: BTreeSet::new(), kept: 0, taken: 0 }
    }

    fn address(&self, page: usize) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.addresses.start + PAGE * page)
    }

    /// The pages of a block.
    fn pages(&self, block: *mut u8, bytes: usize) -> Range<usize> {
        let first = (block.addr() - self.addresses.start) / PAGE;
        first..first + bytes.div_ceil(PAGE)
    }

    /// Adds a free range, and joins it with its neighbours of the same kind.
    fn put(&mut self, Free { mut pages, is_kept }: Free) {
        if pages.is_empty() {
            return;
        }
        if let Some((&start, &(end, kept))) = self.free.range(..pages.start).next_back()
            && (end, kept) == (pages.start, is_kept)
        {
            self.remove(start);
            pages.start = start;
        }
        if let Some(&(end, kept)) = self.free.get(&pages.end)
            && kept == is_kept
        {
            self.remove(pages.end);
            pages.end = end;
        }
        self.kept += if is_kept { pages.len() } else { 0 };
        self.by_size.insert((is_kept, pages.len(), pages.start));
        self.free.insert(pages.start, (pages.end, is_kept));
    }

    /// Removes the free range that begins here.
    fn remove(&mut self, start: usize) {
        if let Some((end, is_kept)) = self.free.remove(&start) {
            self.by_size.remove(&(is_kept, end - start, start));
            self.kept -= if is_kept { end - start } else { 0 };
        }
    }

    /// Takes pages that lie in one free range.
    fn take(&mut self, pages: &Range<usize>) {
        if let Some((&start, &(end, is_kept))) = self.free.range(..=pages.start).next_back() {
            self.remove(start);
            self.put(Free { pages: start..pages.start, is_kept });
            self.put(Free { pages: pages.end..end, is_kept });
        }
    }

    /// Takes pages for a block: the smallest kept range that is enough, or else a kept range with new pages beside it,
    /// or else new pages. `used` are the bytes in use with the block. `None` if too few addresses are free.
    fn find(&mut self, count: usize, used: u64) -> Option<Taken> {
        if let Some(&(_, _, start)) = self.by_size.range((true, count, 0)..).next() {
            let pages = start..start + count;
            self.take(&pages);
            self.make_room(used);
            return Some(Taken { pages, is_zero: false });
        }
        let (kept, new) = self.grown(count).or_else(|| {
            let &(.., start) = self.by_size.range((false, count, 0)..(true, 0, 0)).next()?;
            Some((start..start, start..start + count))
        })?;
        if !kept.is_empty() {
            self.take(&kept);
        }
        self.take(&new);
        self.taken += (PAGE * new.len()) as u64;
        self.make_room(used);
        let pages = kept.start.min(new.start)..kept.end.max(new.end);
        Some(Taken { pages, is_zero: kept.is_empty() })
    }

    /// The largest kept range beside which there are enough new pages, and these pages.
    fn grown(&self, count: usize) -> Option<(Range<usize>, Range<usize>)> {
        self.by_size.range((true, 0, 0)..).rev().find_map(|&(_, pages, start)| {
            let (end, more) = (start + pages, count.checked_sub(pages)?);
            let is_room = |range: &Range<usize>| range.len() >= more;
            let after = self.free.get(&end).map(|(last, _)| end..*last).filter(is_room);
            let before = self.free.range(..start).next_back().map(|(first, (last, _))| *first..*last);
            let before = before.filter(|range| range.end == start).filter(is_room);
            let new = after.map(|_| end..end + more).or(before.map(|_| start - more..start))?;
            Some((start..end, new))
        })
    }

    /// Gives kept pages back until they fit beside the bytes that are in use: the smallest ranges first, so that large
    /// ones form.
    fn make_room(&mut self, used: u64) {
        let fits = (self.limit.saturating_sub(used) / PAGE as u64) as usize;
        while self.kept > fits
            && let Some(&(_, pages, start)) = self.by_size.range((true, 0, 0)..).next()
        {
            let end = start + pages;
            let pages = end - pages.min(self.kept - fits)..end;
            self.take(&pages);
            // Addresses are lost if the system refuses, so that nobody takes what they have for zeros.
            if system::give_back(self.address(pages.start), PAGE * pages.len()) {
                self.put(Free { pages, is_kept: false });
            }
        }
    }
}

impl<A: GlobalAlloc> Pooling<A> {
    /// A block of the pool, and whether it is zero. `None` if the pool does not serve it.
    fn pooled(&self, layout: Layout) -> Option<(*mut u8, bool)> {
        if layout.size() < LEAST || layout.align() > PAGE || END.load(Relaxed) == 0 {
            return None;
        }
        let mut pool = pool();
        let used = live_bytes().saturating_add(layout.size() as u64);
        let taken = pool.find(layout.size().div_ceil(PAGE), used);
        if taken.is_none() {
            pool.make_room(used);
        }
        taken.map(|Taken { pages, is_zero }| (pool.address(pages.start), is_zero))
    }

    /// Frees a block. It still counts as used, and `more` bytes do not yet.
    unsafe fn free(&self, block: *mut u8, layout: Layout, more: usize) {
        if !is_pooled(block) {
            // SAFETY: the caller's promises.
            unsafe { self.0.dealloc(block, layout) };
            return;
        }
        let mut pool = pool();
        let pages = pool.pages(block, layout.size());
        pool.put(Free { pages, is_kept: true });
        let used = live_bytes().saturating_add(more as u64);
        pool.make_room(used.saturating_sub(layout.size() as u64));
    }
}

// SAFETY: a block is the pool's if its address is one of the pool's, and the allocator's below otherwise. The pool gives
// pages to one block at a time: a range leaves its lists when it is taken, and comes back when the block is freed.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Pooling<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the promises that `A` needs, here and below.
        self.pooled(layout).map_or_else(|| unsafe { self.0.alloc(layout) }, |(block, _)| block)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match self.pooled(layout) {
            Some((block, is_zero)) => {
                if !is_zero {
                    // SAFETY: the block has so many bytes.
                    unsafe { ptr::write_bytes(block, 0, layout.size()) };
                }
                block
            }
            // SAFETY: as above.
            None => unsafe { self.0.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.free(block, layout, 0) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let is_pooled = is_pooled(block);
        if is_pooled && size.div_ceil(PAGE) == layout.size().div_ceil(PAGE) {
            return block;
        }
        if !is_pooled && (size < LEAST || END.load(Relaxed) == 0) {
            // SAFETY: as above.
            return unsafe { self.0.realloc(block, layout, size) };
        }
        // SAFETY: the caller says that the new layout is valid. Both blocks have the bytes that are copied.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !moved.is_null() {
                ptr::copy_nonoverlapping(block, moved, layout.size().min(size));
                self.free(block, layout, size);
            }
            moved
        }
    }
}

/// The system's part: addresses, and the memory behind them.
#[cfg(unix)]
mod system {
    use std::ops::Range;
    use std::ptr::null_mut;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    /// Addresses without memory. `None` if the system has not so many, or if its pages are larger than the pool's, since
    /// those could not be given back.
    pub(super) fn reserve(bytes: usize) -> Option<Range<usize>> {
        if rustix::param::page_size() > super::PAGE {
            return None;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the system chooses addresses that nobody has.
        let begin = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }.ok()?;
        let begin = begin.expose_provenance();
        Some(begin..begin + bytes)
    }

    /// Returns the memory behind these addresses, which then are zero; whether that was possible.
    #[cfg(target_os = "linux")]
    pub(super) fn give_back(begin: *mut u8, bytes: usize) -> bool {
        use rustix::mm::{Advice, madvise};
        // SAFETY: the pages are the pool's, and no block has them.
        unsafe { madvise(begin.cast(), bytes, Advice::LinuxDontNeed) }.is_ok()
    }

    /// The same where the advice does not promise zeros.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn give_back(begin: *mut u8, bytes: usize) -> bool {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the pages are the pool's, and no block has them.
        unsafe { mmap_anonymous(begin.cast(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }.is_ok()
    }
}

/// Other systems keep nothing.
#[cfg(not(unix))]
mod system {
    use std::ops::Range;

    pub(super) fn reserve(_: usize) -> Option<Range<usize>> {
        None
    }

    pub(super) fn give_back(_: *mut u8, _: usize) -> bool {
        false
    }
}
