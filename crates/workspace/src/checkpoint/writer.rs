//! Writing a checkpoint from tensors that arrive in any order.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use fusionllm_data::{DiskError, TensorFile, flush, sync_directory};
use fusionllm_graph::units::counted;
use fusionllm_graph::{HostTensor, TensorType};

use super::{CheckpointError, FORMAT, MANIFEST, Manifest, Part, State, VERSION, begin_digest, remove};

/// A checkpoint that is being written. If it is dropped before [`Self::commit`], it removes its files.
///
/// Each piece of a tensor goes to its final place in its file at once, so memory holds one piece at a time.
#[derive(Debug)]
pub struct CheckpointWriter {
    /// The final directory.
    target: PathBuf,
    /// The temporary directory; `None` after the commit.
    partial: Option<PathBuf>,
    files: [TensorFile; 2],
    step: u64,
    /// By file: the tensors of which a part is written.
    open: [BTreeMap<String, OpenTensor>; 2],
    /// Digests of the tensors and files written so far.
    model: BTreeMap<String, String>,
    optimizer: BTreeMap<String, String>,
    extra: BTreeMap<String, String>,
}

/// A tensor of which a part is written.
#[derive(Debug)]
struct OpenTensor {
    /// Bytes.
    written: usize,
    hasher: blake3::Hasher,
}

