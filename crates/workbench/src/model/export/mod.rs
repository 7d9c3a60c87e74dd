//! Writes trained models for other programs.

mod gguf;
mod peft;
mod tokenizer;
mod weights;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fusionllm_data::Tokenizer;
use fusionllm_data::{DiskError, write_atomic, write_tensors};
use fusionllm_models::Gpt2Config;
use fusionllm_workspace::config::Family;
use serde_json::{Value, json};

pub use gguf::{Gguf, gguf};
pub use peft::peft;

use super::SavedModel;
use super::adapters::PEFT_FILE;
use crate::WorkbenchError;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Writes a language model into `directory` as `config.json` and `model.safetensors`, and its tokenizer, if that is
/// known, as `tokenizer.json` and `tokenizer_config.json`, or as the files that it was read from. `AutoModelForCausalLM` and `AutoTokenizer` of Hugging Face's
/// `transformers` load them. The weights have the element types and the shards of the folder that the training started
/// from, if it is still there. Returns the names of the files.
///
/// # Errors
///
/// The model is no language model, the directory holds a model, the checkpoint is damaged, or the disk fails.
pub fn hugging_face(model: &SavedModel, directory: &Path) -> Result<Vec<String>, WorkbenchError> {
    not_imported(model)?;
    let tokenizer = model.network.tokenizer.as_ref();
    let Some(config) = published_config(&model.network.family, tokenizer) else {
        return Err(WorkbenchError::input_with_hint(
            format!("{}: this is a ResNet, which `transformers` has in another form", model.path().display()),
            "write it under torchvision's names: --format torchvision",
        ));
    };
    claim(directory)?;
    let mut files = weights::write(model, directory)?;
    let mut json = vec![(CONFIG, config)];
    match tokenizer {
        Some(Tokenizer::File(_)) | None => {}
        Some(own) => {
            json.push((TOKENIZER, tokenizer::tokenizer_json(own)));
            json.push((TOKENIZER_CONFIG, tokenizer::tokenizer_config_json(own, model.network.context)));
        }
    }
    for (name, value) in json {
        let text = serde_json::to_vec_pretty(&value).map_err(|e| WorkbenchError::State(format!("{name}: {e}")))?;
        write_atomic(&directory.join(name), &text)?;
        files.push(name.to_owned());
    }
    // The model has a configuration of its own.
    let given = tokenizer.map(Tokenizer::files).unwrap_or_default().into_iter().filter(|(name, _)| *name != CONFIG);
    for (name, path) in given {
        let content = fs::read(&path).map_err(DiskError::at(&path, "read"))?;
        write_atomic(&directory.join(name), &content)?;
        files.push(name.to_owned());
    }
    Ok(files)
}

/// Writes a ResNet into `directory` as `model.safetensors`, with torchvision's names, for `load_state_dict`. Returns
/// the name of the file.
///
/// # Errors
///
/// The same as those of [`hugging_face`].
pub fn torchvision(model: &SavedModel, directory: &Path) -> Result<Vec<String>, WorkbenchError> {
    not_imported(model)?;
    let Family::Resnet(_) = &model.network.family else {
        return Err(WorkbenchError::input_with_hint(
            format!("{}: torchvision has no GPT-2", model.path().display()),
            "write it for `transformers`: --format hf",
        ));
    };
    claim(directory)?;
    weights::write(model, directory)
}

fn not_imported(model: &SavedModel) -> Result<(), WorkbenchError> {
    match model.network.family {
        Family::Imported { .. } => Err(WorkbenchError::input_with_hint(
            format!("{}: this model was imported from torch.export", model.path().display()),
            "write its state_dict with --format pt2-weights",
        )),
        _ => Ok(()),
    }
}

