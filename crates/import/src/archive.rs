//! The archive: a zip file with a graph as JSON and tensors as raw bytes.
//!
//! The file is not trusted. Sizes are checked against the size of the file before memory is allocated. Nothing in it is
//! executed or unpickled.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read, Seek, Write};
use std::path::Path;

use crate::error::{ImportError, StateError};
use crate::schema::{ExportedProgram, Payload, PayloadConfig, Size, TensorMeta};
use crate::zip::Zip;
use fusionllm_graph::{DType, HostTensor, StateTensor, TensorType};

/// The largest JSON member. Graphs of models with thousands of layers are smaller.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// The largest member whose size has a place in the records of a zip file that are always there.
const MAX_SMALL_MEMBER: usize = u32::MAX as usize - 1;

/// A file or another source of bytes.
trait Source: Read + Seek + Send {}

impl<T: Read + Seek + Send> Source for T {}

/// An open `.pt2` file. Its graph is read; its tensors are read on demand.
pub struct Archive {
    pub(crate) name: String,
    zip: Zip<Box<dyn Source>>,
    /// Bytes of tensors read so far. They are bounded, because overlapping members could make a small file look huge.
    read: u64,
    pub(crate) program: ExportedProgram,
    pub(crate) weights: BTreeMap<String, StoredTensor>,
    pub(crate) constants: BTreeMap<String, StoredTensor>,
    /// The content that replaces that of the `state_dict`.
    state: Option<Box<dyn State>>,
}

/// Another source of the tensors of a `state_dict`, such as a file of weights.
pub trait State: Send {
    /// The content of a tensor, in its type. `None` leaves it that of the archive.
    fn tensor(&self, tensor: &StateTensor) -> Result<Option<HostTensor>, StateError>;
}

impl std::fmt::Debug for Archive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Archive({})", self.name)
    }
}

/// A tensor in the archive.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StoredTensor {
    /// The member with the bytes.
    pub(crate) member: String,
    dtype: i64,
    pub(crate) shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
    pub(crate) requires_grad: bool,
}

