//! Trained models in other programs' files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use fusionllm_graph::models::Gpt2Config;
use fusionllm_graph::{HostTensor, ValueKind};
use safetensors::SafeTensorError;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::NodeError;
use crate::config::Family;
use crate::data::Tokenizer;
use crate::disk::{DiskError, write_atomic};
use crate::saved::SavedModel;
use crate::weights::stored_dtype;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// Writes a GPT-2 into `directory` as `config.json` and `model.safetensors`, which `GPT2LMHeadModel.from_pretrained` of
/// Hugging Face's `transformers` loads.
///
/// # Errors
///
/// The model is no GPT-2, a model is there already, the checkpoint is damaged, or the disk fails.
pub fn hugging_face(model: &SavedModel, directory: &Path) -> Result<(), NodeError> {
    not_imported(model)?;
    let Family::Gpt2(config) = &model.network.family else {
        return Err(NodeError::Input(format!(
            "{}: this is a ResNet, which `transformers` has in another form\n  hint: write it under torchvision's names: --format torchvision",
            model.path().display()
        )));
    };
    claim(directory)?;
    write_weights(model, directory)?;
    let config = serde_json::to_vec_pretty(&config_json(config, model.network.tokenizer))
        .map_err(|e| NodeError::State(format!("{CONFIG}: {e}")))?;
    Ok(write_atomic(&directory.join(CONFIG), &config)?)
}

/// Writes a ResNet into `directory` as `model.safetensors` under the names of torchvision's models, for
/// `load_state_dict`.
///
/// # Errors
///
/// As for [`hugging_face`].
pub fn torchvision(model: &SavedModel, directory: &Path) -> Result<(), NodeError> {
    not_imported(model)?;
    let Family::Resnet(_) = &model.network.family else {
        return Err(NodeError::Input(format!(
            "{}: torchvision has no GPT-2\n  hint: write it for `transformers`: --format hf",
            model.path().display()
        )));
    };
    claim(directory)?;
    write_weights(model, directory)
}

fn not_imported(model: &SavedModel) -> Result<(), NodeError> {
    match model.network.family {
        Family::Imported { .. } => Err(NodeError::Input(format!(
            "{}: this model was imported from torch.export\n  hint: write its state_dict with --format pt2-weights",
            model.path().display()
        ))),
        _ => Ok(()),
    }
}

/// Writes what a model from `torch.export` has learned into `directory` as `model.safetensors`: the whole `state_dict` of the exported module, for
/// `load_state_dict`.
///
/// # Errors
///
/// The model is of another kind, a model is there already, the archive is gone or the checkpoint is damaged, or the disk fails.
pub fn pt2_weights(model: &SavedModel, directory: &Path) -> Result<(), NodeError> {
    let Family::Imported { file } = &model.network.family else {
        return Err(NodeError::Input(format!(
            "{}: this model was not imported\n  hint: write it with --format hf (GPT-2) or --format torchvision (ResNet)",
            model.path().display()
        )));
    };
    let mut source = crate::imported::Model::open(file, fusionllm_import::ImportOptions::default())?;
    claim(directory)?;
    let names: Vec<String> = source.archive().state_dict_names().map(str::to_owned).collect();
    let mut tensors = BTreeMap::new();
    for name in names {
        let imported = source.imported();
        // Tied parameters are trained under one name and written under each.
        let own = imported.tied.get(&name).unwrap_or(&name);
        let tensor = match imported.graph.find(own).map(|v| imported.graph.value(v)) {
            Some(value) if matches!(value.kind, ValueKind::Parameter(_) | ValueKind::Buffer(_)) => {
                model.read(own, &value.ty)?
            }
            _ => source.archive().state_dict_tensor(&name)?,
        };
        tensors.insert(name, tensor);
    }
    write_tensors(&directory.join(WEIGHTS), &tensors)
}

/// A GPT-2's `config.json`.
pub fn config_json(config: &Gpt2Config, tokenizer: Option<Tokenizer>) -> Value {
    // A vocabulary of bytes has no token for the ends of a text; Hugging Face's default would point outside it.
    let end = tokenizer.and_then(Tokenizer::start_of_text).filter(|t| (*t as usize) < config.vocab_size);
    json!({
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.n_inner,
        "activation_function": config.activation_function,
        "resid_pdrop": config.resid_pdrop,
        "embd_pdrop": config.embd_pdrop,
        "attn_pdrop": config.attn_pdrop,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
    })
}

/// Makes the directory; a model in it stays as it is.
fn claim(directory: &Path) -> Result<(), NodeError> {
    fs::create_dir_all(directory).map_err(DiskError::at(directory, "created"))?;
    match [CONFIG, WEIGHTS].into_iter().find(|name| directory.join(name).exists()) {
        Some(name) => Err(NodeError::Input(format!(
            "{}: there is a {name} already\n  hint: choose another directory with -o, or remove that one",
            directory.display()
        ))),
        None => Ok(()),
    }
}

/// All parameters and buffers, under the graph's names.
fn write_weights(model: &SavedModel, directory: &Path) -> Result<(), NodeError> {
    let graph = model.network.forward(1, model.network.context)?;
    let mut tensors: BTreeMap<&str, HostTensor> = BTreeMap::new();
    for v in graph.values.iter().filter(|v| matches!(v.kind, ValueKind::Parameter(_) | ValueKind::Buffer(_))) {
        tensors.insert(&v.name, model.read(&v.name, &v.ty)?);
    }
    write_tensors(&directory.join(WEIGHTS), &tensors)
}

/// A safetensors file of these tensors, as PyTorch's libraries read them.
pub(crate) fn write_tensors<S: AsRef<str> + Ord>(
    path: &Path,
    tensors: &BTreeMap<S, HostTensor>,
) -> Result<(), NodeError> {
    let views = tensors
        .iter()
        .map(|(name, t)| Ok((name.as_ref(), TensorView::new(stored_dtype(t.dtype()), t.shape().to_vec(), t.bytes())?)));
    // Hugging Face's libraries refuse a file that does not say this.
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let partial = path.with_extension("safetensors.partial");
    let written = views.collect::<Result<Vec<_>, SafeTensorError>>().and_then(|views| {
        safetensors::serialize_to_file(views, Some(about), &partial)?;
        Ok(fs::rename(&partial, path)?)
    });
    written.map_err(|e| {
        // The space is worth more than a second error.
        let _ = fs::remove_file(&partial);
        let source = match e {
            SafeTensorError::IoError(e) => e,
            e => std::io::Error::other(e),
        };
        NodeError::File(DiskError { path: path.to_owned(), action: "written", source })
    })
}
