//! The user's own samples: rows of named tensors in safetensors files, read when they are drawn.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use fusionllm_graph::{HostTensor, TensorType};

use super::order::Order;
use super::{Batch, DataError, Validation};
use crate::weights::Weights;

/// Files with the same tensors. All tensors of a file have one row per sample.
pub(super) struct Tensors {
    layout: Layout,
    train: Vec<Sample>,
    held_out: Vec<Sample>,
    files: Vec<Weights>,
    order: Order,
    digest: String,
}

/// The layout that all files share.
#[derive(Default)]
struct Layout {
    /// Names and types of one row.
    rows: Vec<(String, TensorType)>,
    /// Tensors without dimensions. Each is one number for all samples.
    numbers: Vec<(String, HostTensor)>,
}

/// A row of a file.
#[derive(Clone, Copy)]
struct Sample {
    file: usize,
    row: usize,
}

const HINT: &str = "every file has the same tensors: one for each of the model's inputs, with a row a sample, or a \
                    single number that is the same in all files";

impl Tensors {
    pub(super) fn open(tensors: &super::Tensors, seed: u64) -> Result<Self, DataError> {
        let mut hasher = blake3::Hasher::new();
        let mut files = Vec::new();
        let mut layout = Layout::default();
        let mut train = load(&tensors.files, &mut files, &mut layout, &mut hasher)?;
        let held_out = match &tensors.validation {
            Validation::Files(paths) => load(paths, &mut files, &mut layout, &mut hasher)?,
            Validation::Fraction(fraction) => {
                // Whole groups are held out.
                let groups = (train.len() as f64 * fraction) as usize / tensors.group.max(1);
                train.split_off(train.len() - groups * tensors.group.max(1))
            }
        };
        if train.is_empty() {
            return Err(DataError::TooLittle {
                message: "there are no samples to train on".into(),
                hint: "name safetensors files with at least one row in data.files",
            });
        }
        // A group must not begin in one file and end in the next.
        for (i, file) in files.iter().enumerate() {
            let rows = train.iter().chain(&held_out).filter(|sample| sample.file == i).count();
            super::check_groups(format_args!("{}", file.path().display()), rows, tensors.group)?;
        }
        let order = Order::new(seed, train.len(), tensors.group, tensors.shuffle);
        Ok(Self { layout, train, held_out, files, order, digest: hasher.finalize().to_hex().to_string() })
    }

    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    pub(super) fn train_samples(&self) -> usize {
        self.train.len()
    }

    pub(super) fn eval_samples(&self) -> usize {
        self.held_out.len()
    }

    pub(super) fn inputs(&self, samples: usize) -> Vec<(Cow<'static, str>, TensorType)> {
        let typed = |(name, row): &(String, TensorType)| (Cow::Owned(name.clone()), of_rows(row, samples));
        let numbers = self.layout.numbers.iter().map(|(name, number)| (Cow::Owned(name.clone()), number.ty().clone()));
        self.layout.rows.iter().map(typed).chain(numbers).collect()
    }

    pub(super) fn train_batch(&self, first: u64, samples: usize) -> Result<Batch, DataError> {
        let drawn = (first..first + samples as u64).map(|consumed| self.train[self.order.at(consumed).1]);
        self.batch(&drawn.collect::<Vec<_>>(), |_| true)
    }

    pub(super) fn held_out(&self, samples: &[usize], wanted: impl Fn(&str) -> bool) -> Result<Batch, DataError> {
        let rows = samples.iter().filter_map(|sample| self.held_out.get(*sample).copied());
        self.batch(&rows.collect::<Vec<_>>(), wanted)
    }

    pub(super) fn train_origin(&self, consumed: u64) -> String {
        self.origin(self.train[self.order.at(consumed).1])
    }

    pub(super) fn eval_origin(&self, index: usize) -> String {
        self.held_out.get(index).map_or_else(String::new, |s| self.origin(*s))
    }

    fn origin(&self, sample: Sample) -> String {
        format!("{}, row {}", self.files[sample.file].path().display(), sample.row)
    }

