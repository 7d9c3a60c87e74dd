//! The codecs, their names and the sizes they produce.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::block::Bits;
use crate::element::Element;
use crate::index::Indices;
use crate::wire::{HEADER_BYTES, exact_bytes};
use crate::{block, nvfp4, rotate};

/// The encoding of tensors on a link. The factors are those of tensors of f32. For tensors of bf16 they are half as
/// large, so bf16 is no codec for these.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Codec {
    /// No codec: the exact numbers.
    #[default]
    None,
    /// bfloat16, rounded to nearest: 2 times smaller.
    Bf16,
    /// Integers in blocks that share a scale: about 4 times (8 bits) or 7 times (4 bits) smaller.
    Int(IntBlocks),
    /// NVIDIA's 4-bit floats: 7 times smaller. Blocks of 16 E2M1 numbers share an E4M3 scale; the tensor has one f32
    /// scale.
    Nvfp4,
    /// Only the entries of largest magnitude. The receiver gets zeros for the rest.
    TopK(TopK),
}

/// Integers in blocks of 32 that share a scale. The scale is the block's largest magnitude over the largest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntBlocks {
    /// Bits per element.
    pub bits: Bits,
    /// Whether a Hadamard rotation with random signs comes first. It spreads outliers over 64 elements.
    #[serde(default)]
    pub rotate: bool,
    /// Whether codes are rounded up or down at random, so that their mean is exact. Otherwise they are rounded to the
    /// nearest.
    #[serde(default)]
    pub stochastic: bool,
}

/// Keeps the entries of largest magnitude. Of equal entries the first ones are kept.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TopK {
    /// Bytes of the tensor over bytes on the wire, including the indices. It is at least 1.
    pub ratio: f64,
    /// The format of the kept values.
    #[serde(default)]
    pub values: ValueFormat,
}

/// The format of the values that top-k keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValueFormat {
    /// The exact numbers.
    F32,
    /// bfloat16, rounded to nearest.
    Bf16,
    /// 8-bit integers in blocks of 32 that share a scale. At the same ratio this keeps more than twice as many entries
    /// as f32.
    #[default]
    Int8,
}

impl Codec {
    /// The codec with this name in job files. Only `topk` uses `ratio`.
    pub fn from_name(name: &str, ratio: f64) -> Option<Self> {
        let int = |bits, rotate| Self::Int(IntBlocks { bits, rotate, stochastic: false });
        Some(match name {
            "none" => Self::None,
            "bf16" => Self::Bf16,
            "int8" => int(Bits::Eight, false),
            "int4" => int(Bits::Four, false),
            "int4-hadamard" => int(Bits::Four, true),
            "nvfp4" => Self::Nvfp4,
            "topk" => Self::TopK(TopK { ratio, values: ValueFormat::default() }),
            _ => return None,
        })
    }

    /// The name in job files and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Bf16 => "bf16",
            Self::Int(IntBlocks { bits: Bits::Eight, rotate: false, .. }) => "int8",
            Self::Int(IntBlocks { bits: Bits::Eight, rotate: true, .. }) => "int8-hadamard",
            Self::Int(IntBlocks { bits: Bits::Four, rotate: false, .. }) => "int4",
            Self::Int(IntBlocks { bits: Bits::Four, rotate: true, .. }) => "int4-hadamard",
            Self::Nvfp4 => "nvfp4",
            Self::TopK(_) => "topk",
        }
    }

    /// The next less lossy codec. Top-k first halves its ratio, down to 10. Then follow 4-bit and 8-bit integers, bf16,
    /// and none.
    pub fn less_lossy(self) -> Self {
        match self {
            Self::TopK(top) if top.ratio > 10.0 => Self::TopK(TopK { ratio: (top.ratio / 2.0).max(10.0), ..top }),
            Self::TopK(_) => Self::Int(IntBlocks { bits: Bits::Four, rotate: true, stochastic: false }),
            Self::Int(form @ IntBlocks { bits: Bits::Four, .. }) => {
                Self::Int(IntBlocks { bits: Bits::Eight, rotate: false, ..form })
            }
            Self::Nvfp4 => Self::Int(IntBlocks { bits: Bits::Eight, rotate: false, stochastic: false }),
            Self::Int(IntBlocks { bits: Bits::Eight, .. }) => Self::Bf16,
            Self::Bf16 | Self::None => Self::None,
        }
    }

    /// The same codec with or without stochastic rounding. Codecs that have no such mode stay as they are.
    pub fn with_stochastic_rounding(self, stochastic: bool) -> Self {
        match self {
            Self::Int(form) => Self::Int(IntBlocks { stochastic, ..form }),
            other => other,
        }
    }

    /// The encoded size of `n` elements in bytes. It is never more than [`exact_bytes`], because larger forms are not
    /// used.
    pub fn bytes(&self, n: usize, element: Element) -> usize {
        self.coded_bytes(n, element).min(exact_bytes(n, element))
    }

    /// Bytes of `n` elements over their encoded size.
    pub fn ratio(&self, n: usize, element: Element) -> f64 {
        if n == 0 { 1.0 } else { (element.bytes() * n) as f64 / self.bytes(n, element) as f64 }
    }

    /// The size of the codec's own form in bytes, even if it is larger than the exact form.
    pub(crate) fn coded_bytes(&self, n: usize, element: Element) -> usize {
        let body = match self {
            Self::None => element.bytes() * n,
            Self::Bf16 => 2 * n,
            Self::Int(form) => form.body_bytes(n),
            Self::Nvfp4 => nvfp4::body_bytes(n),
            Self::TopK(top) => {
                let Kept { values, count } = top.kept(n, element);
                top_bytes(n, count, values)
            }
        };
        HEADER_BYTES + body
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopK(top) => write!(f, "{} {}x", self.name(), (10.0 * top.ratio).round() / 10.0),
            other => f.write_str(other.name()),
        }
    }
}

