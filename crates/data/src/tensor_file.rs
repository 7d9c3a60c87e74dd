//! Writing safetensors files tensor by tensor.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use fusionllm_graph::{HostTensor, TensorType};
use safetensors::tensor::{Metadata, TensorInfo};

use super::weights::stored_dtype;
use super::{DiskError, flush};

/// A safetensors file whose header is written.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    /// Type and offset of each tensor, by name.
    places: BTreeMap<String, (TensorType, u64)>,
}

impl TensorFile {
    /// Creates the file at its full size and writes the header.
    pub fn create(path: PathBuf, tensors: &[(String, TensorType)]) -> Result<Self, DiskError> {
        // Wide elements first, so that each tensor is aligned to its elements.
        let mut sorted: Vec<&(String, TensorType)> = tensors.iter().collect();
        sorted.sort_by_key(|(name, ty)| (std::cmp::Reverse(ty.dtype.size()), name));
        let mut end = 0;
        let infos = sorted.iter().map(|(name, ty)| {
            let start = end;
            end += ty.bytes();
            let info =
                TensorInfo { dtype: stored_dtype(ty.dtype), shape: ty.shape.clone(), data_offsets: (start, end) };
            (name.clone(), info)
        });
        // Hugging Face's libraries refuse a file that does not say this.
        let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let header = Metadata::new(Some(about), infos.collect()).map_err(io::Error::other);
        let written = header.and_then(|header| {
            let mut header = serde_json::to_vec(&header)?;
            header.resize(header.len().next_multiple_of(8), b' ');
            let mut file = File::create(&path)?;
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            file.set_len((8 + header.len() + end) as u64)?;
            Ok((file, 8 + header.len() as u64))
        });
        let (file, mut offset) = written.map_err(DiskError::at(&path, "written"))?;
        let mut places = BTreeMap::new();
        for (name, ty) in sorted {
            places.insert(name.clone(), (ty.clone(), offset));
            offset += ty.bytes() as u64;
        }
        Ok(Self { path, file, places })
    }

    /// The names of the announced tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.places.keys()
    }

    /// The announced type of a tensor.
    pub fn ty(&self, name: &str) -> Option<&TensorType> {
        self.places.get(name).map(|(ty, _)| ty)
    }

    /// Writes bytes of an announced tensor, from its byte `start` on; ignores any other.
    pub fn write(&mut self, name: &str, start: usize, bytes: &[u8]) -> Result<(), DiskError> {
        let Some((_, offset)) = self.places.get(name) else { return Ok(()) };
        let place = SeekFrom::Start(*offset + start as u64);
        let written = self.file.seek(place).and_then(|_| self.file.write_all(bytes));
        written.map_err(DiskError::at(&self.path, "written"))
    }

    /// Flushes the file to the disk.
    pub fn sync(&self) -> Result<(), DiskError> {
        flush(&self.file).map_err(DiskError::at(&self.path, "written"))
    }
}

/// Writes a safetensors file of these tensors, as PyTorch's libraries read them. A failure leaves no partial file.
pub fn write_tensors<S: AsRef<str> + Ord>(path: &Path, tensors: &BTreeMap<S, HostTensor>) -> Result<(), DiskError> {
    let types: Vec<_> = tensors.iter().map(|(name, t)| (name.as_ref().to_owned(), t.ty().clone())).collect();
    let mut contents = tensors.values().map(HostTensor::bytes);
    write_file(path, &types, |file| {
        types.iter().zip(contents.by_ref()).try_for_each(|((name, _), bytes)| file.write(name, 0, bytes))
    })
}

/// Writes a safetensors file of tensors that are read one by one, so that they need not be in memory together. A
/// failure leaves no partial file.
///
/// # Errors
///
/// The disk fails, or `read` does.
pub fn write_each<E: From<DiskError>>(
    path: &Path,
    tensors: &[(String, TensorType)],
    mut read: impl FnMut(&str, &TensorType) -> Result<HostTensor, E>,
) -> Result<(), E> {
    write_file(path, tensors, |file| {
        tensors.iter().try_for_each(|(name, ty)| Ok(file.write(name, 0, read(name, ty)?.bytes())?))
    })
}

/// Writes a safetensors file of these tensors, whose contents `fill` writes.
fn write_file<E: From<DiskError>>(
    path: &Path,
    tensors: &[(String, TensorType)],
    fill: impl FnOnce(&mut TensorFile) -> Result<(), E>,
) -> Result<(), E> {
    let partial = path.with_extension("safetensors.partial");
    let write = || {
        let mut file = TensorFile::create(partial.clone(), tensors)?;
        fill(&mut file)?;
        file.sync()?;
        Ok(fs::rename(&partial, path).map_err(DiskError::at(path, "written"))?)
    };
    write().inspect_err(|_| {
        // The partial file is removed to free its space. The first error is the one to report.
        let _ = fs::remove_file(&partial);
    })
}
