//! `[lora]`: low-rank adapters, which are trained instead of the network's own parameters.

use std::path::{Path, PathBuf};

use fusionllm_graph::lora::{Adapters, names};
use serde::Serialize;
use serde_json::Value;

use super::files::Files;
use super::reader::{self, JobError, Json, Section};

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

    /// The settings of adapters in a folder that PEFT wrote.
    ///
    /// # Errors
    ///
    /// There is no `adapter_config.json`, or adapters of that kind are not supported.
    pub fn of_peft(folder: &Path) -> Result<Self, JobError> {
        let Some(Given { rank, alpha, targets }) = Given::read(folder)? else {
            let message = format!("there are no adapters here, because there is no {PEFT_CONFIG}");
            return Err(JobError::new(
                folder.display(),
                message,
                "give a folder that PEFT or `fusionllm export` wrote",
            ));
        };
        Ok(Self { rank, alpha, dropout: 0.0, targets, weights: Some(folder.to_owned()) })
    }

    /// Reads the section, if it is there. The weights that it names may be missing.
    pub(super) fn read(section: &Section<'_>, files: &Files) -> Result<Option<Self>, JobError> {
        if !section.is_written() {
            return Ok(None);
        }
        let weights = files.named(section, "weights")?;
        let given = weights.as_deref().map(Given::read).transpose()?.flatten();
        let rank = section.size("rank", 1)?.or(given.as_ref().map(|given| given.rank)).unwrap_or(16);
        let alpha = section.number("alpha", "above 0", |x| x > 0.0)?.or(given.as_ref().map(|given| given.alpha));
        let targets = patterns(section, "targets", "write targets = [\"q_proj\", \"v_proj\"], or leave it out")?;
        let lora = Self {
            rank,
            alpha: alpha.unwrap_or(2.0 * rank as f64),
            dropout: section.number("dropout", "at least 0 and below 1", |p| (0.0..1.0).contains(&p))?.unwrap_or(0.0),
            targets: given.as_ref().filter(|_| targets.is_empty()).map_or(targets, |given| given.targets.clone()),
            weights,
        };
        section.finish()?;
        if let Some(given) = given {
            // Other numbers would make another model of the same matrices.
            for (key, ours, theirs) in
                [("rank", lora.rank as f64, given.rank as f64), ("alpha", lora.alpha, given.alpha)]
            {
                if ours != theirs {
                    let message = format!("`lora.{key}` is {ours}, but the adapters of `lora.weights` have {theirs}");
                    return Err(section.error(key, message, format!("leave {key} out: {PEFT_CONFIG} has it")));
                }
            }
        }
        Ok(Some(lora))
    }
}

/// The settings of adapters in a folder that PEFT wrote.
const PEFT_CONFIG: &str = "adapter_config.json";

/// The settings that adapters were made with, as PEFT wrote them.
struct Given {
    rank: usize,
    alpha: f64,
    targets: Vec<String>,
}

impl Given {
    /// Reads the settings beside adapters. `None` if there are none.
    fn read(folder: &Path) -> Result<Option<Self>, JobError> {
        let path = folder.join(PEFT_CONFIG);
        if !path.is_file() {
            return Ok(None);
        }
        let Json { values, .. } = reader::parse_json(&path)?;
        let refused = |message: String| {
            JobError::new(path.display(), message, "give adapters that PEFT made as plain LoRA, without biases")
        };
        let set = |key: &str| match values.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Object(table)) => !table.is_empty(),
            Some(Value::String(text)) => text != "none",
            Some(_) => true,
        };
        let unknown = ["use_dora", "use_rslora", "bias", "rank_pattern", "alpha_pattern", "modules_to_save"];
        if let Some(key) = unknown.into_iter().find(|key| set(key)) {
            return Err(refused(format!("`{key}` is set, which is not supported")));
        }
        let rank = values.get("r").and_then(Value::as_u64).filter(|rank| *rank > 0);
        let alpha = values.get("lora_alpha").and_then(Value::as_f64).filter(|alpha| *alpha > 0.0);
        let Some((rank, alpha)) = rank.zip(alpha) else {
            return Err(refused("`r` and `lora_alpha` must be numbers above 0".to_owned()));
        };
        // A text is a pattern of another kind, or stands for all linear layers.
        let named = values.get("target_modules").and_then(Value::as_array).into_iter().flatten();
        let targets = named.filter_map(|name| Some(name.as_str()?.to_owned())).collect();
        Ok(Some(Self { rank: rank as usize, alpha, targets }))
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
