//! Tensors and verdicts that have arrived for the computing thread.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use fusionllm_graph::HostTensor;
use fusionllm_plan::{PeerId, Verdict};
use fusionllm_protocol::TensorHeader;

/// Holds what has arrived until the computing thread takes it.
#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tensors: HashMap<TensorHeader, HostTensor>,
    /// The last pass that is done.
    done: u64,
    verdicts: HashMap<u64, Verdict>,
    lost: Option<(PeerId, String)>,
    failed: Option<String>,
}

impl Mailbox {
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
        });
    }

    /// Adds a verdict.
    pub(crate) fn judge(&self, pass: u64, verdict: Verdict) {
        self.change(|s| {
            s.verdicts.insert(pass, verdict);
        });
    }

    /// Notes a lost connection. The first one is the one to report.
    pub(crate) fn lose(&self, peer: PeerId, reason: String) {
        self.change(|s| {
            s.lost.get_or_insert((peer, reason.clone()));
            s.failed.get_or_insert(reason);
        });
    }

    /// Ends all waiting with this reason.
    pub(crate) fn fail(&self, reason: String) {
        self.change(|s| {
            s.failed.get_or_insert(reason);
        });
    }

    /// The first connection that was lost.
    pub(crate) fn lost(&self) -> Option<(PeerId, String)> {
        self.lock().lost.clone()
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
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(reason) = &state.failed {
                return Err(reason.clone());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
