//! What is done to the tensors that cross from one peer to another.

use std::fmt;
use std::str::FromStr;

use fusionllm_compress::Codec;
use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::program::PeerId;

/// How codecs are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Compression {
    /// The rule.
    pub name: Compressor,
    /// Bytes of a tensor over its bytes on the wire: for top-k; with AdaTopK on the slowest link, with `auto` at most. At least 1.
    pub ratio: f64,
    /// Whether codecs that do harm give way to milder ones while the run goes on; else it is only told.
    #[serde(default)]
    pub guard: bool,
    /// Whether what a codec left out of a tensor is added to the one of the same value and micro-batch in the next step.
    #[serde(default)]
    pub error_feedback: bool,
    /// Whether what top-k left out of an activation is left out of its gradient too, which then is that of what was received; else the gradient has its own largest entries.
    #[serde(default)]
    pub shared_masks: bool,
    /// Whether integers are rounded up or down at random, so that their mean is exact.
    #[serde(default)]
    pub stochastic_rounding: bool,
    /// Steps from one measurement of the spectra of what is compressed to the next; 0 for none.
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
    /// The largest entries, fewest on the slowest link, by the published rule ([`adatopk`]).
    #[serde(rename = "adatopk")]
    AdaTopK,
    /// The largest entries, as many on every link.
    #[serde(rename = "topk")]
    TopK,
    /// 16-bit floats on every link.
    Bf16,
    /// 8-bit integers in blocks on every link.
    Int8,
    /// 4-bit integers in blocks on every link.
    Int4,
    /// The same behind a Hadamard rotation.
    Int4Hadamard,
    /// 4-bit floats in blocks on every link.
    Nvfp4,
    /// On each link the mildest codec with which the link is not what a step waits for.
    Auto,
}

impl Compressor {
    /// All of them.
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
    pub(super) const STRONGEST_AUTO: Self = Self::Int4Hadamard;

    /// The codec of every link, for rules that give all links the same.
    pub(super) fn uniform(self, ratio: f64) -> Codec {
        Codec::named(self.name(), ratio).unwrap_or_default()
    }

    /// What users call it.
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
            name: Compressor::None,
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
    /// What activations, and gradients of activations, go through.
    pub codec: Codec,
}

impl Compression {
    /// Whether the rule must know the links.
    pub fn needs_links(&self) -> bool {
        matches!(self.name, Compressor::AdaTopK | Compressor::Auto)
    }

    /// The rule that cuts between smaller messages are made by: where codecs are chosen for a cut, the strongest of them. `None` if no message is smaller.
    pub(crate) fn for_planning(&self) -> Option<Self> {
        match self.name {
            Compressor::None => None,
            Compressor::Auto => {
                let strongest = Self { name: Compressor::STRONGEST_AUTO, ..*self };
                (strongest.message_ratio() <= self.ratio).then_some(strongest)
            }
            _ => Some(*self),
        }
    }

    /// How many times smaller the rule makes large messages on the slowest link.
    pub(crate) fn message_ratio(&self) -> f64 {
        match self.name {
            Compressor::AdaTopK => self.ratio,
            name => name.uniform(self.ratio).ratio(LARGE),
        }
    }
}

/// Elements of a message beside which a codec's own bytes are few.
pub(super) const LARGE: usize = 1 << 20;