/// Writes the whole `state_dict` of a model from `torch.export` into `directory` as `model.safetensors`, for
/// `load_state_dict`. Returns the name of the file.
///
/// # Errors
///
/// The model is not imported, the directory holds a model, the archive is gone, the checkpoint is damaged, or the
/// disk fails.
pub fn pt2_weights(model: &SavedModel, directory: &Path) -> Result<Vec<String>, WorkbenchError> {
    let Family::Imported { file, loss } = &model.network.family else {
        return Err(WorkbenchError::input_with_hint(
            format!("{}: this model was not imported", model.path().display()),
            "write it with --format hf (GPT-2) or --format torchvision (ResNet)",
        ));
    };
    let options = fusionllm_import::ImportOptions { loss: loss.clone(), ..Default::default() };
    let mut source = super::imported::ImportedModel::open(file, None, options)?;
    claim(directory)?;
    let names: Vec<String> = source.archive().state_dict_names().map(str::to_owned).collect();
    let mut tensors = BTreeMap::new();
    for name in names {
        let imported = source.imported();
        // Tied parameters are trained under one name and written under all of their names.
        let own = imported.tied.get(&name).unwrap_or(&name);
        let tensor = match imported.graph.find(own).map(|v| imported.graph.value(v)) {
            Some(value) if value.kind.init().is_some() => model.read(own, &value.ty)?,
            _ => match imported.kept.get(&name) {
                Some(kept) if model.has(&name) => model.read(&name, kept.ty())?,
                // Earlier versions did not save it.
                _ => source.archive().state_dict_tensor(&name)?,
            },
        };
        tensors.insert(name, tensor);
    }
    write_tensors(&directory.join(WEIGHTS), &tensors)?;
    Ok(vec![WEIGHTS.to_owned()])
}

/// The `config.json` of a language model. `None` for another model.
pub fn published_config(family: &Family, tokenizer: Option<&Tokenizer>) -> Option<Value> {
    match family {
        Family::Gpt2(config) => Some(config_json(config, tokenizer)),
        Family::Decoder(decoder) => Some(decoder.config.clone().into()),
        Family::Resnet(_) | Family::Imported { .. } => None,
    }
}

/// The `config.json` of a GPT-2.
pub fn config_json(config: &Gpt2Config, tokenizer: Option<&Tokenizer>) -> Value {
    // The byte tokenizer has no token for the end of a text, and Hugging Face's default is outside its vocabulary.
    let known = |token: &u32| (*token as usize) < config.vocab_size;
    let start = tokenizer.and_then(Tokenizer::start_of_text).filter(known);
    let end = tokenizer.and_then(Tokenizer::end_of_text).filter(known);
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
        "bos_token_id": start,
        "eos_token_id": end,
        "torch_dtype": "float32",
    })
}

/// Makes the directory, and refuses one that holds a model.
fn claim(directory: &Path) -> Result<(), WorkbenchError> {
    fs::create_dir_all(directory).map_err(DiskError::at(directory, "created"))?;
    match [CONFIG, WEIGHTS, weights::INDEX, PEFT_FILE, TOKENIZER, TOKENIZER_CONFIG, gguf::GGUF]
        .into_iter()
        .find(|name| directory.join(name).exists())
    {
        Some(name) => Err(WorkbenchError::input_with_hint(
            format!("{}: there is a {name} already", directory.display()),
            "choose another directory with -o, or remove that one",
        )),
        None => Ok(()),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use fusionllm_graph::{DType, HostTensor};

    use super::*;
    use crate::model::imported::ImportedModel;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode()
    }

    /// Exported and imported models have the mode that the umask of the user gives to any new file.
    #[test]
    fn written_models_have_the_usual_mode() {
        let dir = tempfile::tempdir().unwrap();
        let [usual, source, exported, imported] =
            ["usual", "source", "exported", "imported"].map(|name| dir.path().join(name));
        fs::write(&usual, "").unwrap();

        let config =
            Gpt2Config { vocab_size: 8, n_positions: 2, n_embd: 8, n_layer: 1, n_head: 1, ..Gpt2Config::default() };
        fs::create_dir(&source).unwrap();
        fs::write(source.join(CONFIG), config_json(&config, None).to_string()).unwrap();
        let graph = config.build(1, 2, DType::F32).unwrap();
        let state = graph.parameters().chain(graph.buffers()).map(|v| graph.value(v));
        let zeros = |ty: &fusionllm_graph::TensorType| HostTensor::from_bytes(ty.clone(), vec![0; ty.bytes()]).unwrap();
        let tensors: BTreeMap<&str, HostTensor> = state.map(|v| (v.name.as_str(), zeros(&v.ty))).collect();
        write_tensors(&source.join(WEIGHTS), &tensors).unwrap();
        hugging_face(&SavedModel::open(&source, None).unwrap(), &exported).unwrap();

        let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo/opt.pt2");
        let options = fusionllm_import::ImportOptions::default();
        ImportedModel::open(&archive, None, options).unwrap().write(&imported).unwrap();

        for directory in [exported, imported] {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                assert_eq!(mode(&path), mode(&usual), "{}", path.display());
            }
        }
    }
}
