//! Reading safetensors files tensor by tensor: one file, or the shards of a Hugging Face folder.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use fusionllm_graph::{Advice, DType, HostTensor, TensorType};
use safetensors::tensor::{Dtype, Metadata};

use crate::{DiskError, FileKind, Role};

/// Open safetensors files. Their headers are read and fit their lengths. Tensors are read on demand.
#[derive(Debug)]
pub struct Weights {
    /// The file, the index or the folder that was opened.
    path: PathBuf,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// The index of its file.
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// The offset in bytes from the start of the file.
    offset: u64,
}

/// The reason why weights cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file cannot be read.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The file is not a safetensors file, or it is incomplete.
    #[error("{}: {message}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// A description of the error.
        message: String,
    },
    /// The file is of another kind.
    #[error("{}: this is {}, not {}", path.display(), kind.name, Role::Tensors)]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: FileKind,
    },
    /// Files that are needed are not there.
    #[error("{}: {message}", path.display())]
    Absent {
        /// The folder or the file.
        path: PathBuf,
        /// A description of the files that are missing.
        message: String,
        /// Advice to the user.
        hint: String,
    },
    /// The weights are those of another model.
    #[error("{}: {message}", path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The tensor that does not fit.
        message: String,
        /// Advice to the user.
        hint: Cow<'static, str>,
    },
}

impl Advice for WeightsError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Disk(e) => e.hint(),
            Self::Malformed { .. } => Some("fetch the file again, or name another".into()),
            Self::OtherKind { path, kind } => Some(kind.hint(Role::Tensors, path).into()),
            Self::Absent { hint, .. } => Some(hint.as_str().into()),
            Self::OtherModel { hint, .. } => Some(hint.as_ref().into()),
        }
    }
}

/// The limit on the header that the format defines, in bytes.
const MAX_HEADER: u64 = 100_000_000;

/// The weights of a Hugging Face folder in one file.
const ONE_FILE: &str = "model.safetensors";

/// The list of the shards of a Hugging Face folder.
const INDEX: &str = "model.safetensors.index.json";

