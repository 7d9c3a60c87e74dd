//! The allocator, and its handling of freed memory.

use fusionllm_workbench::machine::memory::Counting;
use fusionllm_workbench::machine::pool::{Pooling, keep_up_to};

// Measured on a GPT-2 block: 0.7 of PyTorch's time with it, 0.94 with glibc's allocator.
#[global_allocator]
static ALLOCATOR: Counting<Pooling<mimalloc::MiMalloc>> = Counting(Pooling(mimalloc::MiMalloc));

/// The allocator returns freed memory to the system after this time; its default is 1 s. The next step needs the same
/// memory again. With the default, peers with longer steps spent up to a fifth of their time on new pages.
const PURGE_DELAY_MS: std::ffi::c_long = 120_000;

/// `mi_option_purge_delay`, which the bindings leave out.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

pub(crate) fn keep_freed_memory() {
    // SAFETY: sets a number that the allocator reads atomically; a number that is no option of its own is ignored.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, PURGE_DELAY_MS) };
}

/// Lets the allocator return freed memory at once. A broker calls this, since it reads a whole model in pieces and needs
/// none of them again, and so does a joiner whose memory is short.
pub(crate) fn return_freed_memory() {
    // SAFETY: as above.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, 0) };
    tracing::info!("freed memory returns to the system at once");
}

/// Keeps what tensors leave free as long as that and all that is in use fit into so many bytes. A joiner calls this before
/// it measures its machine, so that tensors find what the measurement leaves free. Without kept memory, new pages took up
/// to half of the time of a step where memory is short. With the allocator's own delay of 1 ms, resident memory was a
/// quarter above the limit.
pub(crate) fn keep_freed_tensors(room: u64) {
    keep_up_to(room);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that the allocator has returned to the system, by its own count.
    fn returned() -> u64 {
        // SAFETY: without a buffer, the text is in memory of its own, which is freed once it is copied.
        let text = unsafe {
            let text = libmimalloc_sys::mi_stats_get_json(0, std::ptr::null_mut());
            let copy = std::ffi::CStr::from_ptr(text).to_owned();
            libmimalloc_sys::mi_free(text.cast());
            copy
        };
        let figures: serde_json::Value = serde_json::from_slice(text.to_bytes()).unwrap();
        figures["purged"].as_u64().unwrap_or_else(|| panic!("no count: {text:?}"))
    }

    /// The bytes that the allocator returns while tensors of half a GiB come and go.
    fn returned_of_tensors() -> u64 {
        let before = returned();
        let tensors: Vec<Vec<u8>> = (0..256).map(|_| Vec::with_capacity(2 << 20)).collect();
        drop(std::hint::black_box(tensors));
        returned() - before
    }

    /// Other tests of this program free far less than these.
    #[test]
    fn freed_memory_stays_until_it_is_to_return() {
        keep_freed_memory();
        let kept = returned_of_tensors();
        return_freed_memory();
        let returned = returned_of_tensors();
        assert!(kept < 100 << 20 && returned > 400 << 20, "{kept} bytes, and then {returned}");
    }
}