impl Archive {
    /// Opens a file and reads its graph.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is not an archive of `torch.export.save`, is damaged, or has pickled tensors.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let unreadable = |source| ImportError::Unreadable { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        if !file.metadata().map_err(unreadable)?.is_file() {
            return Err(unreadable(std::io::Error::other("it is not a file")));
        }
        Self::from_reader(&path.display().to_string(), BufReader::new(file))
    }

    /// Reads an archive from any source. `name` is its name in messages.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::open`].
    pub fn from_reader(name: &str, source: impl Read + Seek + Send + 'static) -> Result<Self, ImportError> {
        let whole = |reason: String| ImportError::Damaged {
            archive: name.into(),
            member: "the file as a whole".into(),
            reason,
        };
        let source: Box<dyn Source> = Box::new(source);
        let mut zip = Zip::open(source).map_err(|e| whole(format!("this is not a .pt2 archive: {e}")))?;
        let names: BTreeSet<String> = zip.names().map(str::to_owned).collect();
        // All members are in one directory. It has the name that the file had when it was first written.
        let root = names
            .iter()
            .filter_map(|n| n.strip_suffix("archive_format"))
            .find(|root| root.is_empty() || root.ends_with('/'))
            .ok_or_else(|| whole("this is not a .pt2 archive: it has no member archive_format".into()))?
            .to_owned();
        let byteorder = format!("{root}byteorder");
        if names.contains(&byteorder) && member(name, &mut zip, &byteorder, 16)? != b"little" {
            return Err(whole("its numbers are big-endian; save the model on a little-endian machine".into()));
        }
        let models: Vec<&str> = names
            .iter()
            .filter_map(|n| n.strip_prefix(&root)?.strip_prefix("models/")?.strip_suffix(".json"))
            .collect();
        let model = match models[..] {
            [model] => model.to_owned(),
            [] => return Err(whole("it has no model".into())),
            _ => {
                return Err(whole(format!(
                    "it has {} models, {}; save each in a file of its own",
                    models.len(),
                    models.join(", ")
                )));
            }
        };
        let json = member(name, &mut zip, &format!("{root}models/{model}.json"), MAX_JSON_BYTES)?;
        let program: ExportedProgram = parse(name, &format!("models/{model}.json"), &json)?;
        drop(json);
        if program.schema_version.major != 8 {
            return Err(whole(format!(
                "its schema has version {}, but this program reads version 8 (PyTorch 2.9 to 2.15)",
                program.schema_version.major
            )));
        }
        let mut payloads = |directory: &str, kind: &str| -> Result<BTreeMap<String, StoredTensor>, ImportError> {
            let file = format!("{root}data/{directory}/{model}_{kind}_config.json");
            if !names.contains(&file) {
                return Ok(BTreeMap::new());
            }
            let json = member(name, &mut zip, &file, MAX_JSON_BYTES)?;
            let config: PayloadConfig = parse(name, &file, &json)?;
            let directory = format!("{root}data/{directory}/");
            let stored = |payload: Payload| StoredTensor::new(&directory, payload);
            let unsupported = |payload: &Payload| element_type(payload.tensor_meta.as_ref()?.dtype).err();
            let tensors =
                config.config.into_iter().map(|(key, payload)| match (unsupported(&payload), stored(payload)) {
                    (Some(reason), _) => Err(ImportError::ElementType { archive: name.into(), tensor: key, reason }),
                    (None, Ok(stored)) => Ok((key, stored)),
                    (None, Err(reason)) => Err(ImportError::Damaged {
                        archive: name.into(),
                        member: file.clone(),
                        reason: format!("`{key}`: {reason}"),
                    }),
                });
            tensors.collect()
        };
        let weights = payloads("weights", "weights")?;
        let constants = payloads("constants", "constants")?;
        Ok(Self { name: name.into(), zip, read: 0, program, weights, constants, state: None })
    }

    /// The version of PyTorch that wrote the archive, if the archive says.
    pub fn torch_version(&self) -> Option<&str> {
        self.program.torch_version.as_deref()
    }

    /// Whether `run_decompositions()` rewrote the graph before it was saved. Such a graph has lost `detach` and
    /// `no_grad`.
    pub fn is_decomposed(&self) -> bool {
        let verifiers = &self.program.verifiers;
        !verifiers.is_empty() && verifiers.iter().all(|dialect| dialect != "TRAINING")
    }

    /// The warning that the user should read about an archive that can be imported.
    pub fn warning(&self) -> Option<String> {
        self.is_decomposed().then(|| {
            format!(
                "{}: it was saved after run_decompositions(), which drops `detach` and `no_grad`; if the model uses \
                 them, its gradients are wrong. Save what torch.export.export returns, without run_decompositions()",
                self.name
            )
        })
    }

    /// The first two numbers of [`Self::torch_version`].
    pub(crate) fn torch_release(&self) -> Option<(u32, u32)> {
        let mut numbers = self.torch_version()?.split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// The tensors of the module's `state_dict`, each once.
    ///
    /// # Errors
    ///
    /// The archive is damaged: a tensor cannot have the size that the file says.
    pub fn state_dict(&self) -> Result<Vec<StateTensor>, ImportError> {
        let mut names: BTreeMap<&StoredTensor, Vec<String>> = BTreeMap::new();
        for (name, stored) in &self.weights {
            names.entry(stored).or_default().push(name.clone());
        }
        names.into_iter().map(|(stored, names)| self.state_tensor(stored, names)).collect()
    }

    fn state_tensor(&self, stored: &StoredTensor, names: Vec<String>) -> Result<StateTensor, ImportError> {
        let ty = stored.ty().map_err(|reason| self.damaged(&stored.member, reason))?;
        Ok(StateTensor { names, ty, trained: stored.requires_grad })
    }

    /// Takes the tensors of the module's `state_dict` from `state`, as `load_state_dict` does.
    pub fn replace_state(&mut self, state: impl State + 'static) {
        self.state = Some(Box::new(state));
    }

    /// The content of a tensor that [`Self::replace_state`] replaced.
    fn replaced(&self, stored: &StoredTensor) -> Result<Option<HostTensor>, ImportError> {
        let Some(state) = &self.state else { return Ok(None) };
        let names = self.weights.iter().filter(|(_, same)| *same == stored).map(|(name, _)| name.clone()).collect();
        let tensor = state.tensor(&self.state_tensor(stored, names)?);
        tensor.map_err(ImportError::State)
    }

    /// The names of all tensors in the module's `state_dict`.
    pub fn state_dict_names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// A tensor of the module's `state_dict`, as it was saved.
    ///
    /// # Errors
    ///
    /// There is no tensor of this name, or the file is damaged or can no longer be read.
    pub fn state_dict_tensor(&mut self, name: &str) -> Result<HostTensor, ImportError> {
        match self.weights.get(name).cloned() {
            Some(stored) => self.tensor(&stored),
            None => Err(ImportError::Model {
                archive: self.name.clone(),
                reason: format!("its state_dict has no tensor {name:?}"),
            }),
        }
    }

    /// Reads a tensor. Integers of 8 and 16 bits are widened to `i32`.
    pub(crate) fn tensor(&mut self, stored: &StoredTensor) -> Result<HostTensor, ImportError> {
        if let Some(tensor) = self.replaced(stored)? {
            return Ok(tensor);
        }
        if !self.zip.has(&stored.member) {
            let names = self.weights.iter().filter(|(_, same)| *same == stored);
            let name = names.map(|(name, _)| name.as_str()).next().unwrap_or(&stored.member).to_owned();
            return Err(ImportError::Absent { archive: self.name.clone(), tensor: name });
        }
        let bytes = member(&self.name, &mut self.zip, &stored.member, u64::MAX)?;
        self.read = self.read.saturating_add(bytes.len() as u64);
        if self.read > self.zip.length().max(1 << 20).saturating_mul(4) {
            return Err(self.damaged(&stored.member, "the archive's members overlap".into()));
        }
        stored.tensor(bytes).map_err(|reason| self.damaged(&stored.member, reason))
    }

    /// Writes the archive without the content of these tensors of the `state_dict`, which another file has.
    ///
    /// # Errors
    ///
    /// The archive is damaged, or the result cannot be written.
    pub(crate) fn write_without(
        &mut self,
        absent: impl Fn(&str) -> bool,
        to: impl Write + Seek,
    ) -> Result<(), ImportError> {
        let of_state: BTreeSet<&str> = self.weights.values().map(|stored| stored.member.as_str()).collect();
        let present = self.weights.iter().filter(|(name, _)| !absent(name)).map(|(_, stored)| stored);
        let needed: BTreeSet<&str> = present.chain(self.constants.values()).map(|s| s.member.as_str()).collect();
        let stays = |name: &&str| !of_state.contains(name) || needed.contains(name);
        let names: Vec<String> = self.zip.names().filter(stays).map(str::to_owned).collect();
        let unwritten = |e: std::io::Error| ImportError::State(e.into());
        let mut writer = ::zip::ZipWriter::new(to);
        for name in names {
            let bytes = member(&self.name, &mut self.zip, &name, u64::MAX)?;
            let options = ::zip::write::SimpleFileOptions::default()
                .compression_method(::zip::CompressionMethod::Stored)
                .large_file(bytes.len() > MAX_SMALL_MEMBER);
            writer.start_file(name, options).map_err(|e| unwritten(e.into()))?;
            writer.write_all(&bytes).map_err(unwritten)?;
        }
        writer.finish().map_err(|e| unwritten(e.into()))?;
        Ok(())
    }

    /// The bytes of tensors that were read so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Stops counting the bytes that were read after [`Self::bytes_read`] was `bytes`, because they are read again.
    pub(crate) fn forget_reads_after(&mut self, bytes: u64) {
        self.read = bytes;
    }

    pub(crate) fn damaged(&self, member: &str, reason: String) -> ImportError {
        ImportError::Damaged { archive: self.name.clone(), member: member.into(), reason }
    }
}

