//! A simulation that fails is a value, so that another one can be compared with it.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Once;

/// A broken assertion, or another panic.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Failure {
    /// The file and line that panicked.
    pub(crate) place: String,
    pub(crate) message: String,
}

impl Failure {
    /// Whether the same thing went wrong, be it at another step or on another machine.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.place == other.place && self.words().eq(other.words())
    }

    /// The words of the first line that are without a number.
    fn words(&self) -> impl Iterator<Item = &str> {
        let line = self.message.lines().next().unwrap_or_default();
        line.split_whitespace().filter(|word| !word.contains(|c: char| c.is_ascii_digit()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}\n  at {}", self.message, self.place)
    }
}

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static LAST: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// The result of `f`, or its panic, which is not printed.
pub(crate) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, Failure> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| if WATCHED.get() { note(panic) } else { print(panic) }));
    });
    WATCHED.set(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    WATCHED.set(false);
    result.map_err(|_| LAST.take().unwrap())
}

fn note(panic: &PanicHookInfo) {
    let place = panic.location().map_or_else(String::new, |at| format!("{}:{}", at.file(), at.line()));
    let message = panic.payload_as_str().unwrap_or_default().to_owned();
    LAST.set(Some(Failure { place, message }));
}

#[test]
fn failures_at_one_place_are_alike_whatever_their_numbers() {
    let fails = |step: u64, done: &str| caught(|| panic!("step {step} was {done}\nof {done}")).unwrap_err();
    let failure = fails(7, "skipped");
    assert!(failure.message.starts_with("step 7") && failure.place.contains("failure.rs:"), "{failure}");
    assert!(failure.is_like(&fails(12, "skipped")) && !failure.is_like(&fails(7, "repeated")));
    assert!(!failure.is_like(&caught(|| panic!("step 7 was skipped")).unwrap_err()), "another place");
}
