//! A network card.

use serde::{Deserialize, Serialize};

/// The bytes/s of a network card in each direction; `None` where nothing is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Card {
    /// Bytes/s that leave the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outward: Option<f64>,
    /// Bytes/s that enter it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inward: Option<f64>,
}

impl Card {
    /// A card with the same rate in both directions.
    pub const fn new(rate: f64) -> Self {
        Self { outward: Some(rate), inward: Some(rate) }
    }

    /// Whether nothing is known of it.
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }

    /// Its rate in one direction.
    pub fn rate(self, outward: bool) -> Option<f64> {
        if outward { self.outward } else { self.inward }
    }

    /// The rates that are known.
    pub(super) fn rates(self) -> impl Iterator<Item = f64> {
        self.outward.into_iter().chain(self.inward)
    }

    /// The larger rate of two cards, in each direction.
    pub(crate) fn faster(self, other: Self) -> Self {
        Self { outward: faster(self.outward, other.outward), inward: faster(self.inward, other.inward) }
    }

    /// Its known rates, and those of another card where it has none.
    pub(super) fn or(self, other: Self) -> Self {
        Self { outward: self.outward.or(other.outward), inward: self.inward.or(other.inward) }
    }
}

/// The larger of two rates, if any is known.
fn faster(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    a.into_iter().chain(b).reduce(f64::max)
}
