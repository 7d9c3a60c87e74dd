//! The cuts that this member has: its own shares and copies of others'. They outlive generations and connections.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusionllm_exec::{ExecError, Snapshot};
use fusionllm_graph::HostTensor;
use fusionllm_protocol::TensorKey;

/// A tensor of a cut.
#[derive(Clone)]
pub(super) enum Kept {
    /// One of the peer's own tensors, at this place of a snapshot.
    Own(Arc<Snapshot>, usize),
    /// A copy of another member's.
    Copy(HostTensor),
}

impl Kept {
    /// The content. Call it where blocking is allowed: the backend may have to copy it.
    pub(super) fn read(&self) -> Result<HostTensor, ExecError> {
        match self {
            Self::Own(snapshot, i) => snapshot.download(&snapshot.tensors[*i]),
            Self::Copy(tensor) => Ok(tensor.clone()),
        }
    }
}

/// The contents of the cuts. [`Follower`](fusionllm_protocol::Follower) decides what stays here.
#[derive(Default)]
pub(super) struct Vault {
    cuts: Mutex<BTreeMap<u64, BTreeMap<TensorKey, Kept>>>,
}

impl Vault {
    /// Keeps the peer's own tensors as they are now.
    pub(super) fn keep_own(&self, step: u64, snapshot: &Arc<Snapshot>) {
        let tensors = snapshot.tensors.iter().enumerate();
        let own = tensors.map(|(i, t)| {
            let key = TensorKey { name: t.name.clone(), slot: t.slot.map(str::to_owned) };
            (key, Kept::Own(snapshot.clone(), i))
        });
        self.lock().entry(step).or_default().extend(own);
    }

    /// Keeps copies of another member's tensors.
    pub(super) fn keep_copies(&self, step: u64, tensors: Vec<(TensorKey, HostTensor)>) {
        let copies = tensors.into_iter().map(|(key, tensor)| (key, Kept::Copy(tensor)));
        self.lock().entry(step).or_default().extend(copies);
    }

    /// These tensors of a cut; `None` if one is not here.
    pub(super) fn find<'a>(&self, step: u64, keys: impl IntoIterator<Item = &'a TensorKey>) -> Option<Vec<Kept>> {
        let cuts = self.lock();
        let cut = cuts.get(&step);
        keys.into_iter().map(|key| cut?.get(key).cloned()).collect()
    }

    pub(super) fn forget(&self, step: u64) {
        // Dropped without the lock: it may free much memory.
        let forgotten = self.lock().remove(&step);
        drop(forgotten);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, BTreeMap<TensorKey, Kept>>> {
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_kept_by_step_and_forgotten() {
        let vault = Vault::default();
        let (a, b) = (TensorKey::value("a"), TensorKey::slot("a", "momentum"));
        let tensor = |x| HostTensor::from_f32([1], &[x]).unwrap();
        vault.keep_copies(3, vec![(a.clone(), tensor(1.0))]);
        assert!(vault.find(3, [&a, &b]).is_none());
        vault.keep_copies(3, vec![(b.clone(), tensor(2.0))]);
        vault.keep_copies(4, vec![(a.clone(), tensor(3.0))]);
        let read = |step, key| vault.find(step, [key]).map(|kept| kept[0].read().unwrap());
        assert_eq!(read(3, &b), Some(tensor(2.0)));
        vault.forget(3);
        assert_eq!((read(3, &a), read(4, &a)), (None, Some(tensor(3.0))));
    }
}
