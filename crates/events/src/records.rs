//! Figures of a step, and of an interruption.

use serde::{Deserialize, Serialize};

/// A line of `metrics.jsonl`. Numbers that are not finite are written as `null`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps done, including this one.
    pub step: u64,
    /// Mean loss over the targets of the step, before the update.
    pub loss: Option<f64>,
    /// Duration of the step in seconds.
    pub step_s: f64,
    /// Tokens per second; images per second; samples per second for an imported model whose targets are unknown.
    pub tokens_per_s: f64,
    /// Bytes of tensors sent between peers.
    pub bytes_sent: u64,
    /// Learning rate of the update.
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: Option<f64>,
    /// Whether the update was skipped, because the loss or the gradient was not finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Codec changes of this step and warnings about codecs, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub codecs: Vec<String>,
    /// Spectra of compressed tensors, in steps that `compression.spectral_watch` selects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spectra: Vec<Spectrum>,
    /// Mean loss over the held-out targets, if it was measured after this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Fraction of the held-out targets that have the largest logit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_accuracy: Option<f64>,
}

/// The stable rank ‖X‖_F² / σ₁² of a tensor before and after a codec. Of the tensors that one micro-batch sends on a
/// link, it is the one with the largest stable rank.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Spectrum {
    /// The sending peer.
    pub from: String,
    /// The receiving peer.
    pub to: String,
    /// The stable rank of the tensor before encoding.
    pub before: f64,
    /// The stable rank of the decoded tensor.
    pub after: f64,
}

/// An interruption of training, after which it went on with other members or another plan.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct IncidentSummary {
    /// `lost`, `silent`, `expelled`, `kicked`, `link` or `left`.
    pub kind: String,
    /// The peer.
    pub peer: String,
    /// The last step that was complete.
    pub step: u64,
    /// The step that training went back to.
    pub restarted_at: u64,
    /// Seconds from the peer's last sign of life until the broker acted.
    pub detected_s: f64,
    /// Seconds from then until there was a new plan.
    pub replanned_s: f64,
    /// Seconds from then until all peers were ready.
    pub restored_s: f64,
    /// Bytes of the tensors that peers needed for that: from each other, and from the broker.
    #[serde(default)]
    pub restored_bytes: u64,
    /// Seconds of training that were lost.
    pub lost_work_s: f64,
}
