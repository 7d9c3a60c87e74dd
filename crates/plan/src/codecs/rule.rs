//! The rule by which links get codecs.

use std::fmt;
use std::str::FromStr;

use fusionllm_compress::{Codec, Element, TopK};
use fusionllm_graph::TensorType;
use fusionllm_program::{PeerId, element, takes_codec};
use serde::{Deserialize, Serialize};

use super::loss::{LossBudget, added_loss, gentlest_topk, of_f32};
use crate::error::PlanError;

/// How tensors are compressed between peers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Compression {
    /// The rule by which links get codecs. Files call it `name`.
    #[serde(rename = "name")]
    pub compressor: Compressor,
    /// Bytes of a tensor divided by its bytes on the wire; at least 1. For `topk` it is the ratio of every link. For
    /// `adatopk-published` it is the ratio of the slowest link. For `adatopk` and `auto` it is the highest ratio of
    /// numbers of f32. That of bf16 is half as high, since what does harm is how few bits a number gets.
    pub ratio: f64,
    /// How much the loss may rise by the codecs that `auto` chooses.
    #[serde(default)]
    pub loss_budget: LossBudget,
    /// Whether a codec that does harm is replaced by a less lossy one during the run. If not, the run only warns.
    #[serde(default)]
    pub guard: bool,
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
    /// On each link, the smallest ratio at which it no longer slows the step: bf16, 8-bit integers, or the largest
    /// entries with few bits each.
    #[serde(rename = "adatopk")]
    AdaTopK,
    /// The largest entries in 8 bits, fewest on the slowest link, by the published rule
    /// ([`adatopk`](fusionllm_compress::adatopk)). A gradient keeps its own largest entries.
    #[serde(rename = "adatopk-published")]
    AdaTopKPublished,
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
    /// On each link, the least lossy codec that keeps the link from slowing the step, of those that raise the loss by
    /// no more than a budget.
    Auto,
}

impl Compressor {
    /// Every rule.
    pub const ALL: [Self; 10] = [
        Self::None,
        Self::AdaTopK,
        Self::AdaTopKPublished,
        Self::TopK,
        Self::Bf16,
        Self::Int8,
        Self::Int4,
        Self::Int4Hadamard,
        Self::Nvfp4,
        Self::Auto,
    ];

    /// The codec of every link, for rules that give all links the same.
    pub(super) fn uniform(self, ratio: f64) -> Codec {
        Codec::from_name(self.name(), ratio).unwrap_or_default()
    }

    /// Whether the gradient of an activation keeps the entries that top-k kept of the activation. If not, it keeps its
    /// own largest entries.
    pub fn shares_masks(self) -> bool {
        self != Self::AdaTopKPublished
    }

    /// The ratio where a job names none. The published rule has that of the published experiments.
    pub fn usual_ratio(self) -> f64 {
        if self == Self::AdaTopKPublished { 30.0 } else { 10.0 }
    }

