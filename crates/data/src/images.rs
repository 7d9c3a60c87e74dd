//! Reads CIFAR-10's binary files.
//!
//! Each record has 3,073 bytes: the label, then 1,024 bytes of red, of green and of blue, row by row
//! (<https://www.cs.toronto.edu/~kriz/cifar.html>).

use std::fmt;
use std::path::PathBuf;

use fusionllm_graph::{CounterRng, HostTensor};

use super::order::Order;
use super::{Batch, Cifar10, DataError};

/// CIFAR-10's classes.
pub const CLASSES: usize = 10;
/// Height and width of an image.
pub const SIDE: usize = 32;

const PLANE: usize = SIDE * SIDE;
const RECORD: usize = 1 + 3 * PLANE;

/// Mean and standard deviation of the 50,000 training images' red, green and blue, as fractions of 255.
const MEAN: [f32; 3] = [0.4914, 0.4822, 0.4465];
const STD: [f32; 3] = [0.2470, 0.2435, 0.2616];

/// The most pixels that an augmented image moves, in each direction.
const SHIFT: usize = 4;

/// Training images and held-out images, as stored.
pub(super) struct Images {
    train: Vec<u8>,
    test: Vec<u8>,
    order: Order,
    augment: Option<CounterRng>,
    digest: String,
}

/// The augmentation of an image.
#[derive(Clone, Copy)]
struct View {
    mirrored: bool,
    /// The corner of the window in the image with [`SHIFT`] black pixels around it.
    top: usize,
    left: usize,
}

const UNCHANGED: View = View { mirrored: false, top: SHIFT, left: SHIFT };

impl Images {
    pub(super) fn open(cifar10: &Cifar10, seed: u64) -> Result<Self, DataError> {
        let mut hasher = blake3::Hasher::new();
        let train = load(&cifar10.train, &mut hasher)?;
        let test = load(&cifar10.test, &mut hasher)?;
        let group = cifar10.group;
        super::check_groups(format_args!("data.train"), train.len() / RECORD, group)?;
        super::check_groups(format_args!("data.test"), test.len() / RECORD, group)?;
        let order = Order::new(seed, train.len() / RECORD, group, cifar10.shuffle);
        let augment = cifar10.augment.then(|| CounterRng::for_name(seed, "data.augment"));
        Ok(Self { train, test, order, augment, digest: hasher.finalize().to_hex().to_string() })
    }

    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    pub(super) fn train_samples(&self) -> usize {
        self.train.len() / RECORD
    }

    pub(super) fn eval_samples(&self) -> usize {
        self.test.len() / RECORD
    }

    pub(super) fn train_batch(&self, first: u64, samples: usize) -> Result<Batch, DataError> {
        let mut rows = Rows::new(samples);
        for consumed in first..first + samples as u64 {
            let (_, sample) = self.order.at(consumed);
            let view = self.augment.map_or(UNCHANGED, |rng| View::random(rng.block(consumed, 0)));
            rows.push(&self.train[sample * RECORD..][..RECORD], view);
        }
        rows.into_batch()
    }

    pub(super) fn held_out(&self, samples: &[usize]) -> Result<Batch, DataError> {
        let mut rows = Rows::new(samples.len());
        for sample in samples.iter().filter(|sample| **sample < self.eval_samples()) {
            rows.push(&self.test[sample * RECORD..][..RECORD], UNCHANGED);
        }
        rows.into_batch()
    }
}

impl fmt::Display for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (train, test) = (self.train_samples(), self.eval_samples());
        write!(f, "CIFAR-10: {train} images to train on, {test} held out")
    }
}

impl View {
    fn random(bits: [u32; 4]) -> Self {
        let up_to = |bits: u32, n: usize| bits as usize % (n + 1);
        Self { mirrored: bits[0] & 1 == 1, top: up_to(bits[1], 2 * SHIFT), left: up_to(bits[2], 2 * SHIFT) }
    }

    /// The stored pixel at (`y`, `x`) of the view; `None` for black.
    fn source(self, y: usize, x: usize) -> Option<usize> {
        let x = if self.mirrored { SIDE - 1 - x } else { x };
        let inside = |at: usize| at.checked_sub(SHIFT).filter(|&at| at < SIDE);
        Some(inside(y + self.top)? * SIDE + inside(x + self.left)?)
    }
}

/// Reads and checks all records of `paths`.
fn load(paths: &[PathBuf], hasher: &mut blake3::Hasher) -> Result<Vec<u8>, DataError> {
    let mut records = Vec::new();
    for path in paths {
        let bytes = super::read(path)?;
        let malformed = |message, hint| DataError::Malformed { path: path.clone(), message, hint };
        if bytes.len() % RECORD != 0 {
            return Err(malformed(
                format!(
                    "{} bytes are {} images of {RECORD} bytes and {} bytes more",
                    bytes.len(),
                    bytes.len() / RECORD,
                    bytes.len() % RECORD
                ),
                "the file is cut short, or not of CIFAR-10's binary version: fetch it again",
            ));
        }
        let wrong = bytes.chunks_exact(RECORD).position(|r| usize::from(r[0]) >= CLASSES);
        if let Some(image) = wrong {
            return Err(malformed(
                format!("image {image} has label {}, but labels are 0 to 9", bytes[image * RECORD]),
                "the file is not of CIFAR-10's binary version",
            ));
        }
        records.extend(bytes);
    }
    hasher.update(&(records.len() as u64).to_le_bytes());
    hasher.update(&records);
    Ok(records)
}

/// A batch under construction.
struct Rows {
    /// The normalised value of each byte, for each colour.
    values: [[f32; 256]; 3],
    pixels: Vec<f32>,
    labels: Vec<i64>,
}

impl Rows {
    fn new(samples: usize) -> Self {
        let value = |c: usize, byte: usize| (byte as f32 / 255.0 - MEAN[c]) / STD[c];
        let values = std::array::from_fn(|c| std::array::from_fn(|byte| value(c, byte)));
        let (pixels, labels) = (Vec::with_capacity(samples * 3 * PLANE), Vec::with_capacity(samples));
        Self { values, pixels, labels }
    }

    fn push(&mut self, record: &[u8], view: View) {
        self.labels.push(i64::from(record[0]));
        for (plane, values) in record[1..].chunks_exact(PLANE).zip(&self.values) {
            for y in 0..SIDE {
                for x in 0..SIDE {
                    let byte = view.source(y, x).map_or(0, |i| plane[i]);
                    self.pixels.push(values[usize::from(byte)]);
                }
            }
        }
    }

    fn into_batch(self) -> Result<Batch, DataError> {
        let samples = self.labels.len();
        let pixels = HostTensor::from_f32([samples, 3, SIDE, SIDE], &self.pixels)?;
        let labels = HostTensor::from_i64([samples], &self.labels)?;
        Ok(Batch { tensors: vec![("pixel_values".into(), pixels), ("labels".into(), labels)] })
    }
}
