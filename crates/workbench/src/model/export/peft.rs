//! Adapters, as the Python library PEFT writes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fusionllm_data::{write_atomic, write_tensors};
use fusionllm_graph::lora::LinearLayer;
use serde_json::json;

use super::claim;
use crate::WorkbenchError;
use crate::model::SavedModel;
use crate::model::adapters::{AdaptedLayers, PEFT_CONFIG, PEFT_FILE, PEFT_PREFIX};

/// Writes the adapters of a run into `directory` as `adapter_config.json` and `adapter_model.safetensors`, for
/// `PeftModel.from_pretrained`. Returns the names of the files.
///
/// # Errors
///
/// The run trained no adapters, the directory holds a model, the checkpoint is damaged, or the disk fails.
pub fn peft(model: &SavedModel, directory: &Path) -> Result<Vec<String>, WorkbenchError> {
    let Some((lora, layers)) = model.network.lora.as_ref().zip(model.adapted_layers()) else {
        return Err(WorkbenchError::input_with_hint(
            format!("{}: this run trained no adapters", model.path().display()),
            "leave --format out, which writes the model itself",
        ));
    };
    claim(directory)?;
    let mut tensors = BTreeMap::new();
    for layer in layers.adapted() {
        for name in layer.adapter_names() {
            tensors.insert(format!("{PEFT_PREFIX}{name}"), model.read_adapter(&name)?);
        }
    }
    let base = model.network.weights.as_deref().map(|path| path.display().to_string());
    let config = json!({
        "peft_type": "LORA",
        "task_type": model.network.tokenizer.is_some().then_some("CAUSAL_LM"),
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": target_modules(&layers),
        "fan_in_fan_out": layers.adapted().any(|layer| layer.transposed),
        "bias": "none",
        "init_lora_weights": true,
        "inference_mode": true,
    });
    write_tensors(&directory.join(PEFT_FILE), &tensors)?;
    write_atomic(&directory.join(PEFT_CONFIG), format!("{config:#}\n").as_bytes())?;
    Ok(vec![PEFT_CONFIG.to_owned(), PEFT_FILE.to_owned()])
}

/// The layers with adapters, by the last parts of their names where all layers of that name have one, and else by whole
/// names.
fn target_modules(layers: &AdaptedLayers) -> BTreeSet<String> {
    let last = |layer: &LinearLayer| layer.name.rsplit('.').next().unwrap_or_default().to_owned();
    let partly: BTreeSet<String> = layers.0.iter().filter(|(_, adapted)| !adapted).map(|(l, _)| last(l)).collect();
    layers.adapted().map(|layer| if partly.contains(&last(layer)) { layer.name.clone() } else { last(layer) }).collect()
}