    /// The name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::AdaTopK => "adatopk",
            Self::AdaTopKPublished => "adatopk-published",
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
            loss_budget: LossBudget::default(),
            guard: false,
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
        self.looks_for_need() || self.compressor == Compressor::AdaTopKPublished
    }

    /// Whether the rule gives a link a codec only where the step is slower without it.
    pub(crate) fn looks_for_need(&self) -> bool {
        matches!(self.compressor, Compressor::AdaTopK | Compressor::Auto)
    }

    /// The rule by which messages are assumed to be compressed while a model is cut: the strongest codec that a link may
    /// get. `widest` are the widest numbers of the tensors that codecs take. `None` if no message gets smaller.
    pub(crate) fn for_planning(&self, widest: Element) -> Option<Self> {
        (self.large_ratio(widest) > 1.0).then_some(*self)
    }

    /// How many times smaller a tensor of this type becomes on the slowest link. Of tensors that codecs take, the size is
    /// assumed to be large.
    pub(crate) fn message_ratio(&self, ty: &TensorType) -> f64 {
        element(ty.dtype).filter(|_| takes_codec(ty)).map_or(1.0, |element| self.large_ratio(element))
    }

    fn large_ratio(&self, element: Element) -> f64 {
        let strongest = match self.compressor {
            Compressor::AdaTopK | Compressor::Auto => self.ladder(element).pop().unwrap_or_default(),
            Compressor::AdaTopKPublished => Compressor::TopK.uniform(self.ratio),
            uniform => uniform.uniform(self.ratio),
        };
        strongest.ratio(LARGE, element).max(1.0)
    }

    /// The codecs that `adatopk` and `auto` choose from, the least lossy first: none, bf16, integers, and top-k in
    /// steps of a tenth. Codecs that make numbers of `widest` smaller than the ratio allows are left out. So are those
    /// that raise the loss by more than another that makes them as small. For `auto`, the budget of loss is a bound, too.
    pub(crate) fn ladder(&self, widest: Element) -> Vec<Codec> {
        let auto = self.compressor == Compressor::Auto;
        let budget = if auto { self.loss_budget.share() } else { f64::INFINITY };
        let highest = of_f32(self.ratio, widest);
        let most = if auto { highest.min(of_f32(gentlest_topk(budget), widest)) } else { highest };
        let dense: &[&str] = if auto { &["bf16", "int8", "int4-hadamard"] } else { &["bf16", "int8"] };
        let dense = dense.iter().filter_map(|name| Codec::from_name(name, 1.0));
        let least = of_f32(LEAST_TOPK, widest);
        let steps = (0..).map(|step| least * TOPK_STEP.powi(step)).take_while(|ratio| *ratio < most * 0.999);
        let ratios = steps.chain((most >= least).then_some(most));
        let top_k = ratios.map(|ratio| Codec::TopK(TopK { ratio, values: None }));
        let mut ladder: Vec<Codec> = dense.chain(top_k).collect();
        let size = |codec: &Codec| codec.ratio(LARGE, widest);
        let loss = |codec: &Codec| added_loss(codec, widest).unwrap_or(f64::INFINITY);
        ladder.retain(|codec| size(codec) > 1.0 && size(codec) <= highest * 1.001 && (!auto || loss(codec) <= budget));
        ladder.sort_by(|a, b| size(a).total_cmp(&size(b)));
        // From the smallest on: another that is larger must do less harm.
        let mut least = f64::INFINITY;
        ladder.reverse();
        ladder.retain(|codec| {
            let gentler = !auto || loss(codec) < least || loss(codec) == 0.0;
            least = least.min(loss(codec));
            gentler
        });
        ladder.push(Codec::None);
        ladder.reverse();
        ladder
    }
}

/// The smallest ratio of top-k for numbers of f32. At smaller ones, integers of 8 bits are as small.
const LEAST_TOPK: f64 = 5.0;

/// One ratio of top-k over the one before it.
const TOPK_STEP: f64 = 1.1;

/// Elements of a large message. A codec's own header is negligible beside them.
const LARGE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_goes_from_no_codec_to_the_highest_ratio() {
        let ladder = |compressor, ratio, loss_budget, widest| {
            let loss_budget = LossBudget::new(loss_budget).unwrap();
            Compression { compressor, ratio, loss_budget, ..Compression::default() }.ladder(widest)
        };
        let names = |ladder: Vec<Codec>| ladder.iter().map(Codec::to_string).collect::<Vec<_>>();
        let by_need = |ratio, widest| names(ladder(Compressor::AdaTopK, ratio, 0.0, widest));
        let to_ten =
            ["none", "bf16", "int8", "topk 5x", "topk 5.5x", "topk 6.1x", "topk 6.7x", "topk 7.3x", "topk 8.1x"];
        assert_eq!(by_need(10.0, Element::F32), [&to_ten[..], &["topk 8.9x", "topk 9.7x", "topk 10x"]].concat());
        assert_eq!(by_need(2.0, Element::F32), ["none", "bf16"]);
        // Eight bits are 1.9 times fewer than sixteen.
        assert_eq!(by_need(5.2, Element::Bf16), ["none", "int8", "topk 2.5x", "topk 2.6x"]);
        // A budget of nothing leaves what costs nothing, and a large one reaches the highest ratio.
        let nothing = names(ladder(Compressor::Auto, 30.0, 0.0, Element::F32));
        assert!(
            nothing[..2] == ["none", "bf16"] && !nothing.iter().any(|name| name.starts_with("topk")),
            "{nothing:?}"
        );
        let large = ladder(Compressor::Auto, 9.0, 0.5, Element::F32);
        assert_eq!(large.last().map(Codec::to_string), Some("topk 9x".into()), "{large:?}");
        for budget in [0.002, 0.005, 0.01, 0.02, 0.1] {
            for widest in [Element::F32, Element::Bf16] {
                let ladder = ladder(Compressor::Auto, 30.0, budget, widest);
                let losses: Vec<f64> = ladder.iter().map(|codec| added_loss(codec, widest).unwrap()).collect();
                let sizes: Vec<f64> = ladder.iter().map(|codec| codec.ratio(LARGE, widest)).collect();
                assert!(losses.is_sorted() && losses.iter().all(|loss| *loss <= budget), "{losses:?}");
                assert!(sizes.is_sorted() && ladder.len() >= 2, "{sizes:?}");
            }
        }
    }
}
