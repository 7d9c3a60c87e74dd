//! Where a number was first not finite: what a peer says of a pass that was inspected.

use fusionllm_graph::{NodeId, ValueId};
use serde::{Deserialize, Serialize};

use super::{PeerId, Slot};

/// A number that is NaN or infinite, as the peer that met it says. It holds numbers of the peer's Program and no text,
/// so whoever reads it can check it, and names the place in its own words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Poison {
    /// How sure it is that the number arose there.
    pub cause: Cause,
    /// Where it was met.
    pub place: PoisonPlace,
}

/// How sure it is that a number arose where it was met, the surest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Cause {
    /// All that it was computed from was finite, or it was there before the pass.
    Arose,
    /// It is NaN and was computed from an infinity. That may be meant, as in a mask.
    FromInfinity,
    /// It was so when it arrived from another peer.
    Arrived,
    /// It is an infinity that may be meant, as in a mask. But a loss or gradient was not finite, and there is no other
    /// reason.
    Perhaps,
}

/// A place in a peer's Program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoisonPlace {
    /// The result of a node.
    Node {
        /// The node.
        node: NodeId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// A parameter's gradient: the sum over micro-batches and parts, or its norm.
    Gradient {
        /// The parameter.
        parameter: ValueId,
    },
    /// A parameter, buffer or constant, as it was before the pass.
    Kept {
        /// The parameter, buffer or constant.
        value: ValueId,
    },
    /// A parameter's optimizer state, as it was before the pass.
    OptimizerState {
        /// The parameter.
        parameter: ValueId,
    },
    /// A message.
    Message {
        /// What it carried.
        slot: Slot,
        /// The sender.
        from: PeerId,
    },
}

impl Poison {
    /// The same place for all micro-batches.
    pub fn of_any_micro_batch(mut self) -> Self {
        use PoisonPlace::{Message, Node};
        match &mut self.place {
            Node { micro_batch, .. }
            | Message { slot: Slot::Value { micro_batch, .. } | Slot::Buffer { micro_batch, .. }, .. } => {
                *micro_batch = 0;
            }
            _ => {}
        }
        self
    }
}
