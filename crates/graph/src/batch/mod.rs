//! The loss of a whole batch, from micro-batches.
//!
//! A batch is cut into micro-batches, and each runs on its own. The loss of the batch is what the model's formula gives
//! for all samples at once, and its gradient is the gradient of that. A mean over targets is no mean of means, so this
//! module finds out how the loss follows from the samples. It follows the samples through the graph, from the inputs
//! to the loss (`class`, `rows`, `uniform`), and tells apart:
//!
//! - values that follow from the data alone, such as a count of targets, a sum of weights or a mean to normalise by. The
//!   broker computes these *statistics* for the whole batch (`recipe`), and they become inputs of the graph;
//! - sums and means over samples. Each gets the micro-batch's share of it as a factor (`weigh`);
//! - values in which samples meet, such as the scores of a contrastive loss. They cannot be cut, and are reported.

use std::collections::BTreeMap;

use crate::{Graph, GraphError, HostTensor, NodeId, Op, TensorType, ValueId};

mod class;
mod recipe;
mod rows;
#[cfg(test)]
mod tests;
mod uniform;
mod weigh;

use recipe::Recipe;

/// Runs one operator on host tensors: its operands, and the types of its results.
pub type Evaluate<'a> = &'a dyn Fn(&Op, Vec<HostTensor>, &[TensorType]) -> Result<Vec<HostTensor>, String>;

/// A reason why the loss of a batch may differ from what micro-batches give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Doubt {
    /// At this node, samples of the batch meet.
    Couples(NodeId),
    /// The analysis cannot follow the samples through this node.
    Unknown(NodeId),
    /// This node's number is taken for the number of rows. It may be a constant.
    Number(NodeId),
}

impl Doubt {
    /// The node in question.
    pub fn node(self) -> NodeId {
        match self {
            Self::Couples(node) | Self::Unknown(node) | Self::Number(node) => node,
        }
    }
}

/// The numbers of samples for which a model's graphs were built.
#[derive(Debug, Clone, Copy)]
pub struct Sizes<'a> {
    /// Samples of a micro-batch: the first dimension of the inputs.
    pub samples: usize,
    /// Samples that stay together and may depend on each other.
    pub group: usize,
    /// The same model for another number of samples. It tells a number of samples from a constant.
    pub other: Option<(&'a Graph, usize)>,
}

impl Sizes<'_> {
    fn groups(&self) -> usize {
        (self.samples / self.group.max(1)).max(1)
    }

    /// The power of the number of samples that a number grows with.
    fn power(&self, here: f64, there: f64) -> Option<i32> {
        let (_, others) = self.other?;
        let ratio = self.samples as f64 / others as f64;
        let close = |a: f64, b: f64| a == b || (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
        [(0, 1.0), (1, ratio), (-1, ratio.recip())].into_iter().find(|(_, r)| close(here, there * r)).map(|(p, _)| p)
    }

    /// 1 if some of the dimensions grow with the number of samples, else 0.
    fn power_of_dims(&self, v: ValueId, dims: &[usize], graph: &Graph) -> i32 {
        let Some((other, _)) = self.other else { return 0 };
        let size = |g: &Graph| dims.iter().map(|d| g.ty(v).shape[*d] as f64).product::<f64>();
        self.power(size(graph), size(other)).unwrap_or(0)
    }

    /// The power of the number in [`Full`](crate::ops::Full) or [`BinaryScalar`](crate::ops::BinaryScalar).
    fn power_of_number(&self, graph: &Graph, id: NodeId) -> Option<i32> {
        let number = |g: &Graph| match &g.node(id).op {
            Op::Full(op) => op.value,
            Op::BinaryScalar(op) => op.scalar,
            _ => 0.0,
        };
        match self.other {
            Some((other, _)) => self.power(number(graph), number(other)),
            None => Some(0),
        }
    }
}

/// The weight of a micro-batch's loss in the loss of its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// The loss of the batch is the mean of the micro-batches' losses.
    Equal,
    /// The loss of the batch is the sum of the micro-batches' losses.
    Whole,
    /// Each loss is a mean over the micro-batch's targets, and so is that of the batch: that of this cross-entropy.
    Targets(NodeId),
    /// The loss of the batch is the sum of the micro-batches' losses, because the graph multiplies by their shares.
    Inside,
}

/// How the loss of a batch follows from its micro-batches.
#[derive(Debug, Clone)]
pub struct BatchLoss {
    /// The weight of each micro-batch's loss.
    pub weight: Weight,
    /// The parts of the loss that may be inexact, in graph order.
    pub doubts: Vec<Doubt>,
    /// For each doubt, the name and the operator of its node.
    pub places: Vec<String>,
    recipe: Recipe,
}

/// The weights of micro-batches.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    /// The share of each micro-batch in the loss.
    pub weights: Vec<f64>,
    /// The number of targets of all, if the loss has one cross-entropy.
    pub targets: Option<f64>,
}

impl BatchLoss {
    /// Analyses a forward graph. Returns the graph to train: the same one if its loss is a single mean or sum, whose
    /// weight is all that it needs. Otherwise it has more inputs than the model, which [`Self::feed`] fills in, and the
    /// output `loss` is the micro-batch's share of the batch's loss.
    ///
    /// # Errors
    ///
    /// A value of the graph has a name that an input needs.
    pub fn of(graph: Graph, loss: ValueId, sizes: Sizes<'_>) -> Result<(Graph, Self), GraphError> {
        weigh::weighed(graph, loss, sizes)
    }

    /// Whether [`Self::feed`] fills in the input of this name.
    pub fn fills_in(&self, input: &str) -> bool {
        self.recipe.names().any(|name| name == input)
    }

    /// Whether samples of a batch meet in the loss, so that it cannot be cut.
    pub fn couples(&self) -> bool {
        self.doubts.iter().any(|doubt| matches!(doubt, Doubt::Couples(_)))
    }

    /// Whether the loss may follow from its micro-batches in another way than [`Self::feed`] assumes.
    pub fn is_unsure(&self) -> bool {
        self.doubts.iter().any(|doubt| !matches!(doubt, Doubt::Number(_)))
    }

    /// Whether [`Self::feed`] looks at the model's input of this name.
    pub fn reads(&self, input: &str) -> bool {
        self.recipe.reads(input)
    }

    /// Adds to the inputs of micro-batches what the graph needs beyond those of the model.
    ///
    /// Each micro-batch counts as often as `factors` says. If a sample is in several places, the sum of their factors
    /// says how often it counts. A factor may be negative. The micro-batches are one batch if their factors add up to
    /// `per_batch`. A larger set is an evaluation: means are those of the set, and sums those of a batch on average.
    ///
    /// # Errors
    ///
    /// An operator fails, or a micro-batch lacks an input that [`Self::reads`] names.
    pub fn feed(
        &self,
        micro_batches: &mut [BTreeMap<String, HostTensor>],
        factors: &[f64],
        per_batch: usize,
        run: Evaluate<'_>,
    ) -> Result<Weights, GraphError> {
        self.recipe.feed(self.weight, micro_batches, (factors, per_batch), run)
    }
}
