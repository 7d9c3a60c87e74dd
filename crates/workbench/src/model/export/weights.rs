//! The weights of a model, as the folder that they came from has them.

use std::collections::BTreeMap;
use std::path::Path;

use fusionllm_data::weights::Weights;
use fusionllm_data::{write_atomic, write_each};
use fusionllm_graph::{DType, TensorType};
use fusionllm_workspace::config::Family;
use serde_json::json;

use super::WEIGHTS;
use crate::WorkbenchError;
use crate::model::{SavedModel, forward};

/// The list of the files of a model that has several.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// A parameter or buffer of a model, and how its folder has it.
pub(super) struct Stored {
    /// The graph's name of it.
    pub(super) name: String,
    /// Its type in the graph.
    pub(super) ty: TensorType,
    /// The element type of the weights that the training started from, if they are still there. Otherwise, it is the one
    /// that the model's `config.json` names, or f32.
    pub(super) dtype: DType,
    /// The number of its file among those that the training started from.
    file: usize,
}

/// All parameters and buffers of a model.
pub(super) fn stored(model: &SavedModel) -> Result<Vec<Stored>, WorkbenchError> {
    let graph = forward(&model.network.family, 1, 1.max(model.network.context.min(SHORT)))?;
    let source = model.network.weights.as_ref().and_then(|path| Weights::open(path).ok());
    let types: BTreeMap<&str, TensorType> = source.iter().flat_map(Weights::tensor_types).collect();
    let default = default_type(&model.network.family);
    let file_of = |name: &str| source.as_ref().and_then(|source| source.file_of(name)).unwrap_or(0);
    let parameters = graph.values.iter().filter(|v| v.kind.init().is_some());
    Ok(parameters
        .map(|v| {
            let dtype = match v.ty.dtype.is_float() {
                true => types.get(v.name.as_str()).map_or(default, |ty| ty.dtype),
                false => v.ty.dtype,
            };
            Stored { name: v.name.clone(), ty: v.ty.clone(), dtype, file: file_of(&v.name) }
        })
        .collect())
}

/// Writes all parameters and buffers, with the graph's names, and the element types and files that [`stored`] finds.
/// Returns the names of the files.
pub(super) fn write(model: &SavedModel, directory: &Path) -> Result<Vec<String>, WorkbenchError> {
    let mut types: BTreeMap<String, TensorType> = BTreeMap::new();
    let mut files: BTreeMap<usize, Vec<(String, TensorType)>> = BTreeMap::new();
    for Stored { name, ty, dtype, file } in stored(model)? {
        files.entry(file).or_default().push((name.clone(), TensorType::new(dtype, ty.shape.clone())));
        types.insert(name, ty);
    }
    let count = files.len();
    let (mut names, mut weight_map, mut total) = (Vec::new(), BTreeMap::new(), 0);
    for (number, tensors) in (1..).zip(files.into_values()) {
        let file = match count {
            1 => WEIGHTS.to_owned(),
            _ => format!("model-{number:05}-of-{count:05}.safetensors"),
        };
        total += tensors.iter().map(|(_, ty)| ty.bytes()).sum::<usize>();
        weight_map.extend(tensors.iter().map(|(name, _)| (name.clone(), file.clone())));
        write_each(&directory.join(&file), &tensors, |name, written| {
            let tensor = model.read(name, types.get(name).unwrap_or(written))?;
            Ok::<_, WorkbenchError>(if tensor.ty() == written { tensor } else { tensor.cast(written.dtype)? })
        })?;
        names.push(file);
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_atomic(&directory.join(INDEX), format!("{index:#}").as_bytes())?;
        names.push(INDEX.to_owned());
    }
    Ok(names)
}

/// The parameters do not depend on the length of samples, which is kept short.
const SHORT: usize = 32;

/// The element type that a model's own settings name.
fn default_type(family: &Family) -> DType {
    let Family::Decoder(decoder) = family else { return DType::F32 };
    let named = ["dtype", "torch_dtype"].into_iter().find_map(|key| decoder.config.get(key)?.as_str());
    match named {
        Some("bfloat16") => DType::BF16,
        Some("float16") => DType::F16,
        _ => DType::F32,
    }
}