/// The names of a Hugging Face folder's weights in other formats than safetensors.
const PICKLED: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// `model.safetensors.index.json`.
#[derive(serde::Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Opens a safetensors file, the index of several, or a Hugging Face folder with one or the other, and reads the
    /// headers.
    ///
    /// # Errors
    ///
    /// A file is not there, cannot be read, is cut short, or is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let within = if path.is_dir() { Self::in_folder(path)? } else { path.to_owned() };
        let mut weights = Self { path: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        match within.extension().is_some_and(|e| e == "json") {
            true => weights.add_shards(&within)?,
            false => {
                weights.tensors = header(&within, 0)?;
                weights.files.push(within);
            }
        }
        Ok(weights)
    }

    /// The file or the index of a folder.
    fn in_folder(folder: &Path) -> Result<PathBuf, WeightsError> {
        if let Some(there) = [ONE_FILE, INDEX].map(|name| folder.join(name)).into_iter().find(|path| path.is_file()) {
            return Ok(there);
        }
        let hint = match PICKLED.iter().any(|name| folder.join(name).is_file()) {
            true => format!(
                "the weights there are pickled, and reading them could run a program: convert them with python3 -c \
                 \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{0}').save_pretrained('{0}')\"",
                folder.display()
            ),
            false => "fetch the model with its weights in safetensors files".to_owned(),
        };
        let message = format!("it holds neither {ONE_FILE} nor {INDEX}");
        Err(WeightsError::Absent { path: folder.to_owned(), message, hint })
    }

    fn add_shards(&mut self, index: &Path) -> Result<(), WeightsError> {
        let malformed = |message: String| WeightsError::Malformed { path: index.to_owned(), message };
        let text = std::fs::read(index).map_err(DiskError::at(index, "read"))?;
        let Index { weight_map } = serde_json::from_slice(&text)
            .map_err(|e| malformed(format!("this is not an index of safetensors files: {e}")))?;
        let folder = index.parent().unwrap_or(Path::new(""));
        let mut shards: BTreeMap<&str, BTreeMap<String, Entry>> = BTreeMap::new();
        // In the order of their names, which have numbers.
        for name in weight_map.values().collect::<BTreeSet<_>>() {
            // The index comes from a stranger.
            if Path::new(name).file_name() != Some(name.as_ref()) {
                return Err(malformed(format!("it names {name:?}, which is no file beside it")));
            }
            let path = folder.join(name);
            if !path.is_file() {
                let message = format!("it is not there, but {} names it", index.display());
                let hint = format!("fetch {name} into the folder");
                return Err(WeightsError::Absent { path, message, hint });
            }
            shards.insert(name, header(&path, self.files.len())?);
            self.files.push(path);
        }
        for (tensor, name) in &weight_map {
            let entry = shards.get_mut(name.as_str()).and_then(|shard| shard.remove(tensor));
            let entry = entry.ok_or_else(|| malformed(format!("`{tensor}` is not in {name}, where it should be")))?;
            self.tensors.insert(tensor.clone(), entry);
        }
        Ok(())
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The index of the file that holds a tensor.
    pub fn file_of(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|entry| entry.file)
    }

    /// The file, the index or the folder that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names and types of all tensors, sorted by name. Tensors of unsupported element types are left out.
    pub fn tensor_types(&self) -> impl Iterator<Item = (&str, TensorType)> {
        self.tensors.iter().filter_map(|(name, entry)| Some((name.as_str(), entry.ty()?)))
    }

    /// The type of the tensor stored as `name`. `None` if it is missing or of an unsupported element type.
    pub fn type_of(&self, name: &str) -> Option<TensorType> {
        self.tensors.get(name)?.ty()
    }

    /// The tensors of unsupported element types, with these.
    pub(crate) fn unread_types(&self) -> impl Iterator<Item = (&str, Dtype)> {
        let unread = self.tensors.iter().filter(|(_, entry)| entry.ty().is_none());
        unread.map(|(name, entry)| (name.as_str(), entry.dtype))
    }

    /// The names of all tensors, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The element type and the shape of the tensor stored as `name`.
    pub(crate) fn stored_type(&self, name: &str) -> Option<(Dtype, &[usize])> {
        self.tensors.get(name).map(|entry| (entry.dtype, &entry.shape[..]))
    }

    /// Reads the tensor stored as `name`. `None` if it is missing or its element type is not supported.
    ///
    /// # Errors
    ///
    /// The file can no longer be read.
    pub fn read(&self, name: &str) -> Result<Option<HostTensor>, WeightsError> {
        let Some(entry) = self.tensors.get(name) else { return Ok(None) };
        let Some(ty) = entry.ty() else { return Ok(None) };
        let mut bytes = vec![0; ty.bytes()];
        let path = &self.files[entry.file];
        let mut read = || {
            let mut file = File::open(path)?;
            file.seek(SeekFrom::Start(entry.offset))?;
            file.read_exact(&mut bytes)
        };
        read().map_err(DiskError::at(path, "read"))?;
        let malformed = |e: fusionllm_graph::GraphError| WeightsError::Malformed {
            path: path.clone(),
            message: format!("`{name}`: {e}"),
        };
        HostTensor::from_bytes(ty, bytes).map(Some).map_err(malformed)
    }

    /// Appends `length` bytes of the tensor stored as `name` to `bytes`, from its byte `start` on.
    ///
    /// # Errors
    ///
    /// There is no such tensor, or the file can no longer be read.
    pub fn append(&self, name: &str, start: usize, length: usize, bytes: &mut Vec<u8>) -> Result<(), WeightsError> {
        let entry = self.tensors.get(name).ok_or_else(|| WeightsError::Malformed {
            path: self.path.clone(),
            message: format!("`{name}` is not there"),
        })?;
        let path = &self.files[entry.file];
        let before = bytes.len();
        bytes.resize(before + length, 0);
        let mut read = || {
            let mut file = File::open(path)?;
            file.seek(SeekFrom::Start(entry.offset + start as u64))?;
            file.read_exact(&mut bytes[before..])
        };
        Ok(read().map_err(DiskError::at(path, "read"))?)
    }
}

