//! The container: a GGUF file of version 3, without knowledge of what it describes.
//!
//! All numbers are little-endian, a text is its length in bytes (`u64`) and its bytes in UTF-8:
//!
//! ```text
//! "GGUF"  version u32  tensors u64  items u64
//! items × { key text, type u32, value }        an array is { type u32, length u64, elements }
//! tensors × { name text, dimensions u32, sizes u64 ×, type u32, offset u64 }
//! zeros up to a multiple of 32
//! tensors × { elements, zeros up to a multiple of 32 }
//! ```
//!
//! Sizes stand innermost first, the other way round than in a [`TensorType`]. An offset counts from the first tensor's
//! elements.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use fusionllm_data::{DiskError, flush, sync_directory};
use fusionllm_graph::{DType, HostTensor, TensorType};

/// The version of the format.
const VERSION: u32 = 3;

/// Elements begin at multiples of this many bytes, which is the default of the format.
const ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Item {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Texts(Vec<String>),
}

/// The metadata of a file, by key.
pub(super) type Items = Vec<(String, Item)>;

/// The number by which the format names an element type; `None` if llama.cpp does not compute with it.
pub(super) fn type_number(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::BF16 => Some(30),
        DType::F64 | DType::I64 | DType::I32 | DType::Bool => None,
    }
}

/// Writes a file of these items and tensors. `read` gives a tensor by its place in the list, so that they need not be
/// in memory together. A failure leaves no partial file.
///
/// # Errors
///
/// The disk fails, or `read` does.
pub(super) fn write<E: From<DiskError>>(
    path: &Path,
    items: &[(String, Item)],
    tensors: &[(String, TensorType)],
    mut read: impl FnMut(usize) -> Result<HostTensor, E>,
) -> Result<(), E> {
    let partial = path.with_extension("gguf.partial");
    let failed = |e: io::Error| E::from(DiskError::at(path, "written")(e));
    let mut write = || {
        let mut file = BufWriter::new(File::create(&partial).map_err(failed)?);
        file.write_all(&header(items, tensors)).map_err(failed)?;
        for (place, (name, ty)) in tensors.iter().enumerate() {
            let tensor = read(place)?;
            if tensor.ty() != ty {
                return Err(failed(io::Error::other(format!("{name} is {}, not {ty}", tensor.ty()))));
            }
            file.write_all(tensor.bytes()).map_err(failed)?;
            pad(&mut file, tensor.bytes().len() as u64).map_err(failed)?;
        }
        let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
        flush(&file).map_err(failed)?;
        fs::rename(&partial, path).map_err(failed)?;
        Ok(sync_directory(path.parent().unwrap_or(Path::new(".")))?)
    };
    write().inspect_err(|_| {
        // The partial file is removed to free its space. The first error is the one to report.
        let _ = fs::remove_file(&partial);
    })
}

