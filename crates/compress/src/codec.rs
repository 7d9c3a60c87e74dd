use std::fmt;

use serde::{Deserialize, Serialize};

use crate::index::Indices;
use crate::wire::{HEADER, exact_bytes};
use crate::{block, nvfp4, rotate};

/// How a tensor of f32 crosses a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Codec {
    /// As it is.
    #[default]
    None,
    /// The upper halves, rounded to nearest: 2 times smaller.
    Bf16,
    /// Integers in blocks with a scale each: about 4 or 7 times smaller.
    Int(IntBlocks),
    /// NVIDIA's 4-bit floats: blocks of 16 E2M1 numbers with an E4M3 scale each and one f32 scale a tensor; 7 times smaller.
    Nvfp4,
    /// The entries of largest magnitude; the rest is zero.
    TopK(TopK),
}

/// Integers in blocks of 32 that share a scale: the block's largest magnitude over the largest code, as bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntBlocks {
    /// Bits of a code.
    pub bits: Bits,
    /// Whether a Hadamard rotation with random signs comes first, so that outliers cost their block less.
    #[serde(default)]
    pub rotate: bool,
    /// Whether codes are rounded up or down at random so that their mean is exact, instead of to the nearest.
    #[serde(default)]
    pub stochastic: bool,
}

/// Bits of an integer code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bits {
    /// -7 to 7.
    Four,
    /// -127 to 127.
    Eight,
}

/// The largest entries by magnitude; of equal ones, those that come first.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TopK {
    /// Bytes of the tensor over bytes on the wire, indices included; at least 1.
    pub ratio: f64,
    /// How the kept values are held.
    #[serde(default)]
    pub values: Values,
}

/// How kept values are held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Values {
    /// As they are.
    F32,
    /// Rounded to nearest.
    Bf16,
    /// In blocks of 32 that share a scale. At the same ratio more than twice as many entries are kept as with f32.
    #[default]
    Int8,
}

impl Codec {
    /// The codec a user calls by this name; `ratio` is for `topk` alone.
    pub fn named(name: &str, ratio: f64) -> Option<Self> {
        let int = |bits, rotate| Self::Int(IntBlocks { bits, rotate, stochastic: false });
        Some(match name {
            "none" => Self::None,
            "bf16" => Self::Bf16,
            "int8" => int(Bits::Eight, false),
            "int4" => int(Bits::Four, false),
            "int4-hadamard" => int(Bits::Four, true),
            "nvfp4" => Self::Nvfp4,
            "topk" => Self::TopK(TopK { ratio, values: Values::default() }),
            _ => return None,
        })
    }

    /// What users call it.
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

