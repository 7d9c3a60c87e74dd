//! The record that a run writes of itself, in `summary.json`.

use std::collections::BTreeMap;

use fusionllm_events::IncidentSummary;
use fusionllm_plan::Activity;
use serde::{Deserialize, Serialize};

/// The content of `summary.json`. Unknown values are `None`, written as `null`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Steps done.
    pub steps: u64,
    /// Steps of this session that were skipped, because the loss or a gradient was not finite.
    #[serde(default)]
    pub skipped_steps: u64,
    /// The last place where a number was first not finite, with advice. It is left out if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_because: Option<String>,
    /// Loss of the first step.
    pub loss_first: Option<f64>,
    /// Loss of the last step.
    pub loss_last: Option<f64>,
    /// Median duration of a step in seconds.
    pub median_step_s: Option<f64>,
    /// Predicted duration of a step in seconds.
    pub predicted_step_s: Option<f64>,
    /// Mean bytes of tensors sent between peers in a step.
    pub bytes_sent_per_step: Option<u64>,
    /// Time in steps divided by the time of the whole run. Steps that were done again count once.
    pub training_overhead_ratio: Option<f64>,
    /// The seconds that were lost, by cause: `start` until the first step began, and incidents by their kind. `copies`
    /// are seconds by which copies slowed down steps. The last checkpoint takes most of the time that is left.
    #[serde(default)]
    pub overhead_s: BTreeMap<String, f64>,
    /// The scheduler that made the plan.
    pub scheduler: String,
    /// The pipeline schedule.
    #[serde(default)]
    pub schedule: String,
    /// Micro-batches per step.
    #[serde(default)]
    pub micro_batches: u32,
    /// The compression setting.
    pub compression: String,
    /// The peers, in the order of the plan.
    pub peers: Vec<PeerSummary>,
    /// The links that carried tensors, sorted by the names of their ends.
    pub links: Vec<LinkSummary>,
    /// Interruptions of training.
    #[serde(default)]
    pub incidents: Vec<IncidentSummary>,
}

/// The activities of all peers in one training step. Times are in seconds since the first peer began, on one clock for
/// all peers: they are aligned by the verdict, which the broker sends to all of them at once.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepTrace {
    /// The step.
    pub step: u64,
    /// Its duration in seconds.
    pub step_s: f64,
    /// The peers, in the order of the plan.
    pub peers: Vec<PeerTrace>,
}

/// The activities of one peer in a step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PeerTrace {
    /// The peer's name.
    pub name: String,
    /// Its activities in order: what it did, the micro-batch if it was for one, start and end.
    pub spans: Vec<(Activity, Option<u32>, f64, f64)>,
    /// The messages that came from other peers: the sender's place in the list of peers, bytes, and the arrival of the
    /// first and the last byte.
    pub arrivals: Vec<(u32, u64, f64, f64)>,
}

/// A peer in the summary.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PeerSummary {
    /// The peer's name.
    pub name: String,
    /// The peer's backend.
    pub backend: String,
    /// The peer's device. For the backend `cpu`, it includes the vector instructions of its kernels. Bits are the same
    /// on devices that are equal in these.
    #[serde(default)]
    pub device: String,
    /// Number of the peer's forward and backward operators.
    pub operators: u64,
    /// Median seconds of computation in a step.
    pub compute_s: Option<f64>,
    /// Predicted seconds of computation in a step.
    #[serde(default)]
    pub predicted_compute_s: Option<f64>,
    /// Median seconds of encoding and decoding in a step. `compute_s` excludes them.
    #[serde(default)]
    pub codec_s: Option<f64>,
    /// Peak of the bytes allocated during training: tensors, network buffers and everything else.
    pub peak_memory_bytes: Option<u64>,
    /// Peak resident memory of its process.
    #[serde(default)]
    pub resident_memory_bytes: Option<u64>,
    /// Predicted peak of `peak_memory_bytes`.
    pub predicted_memory_bytes: Option<u64>,
}

/// A link in the summary, in one direction.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LinkSummary {
    /// The sending peer.
    pub from: String,
    /// The receiving peer.
    pub to: String,
    /// The codec.
    pub codec: String,
    /// Compression ratio: bytes before encoding divided by bytes sent.
    pub ratio: Option<f64>,
    /// Relative error ‖received − original‖ / ‖original‖: the largest of a step, as the median over the steps. `None`
    /// without a codec.
    #[serde(default)]
    pub relative_error: Option<f64>,
    /// Bytes per step.
    pub bytes_per_step: Option<u64>,
    /// Measured rate while sending.
    pub measured_bytes_per_s: Option<f64>,
}