/// The bytes of a member.
fn member(archive: &str, zip: &mut Zip<Box<dyn Source>>, name: &str, limit: u64) -> Result<Vec<u8>, ImportError> {
    zip.read(name, limit).map_err(|reason| ImportError::Damaged {
        archive: archive.into(),
        member: name.into(),
        reason,
    })
}

fn parse<T: serde::de::DeserializeOwned>(archive: &str, member: &str, json: &[u8]) -> Result<T, ImportError> {
    serde_json::from_slice(json).map_err(|e| ImportError::Damaged {
        archive: archive.into(),
        member: member.into(),
        reason: e.to_string(),
    })
}

/// The element type of a `ScalarType` number of the schema. Integers of 8 and 16 bits become `i32`.
pub(crate) fn element_type(code: i64) -> Result<DType, String> {
    Ok(match code {
        1..=4 => DType::I32,
        5 => DType::I64,
        6 => DType::F16,
        7 => DType::F32,
        8 => DType::F64,
        12 => DType::Bool,
        13 => DType::BF16,
        9..=11 => return Err("complex numbers are not supported".into()),
        _ => return Err(format!("element type {code} is not supported")),
    })
}

/// The size of one stored element in bytes.
fn stored_size(code: i64) -> usize {
    match code {
        1 | 2 | 12 => 1,
        3 | 6 | 13 => 2,
        4 | 7 => 4,
        _ => 8,
    }
}

