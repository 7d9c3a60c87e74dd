//! The codecs, their names and the sizes they produce.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::block::Bits;
use crate::element::Element;
use crate::index::Indices;
use crate::wire::{HEADER_BYTES, exact_bytes};
use crate::{block, nvfp4, rotate, sparse};

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
    /// Integers in blocks that share a scale: about 4 times (8 bits) to 9 times (3 bits) smaller.
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
    /// The format of the kept values. If there is none, they are integers of as many bits as suit the ratio:
    /// [`Self::bits_for`].
    #[serde(default)]
    pub values: Option<ValueFormat>,
}

/// The format of the values that top-k keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValueFormat {
    /// The exact numbers.
    F32,
    /// bfloat16, rounded to nearest.
    Bf16,
    /// Integers. Those of 64 elements in a row share a scale, or of more if few of these are kept.
    Int(Bits),
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
            "topk" => Self::TopK(TopK { ratio, values: None }),
            _ => return None,
        })
    }

    /// The name in job files and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Bf16 => "bf16",
            Self::Int(IntBlocks { bits, rotate: false, .. }) => match bits {
                Bits::Three => "int3",
                Bits::Four => "int4",
                Bits::Five => "int5",
                Bits::Six => "int6",
                Bits::Eight => "int8",
            },
            Self::Int(IntBlocks { bits, rotate: true, .. }) => match bits {
                Bits::Three => "int3-hadamard",
                Bits::Four => "int4-hadamard",
                Bits::Five => "int5-hadamard",
                Bits::Six => "int6-hadamard",
                Bits::Eight => "int8-hadamard",
            },
            Self::Nvfp4 => "nvfp4",
            Self::TopK(_) => "topk",
        }
    }

    /// The next less lossy codec. Top-k first halves its ratio, down to 10. Then follow ratios of 7 and 5, integers of
    /// 8 bits, bf16, and none.
    pub fn less_lossy(self) -> Self {
        let eight = |form| Self::Int(IntBlocks { bits: Bits::Eight, rotate: false, ..form });
        let plain = IntBlocks { bits: Bits::Eight, rotate: false, stochastic: false };
        match self {
            Self::TopK(top) if top.ratio > 10.0 => Self::TopK(TopK { ratio: (top.ratio / 2.0).max(10.0), ..top }),
            Self::TopK(top) if top.ratio > 7.0 => Self::TopK(TopK { ratio: 7.0, ..top }),
            Self::TopK(top) if top.ratio > 5.0 => Self::TopK(TopK { ratio: 5.0, ..top }),
            Self::TopK(_) | Self::Nvfp4 => eight(plain),
            Self::Int(IntBlocks { bits: Bits::Eight, .. }) => Self::Bf16,
            Self::Int(form) => eight(form),
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

    /// [`Self::bytes`] of a gradient whose receiver sent `kept` of the activation's entries: see
    /// [`Encoder::encode_under`](crate::Encoder::encode_under).
    pub fn bytes_under(&self, n: usize, element: Element, kept: usize) -> usize {
        let bytes = self.bytes(n, element);
        match self {
            Self::TopK(top) => bytes.min(masked_bytes(n, kept, top.kept(n, element).values)),
            _ => bytes,
        }
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

    /// The bits of kept values that do the least harm at a ratio of bytes, when numbers of `element` are sent.
    ///
    /// The harm follows from how many bits an entry gets on the wire. In trials with a small GPT-2, sparse activations of f32
    /// did the least harm with 5 bits a value at 7 times fewer bytes, and with 4 bits at 10 times fewer
    /// (`scripts/compression.py convergence`).
    pub fn bits_for(ratio: f64, element: Element) -> Bits {
        let entry = 8.0 * element.bytes() as f64 / ratio;
        if entry >= 5.5 {
            Bits::Six
        } else if entry >= 3.8 {
            Bits::Five
        } else {
            Bits::Four
        }
    }

    /// The number of entries kept of `n`, and their format. If all entries fit the ratio, wider formats are tried, up
    /// to that of the elements: they lose less at the same ratio.
    pub(crate) fn kept(&self, n: usize, element: Element) -> Kept {
        use ValueFormat::{Bf16, F32, Int};
        let budget = exact_bytes(n, element) as f64 / self.ratio.max(1.0);
        let widths = Bits::ALL.map(Int).into_iter().chain([Bf16]).chain((element == Element::F32).then_some(F32));
        // The elements are as wide as bf16: they have no more bits.
        let first = match self.values.unwrap_or(Int(Self::bits_for(self.ratio, element))) {
            F32 if element == Element::Bf16 => Bf16,
            values => values,
        };
        let mut kept = Kept { values: first, count: 0 };
        for values in widths.skip_while(|values| *values != first) {
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
    4 + Indices::new(n, k).bytes() + values.bytes(n, k)
}

/// The encoded size of `k` of `n` entries without their places.
pub(crate) fn masked_bytes(n: usize, k: usize, values: ValueFormat) -> usize {
    HEADER_BYTES + 4 + values.bytes(n, k)
}

impl ValueFormat {
    /// Its number on the wire.
    pub(crate) fn byte(self) -> u8 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 1,
            Self::Int(bits) => bits.count() as u8,
        }
    }

    /// The format with this number on the wire.
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        let all = [Self::F32, Self::Bf16].into_iter().chain(Bits::ALL.map(Self::Int));
        all.into_iter().find(|v| v.byte() == byte)
    }

    /// The size of `k` of `n` entries in bytes.
    pub(crate) fn bytes(self, n: usize, k: usize) -> usize {
        match self {
            Self::F32 => 4 * k,
            Self::Bf16 => 2 * k,
            Self::Int(bits) => sparse::scale_bytes(n, k) + block::code_bytes(bits, k),
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
        let top_k = ["topk 64x", "topk 32x", "topk 16x", "topk 10x", "topk 7x", "topk 5x"];
        assert_eq!(names, [&top_k[..], &["int8", "bf16", "none"]].concat());
        assert_eq!(Codec::Nvfp4.less_lossy().name(), "int8");
        assert_eq!(Codec::None.less_lossy(), Codec::None);
    }

    /// The trials' best: 5 bits at 7x and 4 bits at 10x, as much of which is bits of f32 as of bf16.
    #[test]
    fn the_bits_of_kept_values_follow_the_ratio() {
        let bits = |element| [3.5, 5.0, 7.0, 10.0, 30.0].map(|ratio| TopK::bits_for(ratio, element).count());
        assert_eq!(bits(Element::F32), [6, 6, 5, 4, 4]);
        assert_eq!(bits(Element::Bf16), [5, 4, 4, 4, 4]);
        // At 3x, all entries fit with six bits and with eight.
        let at = |ratio| TopK { ratio, values: None }.kept(1 << 20, Element::F32);
        assert_eq!((at(3.0).values, at(7.0).values), (ValueFormat::Bf16, ValueFormat::Int(Bits::Five)));
        assert!((0.6..0.7).contains(&(at(7.0).count as f64 / (1 << 20) as f64)), "{:?}", at(7.0));
    }

    #[test]
    fn a_gradient_under_a_mask_has_no_indices() {
        let (n, codec) = (1 << 20, Codec::TopK(TopK { ratio: 10.0, values: None }));
        let Codec::TopK(top) = codec else { unreachable!() };
        let kept = top.kept_entries(n, Element::F32);
        let (own, under) = (codec.bytes(n, Element::F32), codec.bytes_under(n, Element::F32, kept));
        assert_eq!(own - under, n / 8, "a bit for each element is saved");
        assert_eq!(codec.bytes_under(n, Element::F32, n), own, "a full mask needs more than its own entries");
        assert_eq!(Codec::Bf16.bytes_under(n, Element::F32, kept), Codec::Bf16.bytes(n, Element::F32));
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