/// Reads the header of a safetensors file, which becomes file number `file`.
fn header(path: &Path, file: usize) -> Result<BTreeMap<String, Entry>, WeightsError> {
    let malformed = |message: String| WeightsError::Malformed { path: path.to_owned(), message };
    let mut reader = File::open(path).map_err(DiskError::at(path, "read"))?;
    let length = reader.metadata().map_err(DiskError::at(path, "read"))?.len();
    if let Some(kind) = FileKind::at(path, Role::Tensors) {
        return Err(WeightsError::OtherKind { path: path.to_owned(), kind });
    }
    let mut size = [0; 8];
    if length < 8 {
        return Err(malformed(format!("{length} bytes are too few for a safetensors file")));
    }
    reader.read_exact(&mut size).map_err(DiskError::at(path, "read"))?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER.min(length - 8) {
        return Err(malformed("this is not a safetensors file, or it is cut short within its header".into()));
    }
    let mut header = vec![0; size as usize];
    reader.read_exact(&mut header).map_err(DiskError::at(path, "read"))?;
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|e| malformed(format!("this is not a safetensors file: its header is wrong: {e}")))?;
    // No file is longer than the largest number.
    let expected = (8 + size).saturating_add(header.data_len() as u64);
    if length != expected {
        let how = if length < expected { "the file is cut short" } else { "the file is too long" };
        return Err(malformed(format!("{how}: {length} bytes, but its header describes {expected}")));
    }
    let tensors = header.tensors().into_iter().map(|(name, info)| {
        let offset = 8 + size + info.data_offsets.0 as u64;
        (name, Entry { file, dtype: info.dtype, shape: info.shape.clone(), offset })
    });
    Ok(tensors.collect())
}

impl Entry {
    fn ty(&self) -> Option<TensorType> {
        let dtype = match self.dtype {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            Dtype::I64 => DType::I64,
            Dtype::I32 => DType::I32,
            Dtype::BOOL => DType::Bool,
            _ => return None,
        };
        Some(TensorType::new(dtype, self.shape.clone()))
    }
}

