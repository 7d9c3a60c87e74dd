//! The cuts that this member has: its own shares and copies of others'. They outlive generations and connections.
//!
//! They stand on the disk, because memory is for training. Their files have no names, so nothing is left of them when
//! the process ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusionllm_graph::{HostTensor, TensorType};

use crate::peer::observer::{JoinEvent, JoinObserver};
use fusionllm_program::TensorKey;

use crate::NodeError;
use crate::machine::disk::{directory, read_at, write_at};

/// A tensor of a cut.
#[derive(Debug, Clone)]
pub(crate) enum Kept {
    /// The tensor is in a file, from this place on.
    Disk(Arc<File>, u64, TensorType),
    /// The disk had no room for it.
    Memory(HostTensor),
}

impl Kept {
    /// The content. Call it where blocking is allowed.
    pub(crate) fn read(&self) -> Result<HostTensor, NodeError> {
        match self {
            Self::Memory(tensor) => Ok(tensor.clone()),
            Self::Disk(file, offset, ty) => {
                let bytes = read_at(file, ty.bytes(), *offset);
                let bytes = bytes.map_err(|e| NodeError::State(format!("a cut cannot be read from the disk: {e}")))?;
                Ok(HostTensor::from_bytes(ty.clone(), bytes)?)
            }
        }
    }
}

/// A file that takes tensors of one cut.
#[derive(Debug, Default)]
pub(crate) struct Spool {
    observer: JoinObserver,
    file: Option<Arc<File>>,
    end: u64,
    full: bool,
}

impl Spool {
    /// A spool whose observer is told once if the disk has no room.
    pub(crate) fn new(observer: JoinObserver) -> Self {
        Self { observer, ..Self::default() }
    }

    /// Keeps a tensor. If the disk has no room for it, it stays in memory.
    pub(crate) fn keep(&mut self, tensor: HostTensor) -> Kept {
        if self.full {
            return Kept::Memory(tensor);
        }
        match self.write(&tensor) {
            Ok((file, offset)) => Kept::Disk(file, offset, tensor.ty().clone()),
            Err(e) => {
                let reason = format!("{}: {e}", directory().display());
                self.observer.tell(JoinEvent::CopiesInMemory { reason });
                self.full = true;
                Kept::Memory(tensor)
            }
        }
    }

    fn write(&mut self, tensor: &HostTensor) -> io::Result<(Arc<File>, u64)> {
        let file = match &self.file {
            Some(file) => file.clone(),
            None => self.file.insert(Arc::new(tempfile::tempfile_in(directory())?)).clone(),
        };
        let offset = self.end;
        write_at(&file, tensor.bytes(), offset)?;
        self.end += tensor.bytes().len() as u64;
        Ok((file, offset))
    }
}

/// The contents of the cuts. [`Follower`](fusionllm_protocol::Follower) decides what stays here.
#[derive(Default)]
pub(crate) struct Vault {
    cuts: Mutex<BTreeMap<u64, BTreeMap<TensorKey, Kept>>>,
}

impl Vault {
    /// Keeps tensors of a cut.
    pub(crate) fn keep(&self, step: u64, tensors: impl IntoIterator<Item = (TensorKey, Kept)>) {
        self.lock().entry(step).or_default().extend(tensors);
    }

    /// These tensors of a cut; `None` if one is not here.
    pub(crate) fn find<'a>(&self, step: u64, keys: impl IntoIterator<Item = &'a TensorKey>) -> Option<Vec<Kept>> {
        let cuts = self.lock();
        let cut = cuts.get(&step);
        keys.into_iter().map(|key| cut?.get(key).cloned()).collect()
    }

    pub(crate) fn forget(&self, step: u64) {
        // Dropped without the lock: the system may free much.
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
        let tensor = |x| HostTensor::from_f32([2], &[x, -x]).unwrap();
        let mut spool = Spool::default();
        vault.keep(3, [(a.clone(), spool.keep(tensor(1.0)))]);
        assert!(vault.find(3, [&a, &b]).is_none());
        vault.keep(3, [(b.clone(), spool.keep(tensor(2.0)))]);
        vault.keep(4, [(a.clone(), Kept::Memory(tensor(3.0)))]);
        assert!(matches!(&vault.find(3, [&b]).unwrap()[0], Kept::Disk(_, 8, _)));
        let read = |step, key| vault.find(step, [key]).map(|kept| kept[0].read().unwrap());
        assert_eq!((read(3, &a), read(3, &b)), (Some(tensor(1.0)), Some(tensor(2.0))));
        vault.forget(3);
        assert_eq!((read(3, &a), read(4, &a)), (None, Some(tensor(3.0))));
    }

    /// `/dev/full` is a disk without room.
    #[test]
    #[cfg(target_os = "linux")]
    fn what_the_disk_cannot_take_stays_in_memory() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut spool = Spool { file: Some(Arc::new(full)), ..Spool::default() };
        let tensor = HostTensor::from_f32([1], &[7.0]).unwrap();
        let kept = [spool.keep(tensor.clone()), spool.keep(tensor.clone())];
        assert!(kept.iter().all(|kept| matches!(kept, Kept::Memory(t) if *t == tensor)));
    }
}
