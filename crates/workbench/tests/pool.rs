//! Kept blocks are reused, never shared, and never more than there is room for.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fusionllm_graph::ChoiceRng;
use fusionllm_workbench::machine::memory::{Counting, live_bytes};
use fusionllm_workbench::machine::pool::{Pooling, keep_up_to, kept_and_taken};

/// Counts what the allocator below has.
struct Watched;

static HELD: AtomicU64 = AtomicU64::new(0);

// SAFETY: all calls go to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as u64, Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

const ALLOCATOR: Counting<Pooling<Watched>> = Counting(Pooling(Watched));
const LIMIT: u64 = 8 << 20;

struct Block {
    pointer: *mut u8,
    layout: Layout,
    mark: u8,
}

impl Block {
    fn new(bytes: usize, align: usize, zeroed: bool, mark: u8) -> Self {
        let layout = Layout::from_size_align(bytes, align).unwrap();
        // SAFETY: the layout is not empty.
        let pointer = unsafe { if zeroed { ALLOCATOR.alloc_zeroed(layout) } else { ALLOCATOR.alloc(layout) } };
        assert!(!pointer.is_null() && pointer.addr().is_multiple_of(align));
        let mut block = Self { pointer, layout, mark };
        assert!(!zeroed || block.bytes().iter().all(|b| *b == 0), "zeros");
        block.bytes().fill(mark);
        block
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the block is this test's, and every byte was written.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.layout.size()) }
    }

    fn resize(&mut self, bytes: usize) {
        // SAFETY: the block has this layout, and the new size is not zero.
        self.pointer = unsafe { ALLOCATOR.realloc(self.pointer, self.layout, bytes) };
        let kept = self.layout.size().min(bytes);
        self.layout = Layout::from_size_align(bytes, self.layout.align()).unwrap();
        // SAFETY: the bytes are there, though those beyond the old size were not written.
        unsafe { self.pointer.add(kept).write_bytes(self.mark, bytes - kept) };
        self.check();
    }

    fn check(&mut self) {
        let mark = self.mark;
        assert!(self.bytes().iter().all(|b| *b == mark), "another block has these bytes");
    }

    fn free(mut self) {
        self.check();
        // SAFETY: it is freed once, with its layout.
        unsafe { ALLOCATOR.dealloc(self.pointer, self.layout) };
    }
}

fn kept() -> u64 {
    kept_and_taken().0
}

/// The counters belong to the process, so one test has them to itself.
#[test]
fn blocks_are_kept_within_the_limit_and_reused() {
    let mut choices = ChoiceRng::new(7);
    let mut blocks = vec![Block::new(100_000, 8, false, 1)];
    blocks.remove(0).free();
    assert_eq!(HELD.load(Relaxed), 0, "nothing is kept before somebody says how much");
    keep_up_to(LIMIT);
    let sizes = [1_000, 65_536, 70_000, 100_000, 262_144, 1_000_000];
    for turn in 0..3_000u32 {
        let (bytes, align) = (choices.choose(&sizes), choices.choose(&[4, 64, 128]));
        match choices.below(4) {
            0 if !blocks.is_empty() => blocks.swap_remove(choices.below(blocks.len())).free(),
            1 if !blocks.is_empty() => {
                let at = choices.below(blocks.len());
                blocks[at].resize(bytes);
            }
            _ => blocks.push(Block::new(bytes, align, choices.one_in(3), turn as u8)),
        }
        while blocks.iter().map(|b| b.layout.size() as u64).sum::<u64>() > LIMIT * 3 / 4 {
            blocks.swap_remove(choices.below(blocks.len())).free();
        }
        // Small blocks make no room for themselves.
        let most = LIMIT + (64 << 10);
        assert!(live_bytes() + kept() <= most, "{} bytes are in use, and {} are kept", live_bytes(), kept());
    }
    let alone = blocks.iter().filter(|b| b.layout.size() < 65_536).map(|b| b.layout.size() as u64).sum::<u64>();
    assert_eq!(HELD.load(Relaxed), alone, "large blocks are the pool's");
    blocks.drain(..).for_each(Block::free);

    // What repeats takes nothing from the system, though the second half of a step has other sizes than the first.
    let step = || {
        for sizes in [&[262_144; 24][..], &[1_000_000, 3_000_000, 2_000_000]] {
            sizes.iter().map(|b| Block::new(*b, 64, false, 9)).collect::<Vec<_>>().drain(..).for_each(Block::free);
        }
    };
    step();
    let (_, taken) = kept_and_taken();
    (0..10).for_each(|_| step());
    assert_eq!(kept_and_taken().1, taken);

    // A lower limit returns what is beyond it with the next block.
    keep_up_to(0);
    Block::new(65_536, 8, false, 3).free();
    assert_eq!((HELD.load(Relaxed), live_bytes(), kept()), (0, 0, 0));
}