/// The format's name of an element type.
pub fn stored_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::Bool => Dtype::BOOL,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use insta::assert_snapshot;
    use safetensors::tensor::TensorView;

    use super::*;

    /// Two floats, twice: the second time in half precision without the prefix. And a tensor of an unsupported type.
    fn file(dir: &tempfile::TempDir) -> PathBuf {
        let full: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let half = [0x00, 0x3e, 0x00, 0xc0];
        let views = [
            ("transformer.a", TensorView::new(Dtype::F32, vec![2], &full).unwrap()),
            ("b", TensorView::new(Dtype::F16, vec![1, 2], &half).unwrap()),
            ("mask", TensorView::new(Dtype::U8, vec![2], &half[..2]).unwrap()),
        ];
        let path = dir.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &path).unwrap();
        path
    }

    #[test]
    fn tensors_are_read_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let weights = Weights::open(&file(&dir)).unwrap();
        let found: Vec<String> = weights.tensor_types().map(|(name, ty)| format!("{name} {ty}")).collect();
        assert_eq!(found, ["b f16[1, 2]", "transformer.a f32[2]"]);
        assert_eq!(weights.read("transformer.a").unwrap().unwrap().to_f64(), [1.5, -2.0]);
        assert_eq!(weights.read("mask").unwrap(), None);
    }

    #[test]
    fn errors_in_weights() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir);
        let hide = |e: WeightsError| e.report().replace(&dir.path().display().to_string(), "DIR");

        let whole = fs::read(&path).unwrap();
        let reopened = |content: &[u8]| {
            fs::write(&path, content).unwrap();
            hide(Weights::open(&path).unwrap_err())
        };
        assert_snapshot!(reopened(&whole[..whole.len() - 1]), @r"
        DIR/model.safetensors: the file is cut short: 205 bytes, but its header describes 206
        hint: fetch the file again, or name another
        ");
        assert_snapshot!(reopened(&[&whole[..], b"x"].concat()), @r"
        DIR/model.safetensors: the file is too long: 207 bytes, but its header describes 206
        hint: fetch the file again, or name another
        ");
        assert_snapshot!(reopened(&whole[..20]), @r"
        DIR/model.safetensors: this is not a safetensors file, or it is cut short within its header
        hint: fetch the file again, or name another
        ");
        assert_snapshot!(reopened(b"GIF89a"), @r"
        DIR/model.safetensors: this is a GIF picture, not a safetensors file
        hint: name a safetensors file
        ");
        assert_snapshot!(reopened(b"\x02\0\0\0\0\0\0\0[]"), @r"
        DIR/model.safetensors: this is not a safetensors file: its header is wrong: invalid type: sequence, expected struct HashMetadata at line 1 column 0
        hint: fetch the file again, or name another
        ");
        fs::remove_file(&path).unwrap();
        assert_snapshot!(hide(Weights::open(&path).unwrap_err()), @r"
        DIR/model.safetensors: cannot be read
        caused by: No such file or directory (os error 2)
        hint: check the path
        ");
    }

    #[test]
    fn shards_are_one_set_of_weights() {
        let dir = tempfile::tempdir().unwrap();
        let number = |x: f32| x.to_le_bytes();
        for (name, tensor, x) in [("m-1.safetensors", "a", 1.0), ("m-2.safetensors", "b", 2.0)] {
            let bytes = number(x);
            let views = [(tensor, TensorView::new(Dtype::F32, vec![1], &bytes).unwrap())];
            safetensors::serialize_to_file(views, None, &dir.path().join(name)).unwrap();
        }
        let index = |map: &str| fs::write(dir.path().join(INDEX), format!("{{\"weight_map\": {map}}}")).unwrap();
        let hide = |e: WeightsError| e.report().replace(&dir.path().display().to_string(), "DIR");
        let refused = |map: &str| {
            index(map);
            hide(Weights::open(dir.path()).unwrap_err())
        };
        index(r#"{"a": "m-1.safetensors", "b": "m-2.safetensors"}"#);
        for path in [dir.path().to_owned(), dir.path().join(INDEX)] {
            let weights = Weights::open(&path).unwrap();
            assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b"]);
            assert_eq!(weights.read("b").unwrap().unwrap().to_f64(), [2.0]);
            let mut bytes = Vec::new();
            weights.append("b", 0, 4, &mut bytes).unwrap();
            assert_eq!(bytes, number(2.0));
            assert_eq!([weights.file_of("a"), weights.file_of("b"), weights.file_of("c")], [Some(0), Some(1), None]);
        }
        assert_snapshot!(refused(r#"{"a": "m-3.safetensors"}"#), @r"
        DIR/m-3.safetensors: it is not there, but DIR/model.safetensors.index.json names it
        hint: fetch m-3.safetensors into the folder
        ");
        assert_snapshot!(refused(r#"{"a": "../m-1.safetensors"}"#), @r#"
        DIR/model.safetensors.index.json: it names "../m-1.safetensors", which is no file beside it
        hint: fetch the file again, or name another
        "#);
        assert_snapshot!(refused(r#"{"b": "m-1.safetensors"}"#), @r"
        DIR/model.safetensors.index.json: `b` is not in m-1.safetensors, where it should be
        hint: fetch the file again, or name another
        ");
        assert_snapshot!(refused("[]"), @r"
        DIR/model.safetensors.index.json: this is not an index of safetensors files: invalid type: sequence, expected a map at line 1 column 15
        hint: fetch the file again, or name another
        ");
        fs::remove_file(dir.path().join(INDEX)).unwrap();
        assert_snapshot!(hide(Weights::open(dir.path()).unwrap_err()), @r"
        DIR: it holds neither model.safetensors nor model.safetensors.index.json
        hint: fetch the model with its weights in safetensors files
        ");
        fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
        assert_snapshot!(hide(Weights::open(dir.path()).unwrap_err()), @r#"
        DIR: it holds neither model.safetensors nor model.safetensors.index.json
        hint: the weights there are pickled, and reading them could run a program: convert them with python3 -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('DIR').save_pretrained('DIR')"
        "#);
    }

    proptest::proptest! {
        /// A damaged file is refused, or its tensors can be read. It never panics.
        #[test]
        fn damaged_files_never_panic(at in 0usize..206, byte: u8, cut in proptest::option::weighted(0.2, 0usize..220)) {
            let dir = tempfile::tempdir().unwrap();
            let path = file(&dir);
            let mut content = fs::read(&path).unwrap();
            content[at] = byte;
            content.resize(cut.unwrap_or(content.len()), 0);
            fs::write(&path, &content).unwrap();
            if let Ok(weights) = Weights::open(&path) {
                for (name, ty) in weights.tensor_types() {
                    let tensor = weights.read(name).unwrap().unwrap();
                    proptest::prop_assert_eq!(tensor.ty(), &ty);
                }
            }
        }
    }
}
