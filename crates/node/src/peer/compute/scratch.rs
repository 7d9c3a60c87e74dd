//! The file that tensors are offloaded to. It has no name, so nothing is left of it when the process ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusionllm_exec::{ExecError, Storage, Stored};
use fusionllm_graph::{HostTensor, TensorType};

use crate::machine::disk::{directory, read_at, write_at};

/// A file that is a medium for tensors.
#[derive(Debug)]
pub(crate) struct Scratch(Arc<ScratchFile>);

#[derive(Debug)]
struct ScratchFile {
    file: File,
    regions: Mutex<Regions>,
}

/// The regions of the file that are used.
#[derive(Debug, Default)]
struct Regions {
    end: u64,
    /// Starts of regions that nothing uses any more, by length. A model has few lengths, and uses them again and again.
    free: BTreeMap<u64, Vec<u64>>,
}

impl Scratch {
    /// An empty file.
    ///
    /// # Errors
    ///
    /// The directory for such files cannot be written to.
    pub(crate) fn new() -> Result<Self, ExecError> {
        let file = tempfile::tempfile_in(directory()).map_err(no_room)?;
        Ok(Self(Arc::new(ScratchFile { file, regions: Mutex::default() })))
    }
}

fn no_room(e: io::Error) -> ExecError {
    let directory = directory();
    ExecError::State(format!(
        "tensors cannot be offloaded to {}: {e}; free some space, or set TMPDIR to a directory with more",
        directory.display()
    ))
}

impl ScratchFile {
    fn regions(&self) -> MutexGuard<'_, Regions> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage for Scratch {
    fn store(&self, tensor: HostTensor) -> Result<Arc<dyn Stored>, ExecError> {
        let length = tensor.bytes().len() as u64;
        let offset = {
            let mut regions = self.0.regions();
            regions.free.get_mut(&length).and_then(Vec::pop).unwrap_or_else(|| {
                let end = regions.end;
                regions.end += length;
                end
            })
        };
        // The region is given back even if writing fails, because dropping it does that.
        let region = Region { file: self.0.clone(), offset, ty: tensor.ty().clone() };
        write_at(&self.0.file, tensor.bytes(), offset).map_err(no_room)?;
        Ok(Arc::new(region))
    }
}

/// A tensor in the file.
#[derive(Debug)]
struct Region {
    file: Arc<ScratchFile>,
    offset: u64,
    ty: TensorType,
}

impl Stored for Region {
    fn ty(&self) -> &TensorType {
        &self.ty
    }

    fn load(&self) -> Result<HostTensor, ExecError> {
        let bytes = read_at(&self.file.file, self.ty.bytes(), self.offset);
        let bytes = bytes.map_err(|e| ExecError::State(format!("an offloaded tensor cannot be read back: {e}")))?;
        Ok(HostTensor::from_bytes(self.ty.clone(), bytes)?)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.file.regions().free.entry(self.ty.bytes() as u64).or_default().push(self.offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(x: f32) -> HostTensor {
        HostTensor::from_f32([2], &[x, -x]).unwrap()
    }

    #[test]
    fn tensors_come_back_and_their_places_are_used_again() {
        let scratch = Scratch::new().unwrap();
        let first = scratch.store(tensor(1.0)).unwrap();
        let second = scratch.store(tensor(2.0)).unwrap();
        assert_eq!((first.load().unwrap(), second.load().unwrap()), (tensor(1.0), tensor(2.0)));
        drop(first);
        let third = scratch.store(tensor(3.0)).unwrap();
        assert_eq!((second.load().unwrap(), third.load().unwrap()), (tensor(2.0), tensor(3.0)));
        assert_eq!(scratch.0.regions().end, 16);
    }

    /// `/dev/full` is a disk without room.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_one_clear_error() {
        let file = File::options().write(true).open("/dev/full").unwrap();
        let scratch = Scratch(Arc::new(ScratchFile { file, regions: Mutex::default() }));
        let error = scratch.store(tensor(1.0)).err().unwrap().to_string();
        assert!(error.contains("tensors cannot be offloaded to") && error.contains("TMPDIR"), "{error}");
    }
}
