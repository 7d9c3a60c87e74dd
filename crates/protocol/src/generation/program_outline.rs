//! The outline of a peer's training program: the places where a number may be not finite, and their names.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{Node, Phase, ValueId};
use fusionllm_program::{Address, Cause, PeerId, Poison, Program};

use crate::notice::one_line;

/// The places that a peer may name in a [`Poison`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ProgramOutline {
    micro_batches: u32,
    /// By value that the peer makes: the node that makes it.
    nodes: BTreeMap<ValueId, NamedNode>,
    /// The names of all values.
    values: BTreeMap<ValueId, String>,
    kept: BTreeSet<ValueId>,
    /// The parameters whose gradients the peer has a part in.
    gradients: BTreeSet<ValueId>,
    incoming: BTreeMap<Address, PeerId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NamedNode {
    operator: &'static str,
    name: String,
    phase: Phase,
}

impl ProgramOutline {
    pub(crate) fn new(train: &Program) -> Self {
        let made = |n: &Node| {
            let named = NamedNode { operator: n.op.name(), name: one_line(&n.name), phase: n.phase };
            n.outputs.iter().map(move |v| (*v, named.clone())).collect::<Vec<_>>()
        };
        Self {
            micro_batches: train.micro_batches,
            nodes: train.nodes.values().flat_map(made).collect(),
            values: train.values.iter().map(|(id, v)| (*id, one_line(&v.name))).collect(),
            kept: train.holdings.iter().map(|h| h.value).collect(),
            gradients: train.reductions.keys().copied().collect(),
            incoming: train.receives().collect(),
        }
    }

    /// Whether the peer's program has the place that `poison` names.
    pub(crate) fn has(&self, poison: &Poison) -> bool {
        match (poison.tensor, poison.from) {
            (message, Some(from)) => self.incoming.get(&message) == Some(&from),
            (Address::Value { value, micro_batch }, None) => {
                self.nodes.contains_key(&value) && micro_batch < self.micro_batches
            }
            (Address::Gradient { parameter } | Address::OptimizerState { parameter, .. }, None) => {
                self.gradients.contains(&parameter)
            }
            (Address::Held { value }, None) => self.kept.contains(&value),
            (Address::Part { .. } | Address::BufferAfter { .. }, None) => false,
        }
    }

    /// The place's position in the step. Forward comes before backward, and backward before the rest.
    pub(crate) fn order(&self, poison: &Poison) -> (u32, u32) {
        match (poison.tensor, poison.from) {
            (Address::Held { .. }, None) => (0, 0),
            (Address::Value { value, micro_batch }, None) => match self.nodes.get(&value).map(|n| n.phase) {
                Some(Phase::Forward) => (1, micro_batch),
                _ => (2, micro_batch),
            },
            (Address::Value { micro_batch, .. }, Some(_)) => (1, micro_batch),
            _ => (3, 0),
        }
    }

    /// Returns what happened at the peer and advice about it. Both follow the peer's name. `names` are the peers' names.
    pub(crate) fn describe(&self, poison: &Poison, names: &[&str], when: When) -> Sentence {
        let advice = remedy(when);
        let again = match when {
            When::Untrained => advice,
            When::Trained | When::Alone => "go back to an earlier checkpoint, with a lower learning rate",
        };
        let v = poison.tensor.value();
        let value = format!("{:?}", self.values.get(&v).map_or("?", |name| name.as_str()));
        let (what, advice) = match (poison.tensor, poison.from) {
            (_, Some(PeerId::BROKER)) => {
                (format!("got an input that is not finite: {value}"), "look for such numbers in the data")
            }
            (tensor, Some(from)) => {
                let from = names.get(from.0 as usize).copied().unwrap_or("?");
                let what = match tensor {
                    Address::Value { micro_batch, .. } => format!("{value} of micro-batch {micro_batch}"),
                    Address::Part { .. } => format!("a part of the gradient of {value}"),
                    _ => value,
                };
                (
                    format!("says that {what} was not finite when it came from {from:?}"),
                    "one of the two is at fault, or the codec between them; `fusionllm kick` removes a peer",
                )
            }
            (Address::Value { micro_batch, .. }, None) => {
                let (operator, name, phase) = self.nodes.get(&v).map_or(("?", "?", "?"), |n| {
                    (n.operator, n.name.as_str(), if n.phase == Phase::Forward { "forward" } else { "backward" })
                });
                let what = match poison.cause {
                    Cause::FromInfinity => "turned an infinity into NaN",
                    Cause::Perhaps => "made a number that is not finite, which may be the cause",
                    Cause::Arose | Cause::Arrived => "made the first number that is not finite",
                };
                (format!("{what}: the result of {operator} {name:?} in {phase} of micro-batch {micro_batch}"), advice)
            }
            (Address::Held { .. }, None) if poison.cause == Cause::Perhaps => {
                (format!("has {value}, which holds an infinity and may be the cause"), advice)
            }
            (Address::Held { .. }, None) => (format!("has {value}, which was not finite before the step"), again),
            (Address::OptimizerState { .. }, None) => {
                (format!("has optimizer state of {value} that is not finite"), again)
            }
            (Address::Gradient { .. } | Address::Part { .. } | Address::BufferAfter { .. }, None) => {
                (format!("made the first number that is not finite: the gradient of {value}, or its norm"), advice)
            }
        };
        Sentence { what, advice }
    }
}

/// When a step was skipped. It tells what may be the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Before the first update, so the learning rate is not the cause.
    Untrained,
    /// After updates.
    Trained,
    /// After updates, and a later step was applied. So the parameters are sound, and only this step's data differ.
    Alone,
}

/// The advice about a loss or gradient that is not finite.
pub(crate) fn remedy(when: When) -> &'static str {
    match when {
        When::Untrained => {
            "no update was applied yet, so look at the model, its loss and the data, not at the learning rate"
        }
        When::Trained => "try a lower learning rate or clipping",
        When::Alone => {
            "steps beside it are fine, so look at the data of this step, and at what the model makes of them"
        }
    }
}

/// A statement about a peer, to follow its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sentence {
    pub(crate) what: String,
    pub(crate) advice: &'static str,
}
