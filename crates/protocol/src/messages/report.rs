//! A peer's report of a pass.

use fusionllm_plan::Activity;
use fusionllm_program::{PeerId, Poison};
use serde::{Deserialize, Serialize};

/// A peer's measurements of one pass. Lists are in the order of peers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PassReport {
    /// Seconds without waiting.
    pub compute_s: f64,
    /// Seconds of waiting for messages.
    pub wait_s: f64,
    /// Seconds in total.
    pub total_s: f64,
    /// Most bytes allocated at once since the previous pass: tensors, message buffers and everything else.
    pub peak_bytes: u64,
    /// Most bytes of the peer's process that the system has kept in memory so far; 0 if the system does not report it.
    pub resident_bytes: u64,
    /// Seconds of encoding and decoding, in parallel to computing.
    pub codec_s: f64,
    /// Bytes sent to each peer.
    pub sent: Vec<SentBytes>,
    /// Errors of the codecs of each link.
    pub errors: Vec<CodecError>,
    /// Stable ranks on each link, in steps that measure them.
    pub spectra: Vec<CodecSpectrum>,
    /// Large messages received from each peer.
    pub received: Vec<ReceivedBytes>,
    /// The peer's activities in order, at most [`MAX_SPANS`]; none in an evaluation.
    pub spans: Vec<PassSpan>,
    /// The messages that came from other peers, at most [`MAX_SPANS`]; none in an evaluation.
    pub arrivals: Vec<ReceivedMessage>,
    /// The place where a number was first not finite, in a pass that the broker had inspected.
    pub poison: Option<Poison>,
}

/// Most activities, and most messages, in a report. Those of a longer pass are left out from there on.
pub const MAX_SPANS: usize = 4096;

/// A time in which a peer did one thing. Times are in microseconds since the pass began on this peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassSpan {
    /// The activity.
    pub activity: Activity,
    /// The micro-batch that it was for, if one.
    pub micro_batch: Option<u32>,
    /// Its start.
    pub start_us: u64,
    /// Its end.
    pub end_us: u64,
}

/// A message from another peer. Times are in microseconds since the pass began on this peer; a message that came before
/// has 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivedMessage {
    /// The sender.
    pub from: PeerId,
    /// Bytes of payload.
    pub bytes: u64,
    /// The arrival of its first byte.
    pub start_us: u64,
    /// The arrival of its last byte.
    pub end_us: u64,
}

/// Bytes sent to one peer in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SentBytes {
    /// The receiver.
    pub to: PeerId,
    /// Bytes of payload.
    pub bytes: u64,
}

/// The largest error of a codec among the tensors of one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecError {
    /// The receiver.
    pub to: PeerId,
    /// |decoded - exact| / |exact|, in the Euclidean norm.
    pub relative_error: f64,
}

/// The largest stable rank among the tensors of one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecSpectrum {
    /// The receiver.
    pub to: PeerId,
    /// The stable rank of the exact tensor.
    pub exact: f64,
    /// The stable rank of the same tensor, decoded.
    pub decoded: f64,
}

/// Large messages from one peer in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReceivedBytes {
    /// The sender.
    pub from: PeerId,
    /// Bytes of payload.
    pub bytes: u64,
    /// Seconds from each message's first byte to its last, summed.
    pub seconds: f64,
}
