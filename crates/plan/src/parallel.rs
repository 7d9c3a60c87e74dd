//! Work on several threads, whose results do not depend on their number.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::{Builder, available_parallelism, scope};

/// Most threads. Each may hold the Programs of a plan.
const MAX_THREADS: usize = 8;

/// How many threads work on one thing at most.
pub(crate) fn threads() -> usize {
    available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

/// The result for each item, in the items' order. If the system gives no more threads, this one does all the work.
pub(crate) fn for_each<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, f(item)));
        }
    };
    let mut done = scope(|scope| {
        let others = (1..threads().min(items.len())).map_while(|_| Builder::new().spawn_scoped(scope, work).ok());
        let others: Vec<_> = others.collect();
        let mut done = work();
        others.into_iter().for_each(|o| done.extend(o.join().unwrap_or_else(|panic| resume_unwind(panic))));
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_order_of_the_items() {
        let items: Vec<u32> = (0..100).rev().collect();
        assert_eq!(for_each(&items, |i| i * 10), items.iter().map(|i| i * 10).collect::<Vec<_>>());
        assert_eq!(for_each(&[], |i: &u32| *i), Vec::<u32>::new());
        assert!((1..=MAX_THREADS).contains(&threads()));
    }
}
