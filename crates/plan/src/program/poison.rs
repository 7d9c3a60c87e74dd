//! Where a number was first not finite: what a peer says of a pass that was inspected.

use serde::{Deserialize, Serialize};

use super::{Address, PeerId};

/// A number that is NaN or infinite, as the peer that met it says. It holds numbers of the peer's Program and no text,
/// so whoever reads it can check it, and names the place in its own words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Poison {
    /// How sure it is that the number arose there.
    pub cause: Cause,
    /// The tensor in which it was met. One that stays from pass to pass was so before the pass.
    pub tensor: Address,
    /// The sender, if it was met in a message.
    pub from: Option<PeerId>,
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

impl Poison {
    /// The same place for all micro-batches.
    pub fn of_any_micro_batch(mut self) -> Self {
        if let Address::Value { micro_batch, .. } | Address::BufferAfter { micro_batch, .. } = &mut self.tensor {
            *micro_batch = 0;
        }
        self
    }
}
