//! The threads that compute.

use crate::WorkbenchError;

/// The threads that kernels compute on: one per core, or a single one where pacing counts processor time. They take
/// [long turns](take_long_turns).
///
/// # Errors
///
/// The system starts no more threads.
pub fn compute_threads(slowdown: f64) -> Result<rayon::ThreadPool, WorkbenchError> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(usize::from(slowdown > 1.0));
    let threads = threads.start_handler(|_| take_long_turns()).build();
    threads.map_err(|e| WorkbenchError::State(format!("cannot start threads: {e}")))
}

/// Lets this thread wait for its turn when it wakes up, where another one computes. Threads that answer messages still
/// interrupt it. Turns are short where several peers compute on one processor and wake each other with every message,
/// and each change of turns cools a core's caches.
///
/// It changes nothing if the user has chosen how this process is scheduled, or where the system has no such policy. On
/// Linux it is `SCHED_BATCH`, see sched(7).
pub fn take_long_turns() {
    #[cfg(target_os = "linux")]
    {
        let mut policy = libc::SCHED_OTHER;
        let mut parameters = std::mem::MaybeUninit::<libc::sched_param>::zeroed();
        // SAFETY: both functions are given this thread, which lives, and pointers to what they read or write. Zero bits
        // are parameters without a priority, as both policies have.
        unsafe {
            let this = libc::pthread_self();
            if libc::pthread_getschedparam(this, &mut policy, parameters.as_mut_ptr()) == 0
                && policy == libc::SCHED_OTHER
            {
                libc::pthread_setschedparam(this, libc::SCHED_BATCH, parameters.as_ptr());
            }
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// The number that Linux gives the policy of this thread, in /proc.
    fn policy() -> i32 {
        let status = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The name of the thread is in parentheses and may have spaces. The policy is the 41st field.
        let after_name = status.rsplit_once(") ").unwrap().1;
        after_name.split(' ').nth(41 - 3).unwrap().parse().unwrap()
    }

    #[test]
    fn threads_that_compute_take_long_turns() {
        let here = policy();
        let there = compute_threads(1.0).unwrap().install(policy);
        let expected = if here == libc::SCHED_OTHER { libc::SCHED_BATCH } else { here };
        assert_eq!((policy(), there), (here, expected));
    }
}