    /// The rows of these samples, in the tensors that are `wanted`.
    fn batch(&self, samples: &[Sample], wanted: impl Fn(&str) -> bool) -> Result<Batch, DataError> {
        let numbers = self.layout.numbers.iter().map(|(name, number)| (Cow::Owned(name.clone()), number.clone()));
        let mut tensors: Vec<_> = numbers.collect();
        for (name, row) in self.layout.rows.iter().filter(|(name, _)| wanted(name)) {
            let mut bytes = Vec::with_capacity(row.bytes() * samples.len());
            // Rows that follow each other are read at once.
            for rows in samples.chunk_by(|a, b| (a.file, a.row + 1) == (b.file, b.row)) {
                let first = rows[0];
                self.files[first.file].append(name, first.row * row.bytes(), rows.len() * row.bytes(), &mut bytes)?;
            }
            let tensor = HostTensor::from_bytes(of_rows(row, samples.len()), bytes)?;
            tensors.push((Cow::Owned(name.clone()), tensor));
        }
        Ok(Batch { tensors })
    }
}

impl fmt::Display for Tensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.layout.rows.iter().map(|(name, _)| name.as_str());
        let names: Vec<&str> = rows.chain(self.layout.numbers.iter().map(|(name, _)| name.as_str())).collect();
        write!(
            f,
            "tensors {}: {} samples to train on, {} held out",
            names.join(", "),
            self.train.len(),
            self.held_out.len()
        )
    }
}

fn of_rows(row: &TensorType, samples: usize) -> TensorType {
    let mut shape = vec![samples];
    shape.extend(&row.shape);
    TensorType::new(row.dtype, shape)
}

/// Reads the headers of `paths`, and returns their samples. The first file decides which tensors all files have.
fn load(
    paths: &[PathBuf],
    files: &mut Vec<Weights>,
    layout: &mut Layout,
    hasher: &mut blake3::Hasher,
) -> Result<Vec<Sample>, DataError> {
    let mut samples = Vec::new();
    for path in paths {
        let malformed = |message: String| DataError::Malformed { path: path.clone(), message, hint: HINT };
        let file = Weights::open(path)?;
        if let Some((name, dtype)) = file.unread_types().next() {
            return Err(DataError::Malformed {
                path: path.clone(),
                message: format!("`{name}` has elements of the type {dtype:?}, which is not read"),
                hint: "convert it before it is saved: tensor.long() for whole numbers, tensor.float() for others",
            });
        }
        let mut count = None;
        let mut own = Layout::default();
        for (name, ty) in file.tensor_types() {
            let Some((n, row)) = ty.shape.split_first() else {
                let number = file.read(name)?.ok_or_else(|| malformed(format!("`{name}` cannot be read")))?;
                own.numbers.push((name.to_owned(), number));
                continue;
            };
            if *count.get_or_insert(*n) != *n {
                return Err(malformed(format!("`{name}` has {n} rows, another tensor {}", count.unwrap_or(0))));
            }
            own.rows.push((name.to_owned(), TensorType::new(ty.dtype, row)));
        }
        if files.is_empty() {
            *layout = own;
        } else if layout.rows != own.rows {
            return Err(malformed("its tensors are not those of the first file".into()));
        } else if layout.numbers != own.numbers {
            return Err(malformed("its single numbers are not those of the first file".into()));
        }
        samples.extend((0..count.unwrap_or(0)).map(|row| Sample { file: files.len(), row }));
        files.push(file);
        digest(path, hasher)?;
    }
    Ok(samples)
}

/// Adds the content of a file in parts.
fn digest(path: &PathBuf, hasher: &mut blake3::Hasher) -> Result<(), DataError> {
    let unreadable = |source| DataError::Unreadable { path: path.clone(), source };
    let mut file = File::open(path).map_err(unreadable)?;
    hasher.update(&file.metadata().map_err(unreadable)?.len().to_le_bytes());
    let mut part = vec![0; 1 << 20];
    loop {
        match file.read(&mut part).map_err(unreadable)? {
            0 => return Ok(()),
            n => hasher.update(&part[..n]),
        };
    }
}
