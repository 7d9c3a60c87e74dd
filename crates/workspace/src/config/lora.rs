//! `[lora]`: low-rank adapters, which are trained instead of the network's own parameters.

use std::path::PathBuf;

use fusionllm_graph::lora::{Adapters, names};
use serde::Serialize;

use super::files::Files;
use super::reader::{JobError, Section};

/// Low-rank adapters beside frozen linear layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lora {
    /// The rank of an adapter. Default 16.
    pub rank: usize,
    /// An adapter's result is scaled by `alpha / rank`. Default twice the rank.
    pub alpha: f64,
    /// The probability with which an adapter drops an element of what it reads. Default 0.
    pub dropout: f64,
    /// Patterns of the layers that get an adapter. If empty, all linear layers of the blocks get one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<String>,
    /// The adapters to start from: a folder that PEFT wrote, or its safetensors file. Without them, `train.seed` decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
}

impl Lora {
    /// The size and the strength of the adapters.
    pub fn adapters(&self) -> Adapters {
        Adapters { rank: self.rank, scale: self.alpha / self.rank as f64, dropout: self.dropout }
    }

    /// Reads the section, if it is there. The weights that it names may be missing.
    pub(super) fn read(section: &Section<'_>, files: &Files) -> Result<Option<Self>, JobError> {
        if !section.is_written() {
            return Ok(None);
        }
        let rank = section.size("rank", 1)?.unwrap_or(16);
        let lora = Self {
            rank,
            alpha: section.number("alpha", "above 0", |x| x > 0.0)?.unwrap_or(2.0 * rank as f64),
            dropout: section.number("dropout", "at least 0 and below 1", |p| (0.0..1.0).contains(&p))?.unwrap_or(0.0),
            targets: patterns(section, "targets", "write targets = [\"q_proj\", \"v_proj\"], or leave it out")?,
            weights: files.named(section, "weights")?,
        };
        section.finish()?;
        Ok(Some(lora))
    }
}

/// Whether a job with these settings leaves a parameter as it is.
pub(super) fn freezes(lora: Option<&Lora>, freeze: &[String], parameter: &str) -> bool {
    lora.is_some() || freeze.iter().any(|pattern| names(pattern, parameter))
}

/// Patterns of names, as [`fusionllm_graph::lora::names`] understands them.
pub(super) fn patterns(section: &Section<'_>, key: &'static str, hint: &str) -> Result<Vec<String>, JobError> {
    Ok(section.texts(key, hint)?.unwrap_or_default().into_iter().map(str::to_owned).collect())
}
