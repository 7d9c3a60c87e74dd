//! The place where a number was first not finite, as a peer reports it of a pass that was inspected.

use serde::{Deserialize, Serialize};

use crate::{Address, PeerId};

/// A number that is NaN or infinite, as the peer that met it says. It holds numbers of the peer's Program and no text,
/// so whoever reads it can check it, and names the place in its own words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Poison {
    /// How sure it is that the number arose in this place.
    pub cause: Cause,
    /// The tensor in which the number was met. If it is a tensor that stays from pass to pass, it had the number before
    /// the pass.
    pub tensor: Address,
    /// The sender, if the number was met in a message.
    pub from: Option<PeerId>,
}

/// How sure it is that a number arose where it was met, the surest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Cause {
    /// The number was computed from finite numbers alone, or it was there before the pass.
    Arose,
    /// The number is NaN and was computed from an infinity. That infinity may be meant, as in a mask.
    FromInfinity,
    /// The number was already not finite when it arrived from another peer.
    Arrived,
    /// The number may be meant: an infinity as in a mask, or the mean over no targets. But a loss or gradient was not
    /// finite, and there is no other reason.
    Perhaps,
}

impl Poison {
    /// The same place for all micro-batches.
    pub fn of_any_micro_batch(mut self) -> Self {
        if let Address::Value { micro_batch, .. } | Address::BufferAfter { micro_batch, .. } = &mut self.tensor {
            *micro_batch = 0;
        }
        self
    }
}
