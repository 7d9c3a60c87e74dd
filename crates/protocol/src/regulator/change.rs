//! Changes of codecs, and their reasons.

use std::fmt;

use fusionllm_compress::Codec;
use fusionllm_graph::units::rate;
use fusionllm_plan::LinkCodec;
use fusionllm_program::PeerId;

/// A link's sender and receiver.
pub(super) type LinkEnds = (PeerId, PeerId);

/// Codecs for the plan's next version, or a warning about the present ones.
#[derive(Debug, Clone, PartialEq)]
pub struct CodecUpdate {
    /// The codecs of all links that have one.
    pub codecs: Vec<LinkCodec>,
    /// The changes and warnings, by link.
    pub changes: Vec<CodecChange>,
}

impl CodecUpdate {
    /// Whether any codec changes. Otherwise there are only warnings.
    pub fn changes_codecs(&self) -> bool {
        self.changes.iter().any(|c| c.before != c.now)
    }
}

/// The change of a link's codec.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CodecChange {
    /// The sending peer.
    pub from: PeerId,
    /// The receiving peer.
    pub to: PeerId,
    /// The codec so far.
    pub before: Codec,
    /// The codec from now on. In a warning it is the same.
    pub now: Codec,
    /// Why.
    pub reason: CodecChangeReason,
}

/// The reason why a link's codec changes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CodecChangeReason {
    /// The link's rate changed, in bytes per second.
    Rate {
        /// The rate when the codec was chosen.
        before: f64,
        /// The present rate.
        now: f64,
    },
    /// The rates of other links changed.
    OtherRates,
    /// The codec's relative error is too large.
    Error(f64),
    /// The loss rose.
    Loss {
        /// The lowest smoothed loss.
        least: f64,
        /// The present smoothed loss.
        now: f64,
    },
    /// The loss or the gradient is not finite.
    NotFinite,
}

impl fmt::Display for CodecChangeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Rate { before, now } => {
                let verb = if now < before { "fell" } else { "rose" };
                write!(f, "its rate {verb} from {} to {}", rate(before), rate(now))
            }
            Self::OtherRates => f.write_str("the rates of other links changed"),
            Self::Error(error) => write!(f, "the relative error of its tensors is {:.0} %", 100.0 * error),
            Self::Loss { least, now } => write!(f, "the loss rose from {least:.3} to {now:.3}"),
            Self::NotFinite => f.write_str("the loss or gradient was not finite"),
        }
    }
}
