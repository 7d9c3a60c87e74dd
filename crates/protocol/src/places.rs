//! The places of a peer's training program where a number may be not finite, and their names.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{NodeId, Phase, ValueId};
use fusionllm_plan::{Cause, PeerId, Poison, PoisonPlace, Program, Slot};

use crate::notice::one_line;

/// What a peer may name in a [`Poison`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    micro_batches: u32,
    nodes: BTreeMap<NodeId, NamedNode>,
    /// The names of all values.
    values: BTreeMap<ValueId, String>,
    kept: BTreeSet<ValueId>,
    /// The parameters whose gradients the peer has a part in.
    gradients: BTreeSet<ValueId>,
    incoming: BTreeMap<Slot, PeerId>,
}

#[derive(Debug, PartialEq, Eq)]
struct NamedNode {
    operator: &'static str,
    name: String,
    phase: Phase,
}

impl Places {
    pub(crate) fn new(train: &Program) -> Self {
        let node =
            |n: &fusionllm_graph::Node| NamedNode { operator: n.op.name(), name: one_line(&n.name), phase: n.phase };
        Self {
            micro_batches: train.micro_batches,
            nodes: train.nodes.iter().map(|(id, n)| (*id, node(n))).collect(),
            values: train.values.iter().map(|(id, v)| (*id, one_line(&v.name))).collect(),
            kept: train.holdings.iter().map(|h| h.value).collect(),
            gradients: train.reductions.iter().map(|r| r.parameter).collect(),
            incoming: train.incoming().into_iter().map(|(slot, (from, _))| (slot, from)).collect(),
        }
    }

    /// Whether the peer's program has this place.
    pub(crate) fn has(&self, place: &PoisonPlace) -> bool {
        match place {
            PoisonPlace::Node { node, micro_batch } => {
                self.nodes.contains_key(node) && *micro_batch < self.micro_batches
            }
            PoisonPlace::Gradient { parameter } | PoisonPlace::OptimizerState { parameter } => {
                self.gradients.contains(parameter)
            }
            PoisonPlace::Kept { value } => self.kept.contains(value),
            PoisonPlace::Message { slot, from } => self.incoming.get(slot) == Some(from),
        }
    }

    /// Where in the step the place is: forward before backward before what follows them.
    pub(crate) fn order(&self, place: &PoisonPlace) -> (u32, u32) {
        match place {
            PoisonPlace::Kept { .. } => (0, 0),
            PoisonPlace::Node { node, micro_batch } => match self.nodes.get(node).map(|n| n.phase) {
                Some(Phase::Forward) => (1, *micro_batch),
                _ => (2, *micro_batch),
            },
            PoisonPlace::Message { slot: Slot::Value { micro_batch, .. }, .. } => (1, *micro_batch),
            _ => (3, 0),
        }
    }

    /// What the peer did or has, and what to do about it. Both follow the peer's name. `names` are the peers', and
    /// `trained` says whether any update was applied.
    pub(crate) fn describe(&self, poison: &Poison, names: &[&str], trained: bool) -> Sentence {
        let advice = remedy(trained);
        let again = if trained { "go back to an earlier checkpoint, with a lower learning rate" } else { advice };
        let value = |v: &ValueId| format!("{:?}", self.values.get(v).map_or("?", |name| name.as_str()));
        match &poison.place {
            PoisonPlace::Node { node, micro_batch } => {
                let (operator, name, phase) = self.nodes.get(node).map_or(("?", "?", "?"), |n| {
                    (n.operator, n.name.as_str(), if n.phase == Phase::Forward { "forward" } else { "backward" })
                });
                let what = match poison.cause {
                    Cause::FromInfinity => "turned an infinity into NaN",
                    Cause::Perhaps => "made an infinity, which may be the cause",
                    Cause::Arose | Cause::Arrived => "made the first number that is not finite",
                };
                let what = format!("{what}: the result of {operator} {name:?} in {phase} of micro-batch {micro_batch}");
                Sentence { what, advice }
            }
            PoisonPlace::Gradient { parameter } => {
                let what = format!("made the first number that is not finite: the gradient of {}", value(parameter));
                Sentence { what, advice }
            }
            PoisonPlace::Kept { value: v } => {
                let what = format!("has {}, which was not finite before the step", value(v));
                Sentence { what, advice: again }
            }
            PoisonPlace::OptimizerState { parameter } => {
                let what = format!("has optimizer state of {} that is not finite", value(parameter));
                Sentence { what, advice: again }
            }
            PoisonPlace::Message { slot, from: PeerId::BROKER } => {
                let what = format!("got an input that is not finite: {}", value(&slot.value()));
                Sentence { what, advice: "look for such numbers in the data" }
            }
            PoisonPlace::Message { slot, from } => {
                let from = names.get(from.0 as usize).copied().unwrap_or("?");
                let what = match slot {
                    Slot::Value { value: v, micro_batch } => format!("{} of micro-batch {micro_batch}", value(v)),
                    Slot::Part { parameter: v, .. } => format!("a part of the gradient of {}", value(v)),
                    Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => value(v),
                };
                let what = format!("says that {what} was not finite when it came from {from:?}");
                Sentence {
                    what,
                    advice: "one of the two is at fault, or the codec between them; `fusionllm kick` removes a peer",
                }
            }
        }
    }
}

/// What to do about a loss or gradient that is not finite. Before the first update, the learning rate has no part in
/// it.
pub(crate) fn remedy(trained: bool) -> &'static str {
    match trained {
        true => "try a lower learning rate or clipping",
        false => "no update was applied yet, so look at the model, its loss and the data, not at the learning rate",
    }
}

/// A statement about a peer, to follow its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sentence {
    pub(crate) what: String,
    pub(crate) advice: &'static str,
}
