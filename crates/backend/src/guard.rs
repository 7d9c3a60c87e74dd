use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `f`, and makes an error of a panic: kernels panic where they cannot go on. Operands are checked before, so
/// this is rare.
pub(crate) fn guarded<T>(framework: &str, f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
        Err(format!("{framework} panicked: {}", text.as_deref().unwrap_or("it gave no reason")))
    })
}
