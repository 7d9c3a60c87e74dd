//! A peer's report of a pass.

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
    /// The place where a number was first not finite, in a pass that the broker had inspected.
    pub poison: Option<Poison>,
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
