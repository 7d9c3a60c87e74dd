//! What is done to the tensors that cross from one peer to another.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use fusionllm_compress::{Codec, adatopk};
use fusionllm_graph::{DType, TensorType};
use serde::{Deserialize, Serialize};

use crate::{Cluster, Instruction, Optimizer, PeerId, PlanError, Program, SharedId, Slot, auto};

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
    pub fn asks_for_links(&self) -> bool {
        matches!(self.name, Compressor::AdaTopK | Compressor::Auto)
    }

    /// The rule that cuts between smaller messages are made by: where codecs are chosen for a cut, the strongest of them. `None` if no message is smaller.
    pub(crate) fn for_cuts(&self) -> Option<Self> {
        match self.name {
            Compressor::None => None,
            Compressor::Auto => {
                let strongest = Self { name: Compressor::Int4Hadamard, ..*self };
                (strongest.shrinks() <= self.ratio).then_some(strongest)
            }
            _ => Some(*self),
        }
    }

    /// How many times smaller the rule makes large messages on the slowest link.
    pub(crate) fn shrinks(&self) -> f64 {
        match self.name {
            Compressor::AdaTopK => self.ratio,
            name => uniform(name, self.ratio).ratio(LARGE),
        }
    }

    /// The codec of every link on which `programs` send what may be compressed. `cluster` has the peers as its devices.
    ///
    /// # Errors
    ///
    /// The rule needs to know the links' rates, and there is no cluster, or no way between two peers in it.
    pub fn choose(
        &self,
        programs: &[Program],
        cluster: Option<&Cluster>,
        optimizer: Optimizer,
    ) -> Result<Vec<LinkCodec>, PlanError> {
        if !(self.ratio >= 1.0 && self.ratio.is_finite()) {
            return Err(PlanError::Plan(format!("a compression of {} is none; it must be at least 1", self.ratio)));
        }
        let traffic = Traffic::new(programs);
        let links: Vec<(PeerId, PeerId)> = traffic.links.keys().copied().collect();
        let known = || {
            cluster.ok_or_else(|| {
                PlanError::Plan(format!(
                    "the compression {} suits each link's rate, so it must know them\n  hint: describe the links in a file for --testbed, or use one codec for all, such as int8",
                    self.name
                ))
            })
        };
        let codecs: Vec<Codec> = match self.name {
            Compressor::AdaTopK => {
                let ratios = adatopk(self.ratio, &traffic.seconds(known()?)?);
                ratios.into_iter().map(|r| if r > 1.0 { top_k(r) } else { Codec::None }).collect()
            }
            Compressor::Auto => {
                auto::choose(programs, &traffic, known()?, optimizer, self.ratio)?.into_values().collect()
            }
            name => vec![uniform(name, self.ratio); links.len()],
        };
        let all = links.into_iter().zip(codecs).map(|((from, to), codec)| LinkCodec {
            from,
            to,
            codec: codec.rounding(self.stochastic_rounding),
        });
        Ok(all.filter(|l| l.codec != Codec::None).collect())
    }
}

/// Elements of a message beside which a codec's own bytes are few.
pub(crate) const LARGE: usize = 1 << 20;

fn top_k(ratio: f64) -> Codec {
    Codec::named("topk", ratio).unwrap_or_default()
}

/// The codec of every link, where all get the same.
fn uniform(name: Compressor, ratio: f64) -> Codec {
    Codec::named(name.name(), ratio).unwrap_or_default()
}

/// Whether a message may go through a codec: activations and their gradients, never inputs, parameters, their gradients or integers.
pub(crate) fn codable(slot: Slot, other_end: PeerId, ty: &TensorType, varies: bool) -> bool {
    matches!(slot, Slot::Value { .. }) && other_end != PeerId::BROKER && ty.dtype == DType::F32 && varies
}

/// What may be compressed of one step's messages, by link.
#[derive(Debug, Clone, PartialEq)]
pub struct Traffic {
    /// The numbers of elements of each message.
    pub links: BTreeMap<(PeerId, PeerId), Vec<usize>>,
}

impl Traffic {
    /// That of all peers' programs.
    pub fn new(programs: &[Program]) -> Self {
        let mut links: BTreeMap<(PeerId, PeerId), Vec<usize>> = BTreeMap::new();
        for p in programs {
            for i in &p.instructions {
                if let Instruction::Send { slot, to } = *i
                    && p.coded.contains(&slot.value())
                    && let Some(v) = p.values.get(&slot.value())
                {
                    links.entry((p.peer, to)).or_default().push(v.ty.numel());
                }
            }
        }
        Self { links }
    }

    /// Seconds for which each link's messages of a step occupy the slowest piece of their way, uncompressed. A shared uplink is occupied by all that takes it.
    pub(crate) fn seconds(&self, cluster: &Cluster) -> Result<Vec<f64>, PlanError> {
        let bytes = |elements: &[usize]| elements.iter().map(|n| 4.0 * *n as f64).sum::<f64>();
        let mut shared: BTreeMap<SharedId, f64> = BTreeMap::new();
        for ((from, to), elements) in &self.links {
            for (id, _) in cluster.shared(*from, *to) {
                *shared.entry(id).or_default() += bytes(elements);
            }
        }
        let times = self.links.iter().map(|((from, to), elements)| {
            let Some(link) = cluster.link(*from, *to) else {
                let (from, to) = (cluster.name(*from), cluster.name(*to));
                return Err(PlanError::Cluster(format!("there is no way from {from} to {to}")));
            };
            let uplinks = cluster.shared(*from, *to).map(|(id, l)| shared[&id] / l.bandwidth);
            Ok(uplinks.fold(bytes(elements) / link.bandwidth, f64::max))
        });
        times.collect()
    }
}