    /// The next milder one: half the ratio while top-k makes a tensor more than 10 times smaller, then integers of 4 and of 8 bits, 16-bit floats, and none.
    pub fn milder(self) -> Self {
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

    /// The same, rounding at random where it can, or not.
    pub fn rounding(self, stochastic: bool) -> Self {
        match self {
            Self::Int(form) => Self::Int(IntBlocks { stochastic, ..form }),
            other => other,
        }
    }

    /// Bytes of `n` encoded elements. A form that would be longer than the numbers themselves is not used.
    pub fn bytes(&self, n: usize) -> usize {
        self.coded_bytes(n).min(exact_bytes(n))
    }

    /// Bytes of `n` elements over the bytes they take on the wire.
    pub fn ratio(&self, n: usize) -> f64 {
        if n == 0 { 1.0 } else { 4.0 * n as f64 / self.bytes(n) as f64 }
    }

    /// Bytes of the codec's own form.
    pub(crate) fn coded_bytes(&self, n: usize) -> usize {
        let body = match self {
            Self::None => 4 * n,
            Self::Bf16 => 2 * n,
            Self::Int(form) => form.body_bytes(n),
            Self::Nvfp4 => nvfp4::body_bytes(n),
            Self::TopK(top) => {
                let (values, k) = top.form(n);
                top_bytes(n, k, values)
            }
        };
        HEADER + body
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
    /// How many of `n` entries are kept: as many as `ratio` leaves room for, but one at least.
    pub fn kept(&self, n: usize) -> usize {
        self.form(n).1
    }

    /// What an entry costs on the wire over what it costs in the tensor, when `n` elements are encoded: the factor c of AdaTopK's rule, by which the
    /// ratio of entries exceeds that of bytes. The published system takes 3, for 8-byte indices beside 4-byte values.
    pub fn entry_cost(&self, n: usize) -> f64 {
        let (values, k) = self.form(n);
        (HEADER + top_bytes(n, k, values)) as f64 / (4 * k.max(1)) as f64
    }

    /// How the values of `n` elements are held, and how many are kept. A ratio so mild that all entries fit is met by wider values: nothing is lost for nothing.
    pub(crate) fn form(&self, n: usize) -> (Values, usize) {
        let budget = exact_bytes(n) as f64 / self.ratio.max(1.0);
        let widths = [Values::Int8, Values::Bf16, Values::F32].into_iter().skip_while(|v| *v != self.values);
        let mut form = (self.values, 0);
        for values in widths {
            form = (values, most(n, |k| (HEADER + top_bytes(n, k, values)) as f64 <= budget));
            if form.1 < n {
                break;
            }
        }
        form
    }
}

/// The largest number up to `n`, but 1 at least, that fits. The size grows with k: every form's does, and the smallest of growing sizes grows.
fn most(n: usize, fits: impl Fn(usize) -> bool) -> usize {
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

/// Bytes of the body when `k` of `n` entries are kept.
pub(crate) fn top_bytes(n: usize, k: usize, values: Values) -> usize {
    4 + Indices::new(n, k).bytes() + values.bytes(k)
}

impl Bits {
    pub(crate) const fn count(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

impl Values {
    /// By the number that stands for it on the wire.
    pub(crate) fn read(byte: u8) -> Option<Self> {
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
    fn names_are_what_users_write() {
        for name in ["none", "bf16", "int8", "int4", "int4-hadamard", "nvfp4", "topk"] {
            assert_eq!(Codec::named(name, 30.0).map(|c| c.name()), Some(name));
        }
        assert_eq!(Codec::named("auto", 30.0), None);
    }

    #[test]
    fn every_way_down_ends_without_a_codec() {
        let mut codec = Codec::named("topk", 64.0).unwrap();
        let mut names = vec![codec.to_string()];
        while codec != Codec::None {
            assert!(codec.milder().ratio(1 << 20) < codec.ratio(1 << 20));
            codec = codec.milder();
            names.push(codec.to_string());
        }
        let ways = ["topk 64x", "topk 32x", "topk 16x", "topk 10x"];
        assert_eq!(names, [&ways[..], &["int4-hadamard", "int8", "bf16", "none"]].concat());
        assert_eq!(Codec::Nvfp4.milder().name(), "int8");
        assert_eq!(Codec::None.milder(), Codec::None);
    }

    #[test]
    fn codecs_survive_both_serialisations() {
        let all = ["none", "bf16", "int8", "int4", "int4-hadamard", "nvfp4", "topk"];
        let all: Vec<Codec> = all.iter().filter_map(|name| Codec::named(name, 12.5)).collect();
        let json = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Codec>>(&json).unwrap(), all);
        let bytes = postcard::to_stdvec(&all).unwrap();
        assert_eq!(postcard::from_bytes::<Vec<Codec>>(&bytes).unwrap(), all);
    }

    #[test]
    fn nominal_ratios() {
        let ratio = |name| (Codec::named(name, 1.0).unwrap().ratio(1 << 20) * 100.0).round() / 100.0;
        // 32 bits over 16; 8 and a 32nd of 16; 4 and a 32nd of 16; 4 and a 16th of 8.
        assert_eq!([ratio("bf16"), ratio("int8"), ratio("int4"), ratio("nvfp4")], [2.0, 3.76, 7.11, 7.11]);
    }
}