pub(crate) fn plain_size(size: &Size) -> Result<usize, String> {
    match size {
        Size::AsInt(n) => usize::try_from(*n).map_err(|_| format!("{n} is not a size")),
        Size::AsExpr(e) => Err(format!("the size {} is unknown", e.expr_str)),
    }
}

/// The strides of a row-major tensor.
pub(crate) fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
    }
    strides
}

impl StoredTensor {
    fn new(directory: &str, payload: Payload) -> Result<Self, String> {
        if payload.use_pickle {
            return Err("it is pickled, and reading it could run any program; save plain tensors".into());
        }
        let meta: TensorMeta = payload.tensor_meta.ok_or("it has no type")?;
        element_type(meta.dtype)?;
        let sizes = |sizes: &[Size]| sizes.iter().map(plain_size).collect::<Result<Vec<_>, _>>();
        let shape = sizes(&meta.sizes)?;
        let strides = if meta.strides.is_empty() { row_major(&shape) } else { sizes(&meta.strides)? };
        if strides.len() != shape.len() {
            return Err(format!("it has {} sizes, but {} strides", shape.len(), strides.len()));
        }
        let offset = meta.storage_offset.as_ref().map(plain_size).transpose()?.unwrap_or(0);
        Ok(Self {
            member: format!("{directory}{}", payload.path_name),
            dtype: meta.dtype,
            shape,
            strides,
            offset,
            requires_grad: meta.requires_grad,
        })
    }

    /// The type of the tensor when it is read.
    pub(crate) fn ty(&self) -> Result<TensorType, String> {
        let ty = TensorType::new(element_type(self.dtype)?, self.shape.clone());
        ty.check()?;
        Ok(ty)
    }

    /// The tensor, from the bytes of its storage.
    fn tensor(&self, storage: Vec<u8>) -> Result<HostTensor, String> {
        let ty = self.ty()?;
        let (size, count) = (stored_size(self.dtype), ty.numel());
        let row_major = self.strides.iter().zip(row_major(&self.shape)).zip(&self.shape);
        let contiguous = row_major.into_iter().all(|((a, b), n)| *a == b || *n <= 1);
        let too_small = || format!("{} bytes are too few for {ty}", storage.len());
        let bytes = if contiguous {
            let first = self.offset.checked_mul(size).ok_or_else(too_small)?;
            let end = count.checked_mul(size).and_then(|n| n.checked_add(first)).ok_or_else(too_small)?;
            match storage.get(first..end) {
                None => return Err(too_small()),
                Some(_) if first == 0 && end == storage.len() => storage,
                Some(part) => part.to_vec(),
            }
        } else {
            // Strides may repeat elements, and so describe a huge tensor. Refuse more elements than are stored.
            let length = count.checked_mul(size).filter(|n| *n <= storage.len()).ok_or_else(too_small)?;
            let mut bytes = Vec::with_capacity(length);
            let mut index = vec![0usize; self.shape.len()];
            for _ in 0..count {
                let at = index
                    .iter()
                    .zip(&self.strides)
                    .try_fold(self.offset, |at, (i, stride)| i.checked_mul(*stride).and_then(|n| n.checked_add(at)));
                let at = at.and_then(|at| at.checked_mul(size)).ok_or_else(too_small)?;
                bytes.extend(at.checked_add(size).and_then(|end| storage.get(at..end)).ok_or_else(too_small)?);
                for d in (0..index.len()).rev() {
                    index[d] += 1;
                    if index[d] < self.shape[d] {
                        break;
                    }
                    index[d] = 0;
                }
            }
            bytes
        };
        let widened = |f: fn(&[u8]) -> i32| bytes.chunks_exact(size).flat_map(|c| f(c).to_le_bytes()).collect();
        let bytes: Vec<u8> = match self.dtype {
            1 => widened(|c| c[0].into()),
            2 => widened(|c| (c[0] as i8).into()),
            3 => widened(|c| i16::from_le_bytes([c[0], c[1]]).into()),
            12 => bytes.iter().map(|b| (*b != 0) as u8).collect(),
            _ => bytes,
        };
        HostTensor::from_bytes(ty, bytes).map_err(|e| e.to_string())
    }
}
