//! Work on several threads, whose results do not depend on their number.

use std::panic::resume_unwind;
use std::thread::{Builder, available_parallelism, scope};

/// Most threads. Each may hold the Programs of a plan.
const MAX_THREADS: usize = 8;

/// How many items are worth a thread at once.
pub(super) fn threads() -> usize {
    available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

/// The result for each item, in the items' order. Each item but the first has a thread, if the system gives one.
pub(super) fn for_each<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let Some((first, others)) = items.split_first() else { return Vec::new() };
    scope(|scope| {
        let others: Vec<_> = others.iter().map(|item| (item, Builder::new().spawn_scoped(scope, || f(item)))).collect();
        let mut results = vec![f(first)];
        results.extend(others.into_iter().map(|(item, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => f(item),
        }));
        results
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_order_of_the_items() {
        assert_eq!(for_each(&[3, 1, 2], |i| i * 10), [30, 10, 20]);
        assert_eq!(for_each(&[], |i: &i32| *i), Vec::<i32>::new());
        assert!((1..=MAX_THREADS).contains(&threads()));
    }
}
