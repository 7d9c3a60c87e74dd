//! Reading safetensors files tensor by tensor.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use fusionllm_graph::{Advice, DType, HostTensor, TensorType};
use safetensors::tensor::{Dtype, Metadata};

use crate::DiskError;

/// An open safetensors file. Its header is read and fits its length. Tensors are read on demand.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
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
            Self::OtherModel { hint, .. } => Some(hint.as_ref().into()),
        }
    }
}

/// The limit on the header that the format defines, in bytes.
const MAX_HEADER: u64 = 100_000_000;

impl Weights {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is cut short, or is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let malformed = |message: String| WeightsError::Malformed { path: path.to_owned(), message };
        let mut file = File::open(path).map_err(DiskError::at(path, "read"))?;
        let length = file.metadata().map_err(DiskError::at(path, "read"))?.len();
        let mut size = [0; 8];
        if length < 8 {
            return Err(malformed(format!("{length} bytes are too few for a safetensors file")));
        }
        file.read_exact(&mut size).map_err(DiskError::at(path, "read"))?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER.min(length - 8) {
            return Err(malformed("this is not a safetensors file, or it is cut short within its header".into()));
        }
        let mut header = vec![0; size as usize];
        file.read_exact(&mut header).map_err(DiskError::at(path, "read"))?;
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
            (name, Entry { dtype: info.dtype, shape: info.shape.clone(), offset })
        });
        Ok(Self { path: path.to_owned(), tensors: tensors.collect() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names and types of all tensors, sorted by name. Tensors of unsupported element types are left out.
    pub fn tensor_types(&self) -> impl Iterator<Item = (&str, TensorType)> {
        self.tensors.iter().filter_map(|(name, entry)| Some((name.as_str(), entry.ty()?)))
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
        let mut read = || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(entry.offset))?;
            file.read_exact(&mut bytes)
        };
        read().map_err(DiskError::at(&self.path, "read"))?;
        let malformed = |e: fusionllm_graph::GraphError| WeightsError::Malformed {
            path: self.path.clone(),
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
        let before = bytes.len();
        bytes.resize(before + length, 0);
        let mut read = || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(entry.offset + start as u64))?;
            file.read_exact(&mut bytes[before..])
        };
        Ok(read().map_err(DiskError::at(&self.path, "read"))?)
    }
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
        DIR/model.safetensors: 6 bytes are too few for a safetensors file
        hint: fetch the file again, or name another
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
