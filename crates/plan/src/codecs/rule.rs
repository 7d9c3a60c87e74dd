//! The rule by which links get codecs.

use std::fmt;
use std::iter::successors;
use std::str::FromStr;

use fusionllm_compress::{Codec, Element};
use fusionllm_graph::TensorType;
use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::program::{PeerId, element, takes_codec};

/// How tensors are compressed between peers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Compression {
    /// The rule by which links get codecs. Files call it `name`.
    #[serde(rename = "name")]
    pub compressor: Compressor,
    /// Bytes of a tensor divided by its bytes on the wire; at least 1. For top-k it is the ratio of every link. For
    /// AdaTopK it is the ratio of the slowest link. For `auto` it is the highest ratio.
    pub ratio: f64,
    /// Whether a codec that does harm is replaced by a less lossy one during the run. If not, the run only warns.
    #[serde(default)]
    pub guard: bool,
    /// Whether a codec's error is added to the same value and micro-batch in the next step.
    #[serde(default)]
    pub error_feedback: bool,
    /// Whether the gradient of an activation keeps the entries that top-k kept of the activation. If not, it keeps
    /// its own largest entries.
    #[serde(default)]
    pub shared_masks: bool,
    /// Whether integers are rounded up or down at random, so that their mean is exact.
    #[serde(default)]
    pub stochastic_rounding: bool,
    /// Steps from one measurement of compressed tensors' spectra to the next; 0 for none.
    #[serde(default)]
    pub spectral_watch: u64,
}

/// A rule by which links get codecs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compressor {
    /// Nothing is compressed.
    #[default]
    None,
    /// The largest entries, fewest on the slowest link, by the published rule
    /// ([`adatopk`](fusionllm_compress::adatopk)).
    #[serde(rename = "adatopk")]
    AdaTopK,
    /// The largest entries, the same share on every link.
    #[serde(rename = "topk")]
    TopK,
    /// 16-bit floats on every link.
    Bf16,
    /// 8-bit integers in blocks on every link.
    Int8,
    /// 4-bit integers in blocks on every link.
    Int4,
    /// 4-bit integers in blocks, after a Hadamard rotation, on every link.
    Int4Hadamard,
    /// 4-bit floats in blocks on every link.
    Nvfp4,
    /// On each link, the least lossy codec that keeps the link from slowing the step; never top-k.
    Auto,
}

impl Compressor {
    /// Every rule.
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::AdaTopK,
        Self::TopK,
        Self::Bf16,
        Self::Int8,
        Self::Int4,
        Self::Int4Hadamard,
        Self::Nvfp4,
        Self::Auto,
    ];

    /// The strongest rule that `auto` takes a link's codec from.
    const STRONGEST_AUTO: Self = Self::Int4Hadamard;

    /// The codec of every link, for rules that give all links the same.
    pub(super) fn uniform(self, ratio: f64) -> Codec {
        Codec::from_name(self.name(), ratio).unwrap_or_default()
    }

    /// The name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::AdaTopK => "adatopk",
            Self::TopK => "topk",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Int4Hadamard => "int4-hadamard",
            Self::Nvfp4 => "nvfp4",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Compressor {
    type Err = PlanError;

    fn from_str(s: &str) -> Result<Self, PlanError> {
        Self::ALL.into_iter().find(|c| c.name() == s).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|c| c.name()).collect();
            PlanError::Plan(format!("there is no compression {s:?}; use one of {}", known.join(", ")))
        })
    }
}

impl Default for Compression {
    fn default() -> Self {
        Self {
            compressor: Compressor::None,
            ratio: 1.0,
            guard: false,
            error_feedback: false,
            shared_masks: false,
            stochastic_rounding: false,
            spectral_watch: 0,
        }
    }
}

/// The codec of one directed link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkCodec {
    /// The sending peer.
    pub from: PeerId,
    /// The receiving peer.
    pub to: PeerId,
    /// The codec of activations that have a gradient, and of their gradients.
    pub codec: Codec,
}

impl Compression {
    /// Whether the rule needs to know the links.
    pub fn needs_links(&self) -> bool {
        matches!(self.compressor, Compressor::AdaTopK | Compressor::Auto)
    }

    /// The rule by which messages are assumed to be compressed while a model is cut. `widest` are the widest numbers of
    /// the tensors that codecs take. For `auto`, it is the strongest. `None` if no message gets smaller.
    pub(crate) fn for_planning(&self, widest: Element) -> Option<Self> {
        let rule = match self.compressor {
            Compressor::Auto => {
                let strongest = Self { compressor: Compressor::STRONGEST_AUTO, ..*self };
                (strongest.large_ratio(widest) <= self.ratio).then_some(strongest)?
            }
            _ => *self,
        };
        (rule.large_ratio(widest) > 1.0).then_some(rule)
    }

    /// How many times smaller a tensor of this type becomes on the slowest link. Of tensors that codecs take, the size is
    /// assumed to be large.
    pub(crate) fn message_ratio(&self, ty: &TensorType) -> f64 {
        element(ty.dtype).filter(|_| takes_codec(ty)).map_or(1.0, |element| self.large_ratio(element))
    }

    fn large_ratio(&self, element: Element) -> f64 {
        match self.compressor {
            Compressor::AdaTopK => self.ratio,
            uniform => uniform.uniform(self.ratio).ratio(LARGE, element).max(1.0),
        }
    }

    /// The codecs that `auto` chooses from, the least lossy first: the strongest one, and those that
    /// [`Codec::less_lossy`] leads to from it. Codecs that make numbers of `widest` smaller than the ratio allows are
    /// left out.
    ///
    /// Top-k is not among them. With top-k at 10x on three links, a GPT-2 with 10 million parameters reached a
    /// validation loss of 3.36. Without codecs it reached 2.45 (150 steps, `scripts/compression.py convergence`).
    /// Shared masks reduce the harm, but four bits do less harm still.
    pub(super) fn ladder(&self, widest: Element) -> Vec<Codec> {
        let strongest = Compressor::STRONGEST_AUTO.uniform(1.0);
        let all = successors(Some(strongest), |c| (*c != Codec::None).then(|| c.less_lossy()));
        let mut ladder: Vec<Codec> = all.filter(|c| c.ratio(LARGE, widest) <= self.ratio).collect();
        ladder.reverse();
        ladder
    }
}

/// Elements of a large message. A codec's own header is negligible beside them.
const LARGE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_goes_from_no_codec_to_four_bits() {
        let names = |ratio, widest| {
            let rule = Compression { compressor: Compressor::Auto, ratio, ..Compression::default() };
            rule.ladder(widest).iter().map(|c| c.name()).collect::<Vec<_>>()
        };
        assert_eq!(names(100.0, Element::F32), ["none", "bf16", "int8", "int4-hadamard"]);
        assert_eq!(names(2.0, Element::F32), ["none", "bf16"]);
        // Four bits are 3.6 times fewer than sixteen.
        assert_eq!(names(4.0, Element::Bf16), ["none", "bf16", "int8", "int4-hadamard"]);
        assert_eq!(names(2.0, Element::Bf16), ["none", "bf16", "int8"]);
    }
}