impl CheckpointWriter {
    pub(super) fn begin(
        directory: &Path,
        step: u64,
        model: &[(String, TensorType)],
        optimizer: &[(String, TensorType)],
    ) -> Result<Self, CheckpointError> {
        for tensors in [model, optimizer] {
            let mut names = BTreeSet::new();
            if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(name)) {
                let message = format!("two tensors have the name `{name}`");
                return Err(CheckpointError::Unexpected { step, message });
            }
        }
        let target = directory.join(format!("step-{step}"));
        let partial = directory.join(format!("step-{step}.partial"));
        remove(&partial)?;
        fs::create_dir_all(&partial).map_err(DiskError::at(&partial, "created"))?;
        let create = |part: Part, tensors| {
            TensorFile::create(partial.join(part.file_name()), tensors).map_err(CheckpointError::from)
        };
        let files = create(Part::Model, model).and_then(|m| Ok([m, create(Part::Optimizer, optimizer)?]));
        let files = files.inspect_err(|_| {
            let _ = remove(&partial);
        })?;
        let (open, model, optimizer, extra) = Default::default();
        Ok(Self { target, partial: Some(partial), files, step, open, model, optimizer, extra })
    }

    fn digests(&mut self, part: Part) -> &mut BTreeMap<String, String> {
        match part {
            Part::Model => &mut self.model,
            Part::Optimizer => &mut self.optimizer,
        }
    }

    /// Writes a tensor that was announced.
    ///
    /// # Errors
    ///
    /// The tensor was not announced, differs from its announcement, or was written before. Or the disk fails.
    pub fn put(&mut self, part: Part, name: &str, tensor: &HostTensor) -> Result<(), CheckpointError> {
        self.put_piece(part, name, tensor.ty(), 0, tensor.bytes())
    }

    /// Writes a piece of a tensor that was announced. The pieces of a tensor come in their order, and the first one may
    /// be all of it. `start` is the place of the piece's first byte.
    ///
    /// # Errors
    ///
    /// The tensor was not announced, or differs from its announcement. The piece does not follow the one before. Or the
    /// disk fails.
    pub fn put_piece(
        &mut self,
        part: Part,
        name: &str,
        ty: &TensorType,
        start: usize,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let came = self.digests(part).contains_key(name);
        let open = self.open[part as usize].remove(name);
        let written = open.as_ref().map_or(0, |open| open.written);
        let fault = match self.files[part as usize].ty(name) {
            None => Some(format!("nobody asked for `{name}`")),
            Some(announced) if announced != ty => Some(format!("`{name}` came as {ty}, not {announced}")),
            Some(_) if came => Some(format!("`{name}` came twice")),
            Some(_) if start != written || bytes.len() > ty.bytes() - written => {
                Some(format!("bytes {start} to {} of `{name}` came after {written}", start.saturating_add(bytes.len())))
            }
            Some(_) => None,
        };
        if let Some(message) = fault {
            return Err(self.unexpected(message));
        }
        self.files[part as usize].write(name, start, bytes)?;
        let mut open = open.unwrap_or_else(|| OpenTensor { written: 0, hasher: begin_digest(ty) });
        open.hasher.update(bytes);
        open.written += bytes.len();
        if open.written < ty.bytes() {
            self.open[part as usize].insert(name.to_owned(), open);
        } else {
            self.digests(part).insert(name.to_owned(), open.hasher.finalize().to_hex().to_string());
        }
        Ok(())
    }

    /// Adds a file. `name` has no directory, and is not the name of one of the checkpoint's own files.
    ///
    /// # Errors
    ///
    /// The name is taken or has a directory, or the disk fails.
    pub fn put_extra(&mut self, name: &str, content: &[u8]) -> Result<(), CheckpointError> {
        let own = Part::ALL.map(Part::file_name);
        let plain = Path::new(name).file_name().is_some_and(|n| n == name);
        if !plain || name == MANIFEST || own.contains(&name) || self.extra.contains_key(name) {
            return Err(self.unexpected(format!("no file can be added as {name:?}")));
        }
        let path = self.partial()?.join(name);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(content)?;
            flush(&file)
        });
        written.map_err(DiskError::at(&path, "written"))?;
        self.extra.insert(name.to_owned(), blake3::hash(content).to_hex().to_string());
        Ok(())
    }

    /// Finishes the checkpoint and returns its directory. A checkpoint of the same step is replaced.
    ///
    /// # Errors
    ///
    /// A tensor is missing, or the disk fails. Then there is no such checkpoint.
    pub fn commit(mut self, state: State) -> Result<PathBuf, CheckpointError> {
        if state.step != self.step {
            return Err(self.unexpected(format!("its state is that of step {}", state.step)));
        }
        for (file, digests) in self.files.iter().zip([&self.model, &self.optimizer]) {
            if let Some(name) = file.names().find(|name| !digests.contains_key(*name)) {
                let missing = file.names().count() - digests.len();
                return Err(
                    self.unexpected(format!("{} did not come, the first is `{name}`", counted(missing, "tensor")))
                );
            }
        }
        for file in &self.files {
            file.sync()?;
        }
        let partial = self.partial()?.to_owned();
        let manifest = Manifest {
            format: FORMAT.into(),
            version: VERSION,
            state,
            model: std::mem::take(&mut self.model),
            optimizer: std::mem::take(&mut self.optimizer),
            extra: std::mem::take(&mut self.extra),
        };
        let path = partial.join(MANIFEST);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(&serde_json::to_vec_pretty(&manifest)?)?;
            flush(&file)
        });
        written.map_err(DiskError::at(&path, "written"))?;
        sync_directory(&partial)?;

        let old = self.target.with_extension("old");
        remove(&old)?;
        if self.target.join(MANIFEST).exists() {
            fs::rename(&self.target, &old).map_err(DiskError::at(&self.target, "replaced"))?;
        } else {
            remove(&self.target)?;
        }
        fs::rename(&partial, &self.target).map_err(DiskError::at(&self.target, "written"))?;
        self.partial = None;
        sync_directory(self.target.parent().unwrap_or(Path::new(".")))?;
        remove(&old)?;
        Ok(self.target.clone())
    }

    fn partial(&self) -> Result<&Path, CheckpointError> {
        self.partial.as_deref().ok_or_else(|| self.unexpected("it is committed".into()))
    }

    fn unexpected(&self, message: String) -> CheckpointError {
        CheckpointError::Unexpected { step: self.step, message }
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if let Some(partial) = self.partial.take() {
            // An error cannot be reported here. The next process cleans up.
            let _ = remove(&partial);
        }
    }
}