impl IntBlocks {
    pub(crate) fn body_bytes(&self, n: usize) -> usize {
        let (seed, codes) = if self.rotate { (4, rotate::padded(n)) } else { (0, n) };
        seed + block::bytes(self.bits, codes)
    }
}

impl TopK {
    /// The number of entries kept of `n`: as many as fit `ratio`, but at least one.
    pub fn kept_entries(&self, n: usize, element: Element) -> usize {
        self.kept(n, element).count
    }

    /// Bytes per kept entry on the wire, over the bytes of the entry itself, when `n` elements are encoded.
    ///
    /// This is the factor c of AdaTopK: the ratio of entries is c times the ratio of bytes. The published system uses
    /// c = 3, for indices of 8 bytes and values of 4 bytes.
    pub fn entry_overhead(&self, n: usize, element: Element) -> f64 {
        let Kept { values, count } = self.kept(n, element);
        (HEADER_BYTES + top_bytes(n, count, values)) as f64 / (element.bytes() * count.max(1)) as f64
    }

    /// The number of entries kept of `n`, and their format. If all entries fit the ratio, wider formats are tried, up
    /// to that of the elements: they lose less at the same ratio.
    pub(crate) fn kept(&self, n: usize, element: Element) -> Kept {
        use ValueFormat::{Bf16, F32, Int8};
        let budget = exact_bytes(n, element) as f64 / self.ratio.max(1.0);
        let widths: &[ValueFormat] = match (element, self.values) {
            (Element::F32, Int8) => &[Int8, Bf16, F32],
            (Element::F32, Bf16) => &[Bf16, F32],
            (Element::F32, F32) => &[F32],
            (Element::Bf16, Int8) => &[Int8, Bf16],
            (Element::Bf16, Bf16 | F32) => &[Bf16],
        };
        let mut kept = Kept { values: self.values, count: 0 };
        for &values in widths {
            let count = largest_fitting(n, |k| (HEADER_BYTES + top_bytes(n, k, values)) as f64 <= budget);
            kept = Kept { values, count };
            if count < n {
                break;
            }
        }
        kept
    }
}

/// The entries that top-k keeps of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub(crate) values: ValueFormat,
    pub(crate) count: usize,
}

/// The largest number up to `n` that fits, but at least 1. Binary search works because encoded sizes grow with `k`.
fn largest_fitting(n: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (1.min(n), n);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// The size of the body in bytes when `k` of `n` entries are kept.
pub(crate) fn top_bytes(n: usize, k: usize, values: ValueFormat) -> usize {
    4 + Indices::new(n, k).bytes() + values.bytes(k)
}

impl ValueFormat {
    /// The format with this number on the wire.
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::Int8].into_iter().find(|v| *v as u8 == byte)
    }

    pub(crate) fn bytes(self, k: usize) -> usize {
        match self {
            Self::F32 => 4 * k,
            Self::Bf16 => 2 * k,
            Self::Int8 => block::bytes(Bits::Eight, k),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_parsed() {
        for name in ["none", "bf16", "int8", "int4", "int4-hadamard", "nvfp4", "topk"] {
            assert_eq!(Codec::from_name(name, 30.0).map(|c| c.name()), Some(name));
        }
        assert_eq!(Codec::from_name("auto", 30.0), None);
    }

    #[test]
    fn less_lossy_codecs_end_without_a_codec() {
        let mut codec = Codec::from_name("topk", 64.0).unwrap();
        let mut names = vec![codec.to_string()];
        while codec != Codec::None {
            assert!(codec.less_lossy().ratio(1 << 20, Element::F32) < codec.ratio(1 << 20, Element::F32));
            codec = codec.less_lossy();
            names.push(codec.to_string());
        }
        let top_k = ["topk 64x", "topk 32x", "topk 16x", "topk 10x"];
        assert_eq!(names, [&top_k[..], &["int4-hadamard", "int8", "bf16", "none"]].concat());
        assert_eq!(Codec::Nvfp4.less_lossy().name(), "int8");
        assert_eq!(Codec::None.less_lossy(), Codec::None);
    }

    #[test]
    fn codecs_are_the_same_after_json_and_postcard() {
        let all = ["none", "bf16", "int8", "int4", "int4-hadamard", "nvfp4", "topk"];
        let all: Vec<Codec> = all.iter().filter_map(|name| Codec::from_name(name, 12.5)).collect();
        let json = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Codec>>(&json).unwrap(), all);
        let bytes = postcard::to_stdvec(&all).unwrap();
        assert_eq!(postcard::from_bytes::<Vec<Codec>>(&bytes).unwrap(), all);
    }

    #[test]
    fn nominal_ratios() {
        let ratios = |element| {
            ["bf16", "int8", "int4", "nvfp4"]
                .map(|name| (Codec::from_name(name, 1.0).unwrap().ratio(1 << 20, element) * 100.0).round() / 100.0)
        };
        // 32 bits over 16, over 8 + 16/32, over 4 + 16/32, and over 4 + 8/16.
        assert_eq!(ratios(Element::F32), [2.0, 3.76, 7.11, 7.11]);
        // 16 bits over the same.
        assert_eq!(ratios(Element::Bf16), [1.0, 1.88, 3.56, 3.56]);
    }
}
