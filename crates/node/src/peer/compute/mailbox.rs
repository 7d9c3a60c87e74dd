//! Tensors and verdicts that have arrived for the computing thread.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use fusionllm_graph::HostTensor;
use fusionllm_program::Verdict;
use fusionllm_protocol::TensorHeader;

/// Holds tensors and verdicts until the computing thread takes them. Each generation has its own mailbox.
pub(crate) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    tensors: HashMap<TensorHeader, HostTensor>,
    /// The last pass that is done.
    done: u64,
    verdicts: HashMap<u64, Verdict>,
    failed: Option<String>,
}

impl Mailbox {
    /// A mailbox for the passes after this one.
    pub(crate) fn new(done: u64) -> Self {
        let state = State { tensors: HashMap::new(), done, verdicts: HashMap::new(), failed: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        f(&mut self.lock());
        self.changed.notify_all();
    }

    /// Adds a tensor. A tensor for a pass that is done is dropped.
    pub(crate) fn put(&self, header: TensorHeader, tensor: HostTensor) {
        self.change(|s| {
            if header.pass > s.done {
                s.tensors.insert(header, tensor);
            }
        });
    }

    /// Ends a pass, and drops its tensors that nobody read.
    pub(crate) fn done(&self, pass: u64) {
        self.change(|s| {
            s.done = pass;
            s.tensors.retain(|header, _| header.pass > pass);
            s.verdicts.retain(|judged, _| *judged > pass);
        });
    }

    /// Adds a verdict. A verdict on a pass that is done is dropped.
    pub(crate) fn judge(&self, pass: u64, verdict: Verdict) {
        self.change(|s| {
            if pass > s.done {
                s.verdicts.insert(pass, verdict);
            }
        });
    }

    /// Ends all waiting with this reason.
    pub(crate) fn fail(&self, reason: String) {
        self.change(|s| {
            s.failed.get_or_insert(reason);
        });
    }

    /// The reason that was given to [`Self::fail`].
    pub(crate) fn failure(&self) -> Option<String> {
        self.lock().failed.clone()
    }

    /// Waits for a tensor.
    pub(crate) fn take(&self, header: &TensorHeader) -> Result<HostTensor, String> {
        self.wait(|s| s.tensors.remove(header))
    }

    /// Waits for a verdict.
    pub(crate) fn verdict(&self, pass: u64) -> Result<Verdict, String> {
        self.wait(|s| s.verdicts.remove(&pass))
    }

    fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T, String> {
        let mut state = self.lock();
        loop {
            if let Some(reason) = &state.failed {
                return Err(reason.clone());
            }
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_for_earlier_passes_is_dropped_and_a_failure_ends_all_waiting() {
        let mailbox = Mailbox::new(5);
        let verdict = Verdict { apply: true, update: 1, lr: 0.1, factor: 1.0 };
        mailbox.judge(5, verdict);
        mailbox.judge(6, verdict);
        assert_eq!(mailbox.verdict(6), Ok(verdict));
        mailbox.fail("stopped".into());
        mailbox.fail("again".into());
        assert_eq!((mailbox.failure(), mailbox.verdict(5)), (Some("stopped".into()), Err("stopped".into())));
    }
}