/// All that stands before the first tensor's elements.
fn header(items: &[(String, Item)], tensors: &[(String, TensorType)]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((items.len() as u64).to_le_bytes());
    for (key, item) in items {
        put_text(&mut bytes, key);
        item.put(&mut bytes);
    }
    let mut offset = 0;
    for (name, ty) in tensors {
        put_text(&mut bytes, name);
        bytes.extend((ty.shape.len() as u32).to_le_bytes());
        for size in ty.shape.iter().rev() {
            bytes.extend((*size as u64).to_le_bytes());
        }
        bytes.extend(type_number(ty.dtype).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(u64::to_le_bytes(offset));
        offset += (ty.bytes() as u64).next_multiple_of(ALIGNMENT);
    }
    let aligned = (bytes.len() as u64).next_multiple_of(ALIGNMENT);
    bytes.resize(aligned as usize, 0);
    bytes
}

/// Writes zeros after `length` bytes, up to the next multiple of the alignment.
fn pad(file: &mut impl Write, length: u64) -> io::Result<()> {
    let zeros = [0; ALIGNMENT as usize];
    file.write_all(&zeros[..(length.next_multiple_of(ALIGNMENT) - length) as usize])
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

impl Item {
    /// Appends the number of the type, and the value.
    fn put(&self, bytes: &mut Vec<u8>) {
        let [u32s, i32s, f32s, bools, texts, arrays] = [4u32, 5, 6, 7, 8, 9].map(u32::to_le_bytes);
        let array = |bytes: &mut Vec<u8>, of: [u8; 4], length: usize| {
            bytes.extend(arrays);
            bytes.extend(of);
            bytes.extend((length as u64).to_le_bytes());
        };
        match self {
            Self::U32(x) => bytes.extend(u32s.into_iter().chain(x.to_le_bytes())),
            Self::F32(x) => bytes.extend(f32s.into_iter().chain(x.to_le_bytes())),
            Self::Bool(x) => bytes.extend(bools.into_iter().chain([u8::from(*x)])),
            Self::Text(text) => {
                bytes.extend(texts);
                put_text(bytes, text);
            }
            Self::I32s(list) => {
                array(bytes, i32s, list.len());
                bytes.extend(list.iter().flat_map(|x| x.to_le_bytes()));
            }
            Self::F32s(list) => {
                array(bytes, f32s, list.len());
                bytes.extend(list.iter().flat_map(|x| x.to_le_bytes()));
            }
            Self::Texts(list) => {
                array(bytes, texts, list.len());
                list.iter().for_each(|text| put_text(bytes, text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(items: &[(String, Item)], tensors: &[HostTensor]) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let types: Vec<_> = (0..).zip(tensors).map(|(i, t)| (format!("t{i}"), t.ty().clone())).collect();
        write::<DiskError>(&path, items, &types, |place| Ok(tensors[place].clone())).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::read(path).unwrap()
    }

    /// The bytes are written out by hand after the description of the format.
    #[test]
    fn a_file_has_the_bytes_of_the_format() {
        let numbers = HostTensor::from_f32([1, 3], &[1.0, 2.0, 3.0]).unwrap();
        let half = HostTensor::from_f32([2], &[1.0, -2.0]).unwrap().cast(DType::F16).unwrap();
        let items = [("a".to_owned(), Item::U32(7)), ("b".to_owned(), Item::Texts(vec!["x".into(), "é".into()]))];
        let mut expected = b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
        expected.extend(b"\x01\0\0\0\0\0\0\0a\x04\0\0\0\x07\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0b\x09\0\0\0\x08\0\0\0\x02\0\0\0\0\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0x\x02\0\0\0\0\0\0\0\xc3\xa9");
        // The first tensor has 12 bytes, so the second one begins at 32.
        expected.extend(b"\x02\0\0\0\0\0\0\0t0\x02\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        expected.extend(b"\x02\0\0\0\0\0\0\0t1\x01\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\x20\0\0\0\0\0\0\0");
        expected.resize(expected.len().next_multiple_of(32), 0);
        expected.extend(b"\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40");
        expected.extend([0; 20]);
        expected.extend(b"\0\x3c\0\xc0");
        expected.extend([0; 28]);
        assert_eq!(written(&items, &[numbers, half]), expected);
    }

    #[test]
    fn each_kind_of_item_has_its_number() {
        let cases = [
            (Item::F32(1.0), b"\x06\0\0\0\0\0\x80\x3f".to_vec()),
            (Item::Bool(true), b"\x07\0\0\0\x01".to_vec()),
            (Item::Text("ab".into()), b"\x08\0\0\0\x02\0\0\0\0\0\0\0ab".to_vec()),
            (Item::I32s(vec![-1]), b"\x09\0\0\0\x05\0\0\0\x01\0\0\0\0\0\0\0\xff\xff\xff\xff".to_vec()),
            (Item::F32s(vec![]), b"\x09\0\0\0\x06\0\0\0\0\0\0\0\0\0\0\0".to_vec()),
        ];
        for (item, expected) in cases {
            let mut bytes = Vec::new();
            item.put(&mut bytes);
            assert_eq!(bytes, expected, "{item:?}");
        }
    }

    #[test]
    fn a_failure_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let tensors = [("t".to_owned(), TensorType::new(DType::F32, [2]))];
        let other = HostTensor::from_f32([3], &[0.0; 3]).unwrap();
        let error = write::<DiskError>(&path, &[], &tensors, |_| Ok(other.clone())).unwrap_err();
        assert_eq!(error.source.to_string(), "t is f32[3], not f32[2]");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
