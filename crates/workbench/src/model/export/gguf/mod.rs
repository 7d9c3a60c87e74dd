//! A model in one file of the format GGUF, which llama.cpp opens.
//!
//! `architecture.rs` says what llama.cpp computes and how it names things, `vocabulary.rs` how it cuts texts, and
//! `file.rs` writes the container.

mod architecture;
mod file;
mod pre_tokenizer;
mod tensors;
mod vocabulary;

use std::path::Path;

use fusionllm_graph::{DType, HostTensor, TensorType};
use fusionllm_models::Decoder;
use fusionllm_models::decoder::{NormKind, Rotary, Scaling};

use super::weights::{self, Stored};
use super::{claim, not_imported};
use crate::WorkbenchError;
use crate::model::SavedModel;
use architecture::{Architecture, Fit, Head, Local, POSITIONS};
use file::{Item, Items};
use tensors::{Change, plus_one};

/// The name of the file.
pub(super) const GGUF: &str = "model.gguf";

/// A model that was written for llama.cpp.
pub struct Gguf {
    /// The names of the files.
    pub files: Vec<String>,
    /// Sentences for the user about what is different there.
    pub notes: Vec<String>,
}

/// A tensor of the file.
struct Planned {
    name: String,
    ty: TensorType,
    content: Content,
}

/// The source of a tensor's elements.
enum Content {
    /// A parameter of the model, and its type there.
    Parameter { name: String, ty: TensorType, change: Change, plus_one: bool },
    /// Numbers that follow from the settings.
    Given(HostTensor),
}

/// Writes a language model with its tokenizer into `directory` as `model.gguf`. Adapters that a run trained are added
/// to the weights. Weights keep the element types of the folder that the training started from; those of one
/// dimension, and embeddings of positions, are f32. Tensors are read one by one.
///
/// # Errors
///
/// The model is no language model, llama.cpp does not compute it or cut texts as its tokenizer does, the directory
/// holds a model, the checkpoint is damaged, or the disk fails.
pub fn gguf(model: &SavedModel, directory: &Path) -> Result<Gguf, WorkbenchError> {
    not_imported(model)?;
    let refuse = |reason: &str| {
        WorkbenchError::input_with_hint(
            format!("{}: llama.cpp cannot compute this model: {reason}", model.path().display()),
            "write it for `transformers`: --format hf",
        )
    };
    let Some(decoder) = model.network.family.decoder()? else {
        return Err(WorkbenchError::input_with_hint(
            format!("{}: llama.cpp computes language models, and this is a ResNet", model.path().display()),
            "write it under torchvision's names: --format torchvision",
        ));
    };
    let architecture = Architecture::of(&decoder)
        .ok_or_else(|| refuse(&format!("it has no architecture for the family {}", decoder.model_type)))?;
    let fit = architecture.fit(&decoder).map_err(|reason| refuse(&reason))?;
    let vocabulary = vocabulary::read(model, decoder.vocab_size)?;
    let tensors = planned(model, &decoder, &fit)?;
    let mut items = settings(&decoder, &fit, &tensors);
    items.extend(vocabulary.items);
    claim(directory)?;
    let types: Vec<_> = tensors.iter().map(|tensor| (tensor.name.clone(), tensor.ty.clone())).collect();
    file::write(&directory.join(GGUF), &items, &types, |place| match tensors.get(place) {
        Some(tensor) => tensor.read(model, decoder.attention.head_dim),
        None => Err(WorkbenchError::State(format!("there is no tensor {place}"))),
    })?;
    let notes = fit.notes.into_iter().chain(vocabulary.notes).collect();
    Ok(Gguf { files: vec![GGUF.to_owned()], notes })
}

/// The tensors of the file.
fn planned(model: &SavedModel, decoder: &Decoder, fit: &Fit) -> Result<Vec<Planned>, WorkbenchError> {
    let mut planned = Vec::new();
    for Stored { name, ty, dtype, .. } in weights::stored(model)? {
        let unknown = || WorkbenchError::State(format!("{} has no tensor for {name}", fit.architecture.name));
        let (theirs, change) = fit.architecture.tensor(&name).ok_or_else(unknown)?;
        let is_norm = theirs.ends_with("norm.weight");
        let plus_one = is_norm && decoder.norm.kind == NormKind::RmsPlusOne;
        let exact = ty.shape.len() < 2 || theirs.starts_with(POSITIONS) || file::type_number(dtype).is_none();
        let dtype = if exact { DType::F32 } else { dtype };
        let written = TensorType::new(dtype, change.shape(&ty.shape));
        let content = |name: &str| Content::Parameter { name: name.to_owned(), ty: ty.clone(), change, plus_one };
        if decoder.tie_word_embeddings && fit.architecture.head == Head::Needed && theirs == "token_embd.weight" {
            planned.push(Planned { name: "output.weight".into(), ty: written.clone(), content: content(&name) });
        }
        planned.push(Planned { name: theirs, ty: written, content: content(&name) });
    }
    for (name, divisors) in fit.rotary.as_ref().map(divisors).unwrap_or_default() {
        let tensor = HostTensor::from_f32([divisors.len()], &divisors)?;
        planned.push(Planned { name: name.into(), ty: tensor.ty().clone(), content: Content::Given(tensor) });
    }
    Ok(planned)
}

impl Planned {
    fn read(&self, model: &SavedModel, head_dim: usize) -> Result<HostTensor, WorkbenchError> {
        match &self.content {
            Content::Given(tensor) => Ok(tensor.clone()),
            Content::Parameter { name, ty, change, plus_one: add } => {
                let tensor = model.read(name, ty)?;
                let tensor = if *add { plus_one(&tensor)? } else { tensor.cast(self.ty.dtype)? };
                Ok(change.apply(tensor, head_dim)?)
            }
        }
    }
}

/// The divisors of the frequencies of rotary embeddings, under their names, where they are not one number.
fn divisors(rotary: &Rotary) -> Vec<(&'static str, Vec<f32>)> {
    let single = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
    match &rotary.scaling {
        Scaling::Llama3 { positions, .. } => {
            let plain = Rotary { scaling: Scaling::Default, ..rotary.clone() }.frequencies(*positions);
            let scaled = rotary.frequencies(*positions);
            vec![("rope_freqs.weight", plain.iter().zip(scaled).map(|(plain, scaled)| plain / scaled).collect())]
        }
        Scaling::LongRope { short_factor, long_factor, .. } => {
            vec![("rope_factors_long.weight", single(long_factor)), ("rope_factors_short.weight", single(short_factor))]
        }
        Scaling::Default | Scaling::Linear { .. } | Scaling::Dynamic { .. } | Scaling::Yarn { .. } => Vec::new(),
    }
}

/// The metadata of the network.
fn settings(decoder: &Decoder, fit: &Fit, tensors: &[Planned]) -> Items {
    let size = |size: usize| Item::U32(u32::try_from(size).unwrap_or(u32::MAX));
    let number = |number: f64| Item::F32(number as f32);
    let attention = &decoder.attention;
    let epsilon = match decoder.norm.kind {
        NormKind::Rms | NormKind::RmsPlusOne => "attention.layer_norm_rms_epsilon",
        NormKind::Layer => "attention.layer_norm_epsilon",
    };
    let mut own: Vec<(&str, Item)> = vec![
        ("context_length", size(fit.context)),
        ("embedding_length", size(decoder.hidden_size)),
        ("block_count", size(decoder.layers.len())),
        ("feed_forward_length", size(decoder.intermediate_size)),
        ("attention.head_count", size(attention.heads)),
        ("attention.head_count_kv", size(attention.key_value_heads)),
        ("attention.key_length", size(attention.head_dim)),
        ("attention.value_length", size(attention.head_dim)),
        (epsilon, number(decoder.norm.eps)),
        ("vocab_size", size(decoder.vocab_size)),
    ];
    if fit.architecture.parallel {
        own.push(("use_parallel_residual", Item::Bool(decoder.parallel)));
    }
    let caps = [("attn_logit_softcapping", attention.soft_cap), ("final_logit_softcapping", decoder.logit_soft_cap)];
    own.extend(caps.into_iter().filter_map(|(key, cap)| Some((key, number(cap?)))));
    if let Some(rotary) = &fit.rotary {
        own.extend([("rope.dimension_count", size(rotary.dims)), ("rope.freq_base", number(rotary.theta))]);
        own.extend(scaling(rotary));
    }
    if let Some(Local { rotary, window }) = &fit.local {
        own.extend([("attention.sliding_window", size(*window)), ("rope.freq_base_swa", number(rotary.theta))]);
    }
    // llama.cpp names the type of most weights only to people.
    let weights = tensors.iter().filter(|tensor| tensor.ty.shape.len() > 1);
    let file_type = match weights.map(|tensor| tensor.ty.dtype).next() {
        Some(DType::F16) => 1,
        Some(DType::BF16) => 32,
        _ => 0,
    };
    let name = fit.architecture.name;
    let general = [
        ("general.architecture".to_owned(), Item::Text(name.to_owned())),
        ("general.type".to_owned(), Item::Text("model".to_owned())),
        ("general.file_type".to_owned(), Item::U32(file_type)),
    ];
    general.into_iter().chain(own.into_iter().map(|(key, item)| (format!("{name}.{key}"), item))).collect()
}

/// The metadata of the kinds of scaling that are numbers.
fn scaling(rotary: &Rotary) -> Vec<(&'static str, Item)> {
    let kind = |kind: &str| ("rope.scaling.type", Item::Text(kind.to_owned()));
    let factor = |factor: f64| ("rope.scaling.factor", Item::F32(factor as f32));
    let attention = |factor: f64| ("rope.scaling.attn_factor", Item::F32(factor as f32));
    let first = |positions: usize| {
        ("rope.scaling.original_context_length", Item::U32(u32::try_from(positions).unwrap_or(u32::MAX)))
    };
    match &rotary.scaling {
        Scaling::Default | Scaling::Dynamic { .. } | Scaling::Llama3 { .. } => Vec::new(),
        Scaling::Linear { factor: by } => vec![kind("linear"), factor(*by)],
        // llama.cpp multiplies by the usual factor of attention itself.
        Scaling::Yarn { factor: by, attention_factor, positions, .. } => {
            let usual = if *by <= 1.0 { 1.0 } else { 0.1 * by.ln() + 1.0 };
            vec![kind("yarn"), factor(*by), attention(attention_factor / usual), first(*positions)]
        }
        Scaling::LongRope { attention_factor, positions, .. } => {
            vec![kind("longrope"), attention(*attention_factor), first(*positions)]
        }
    }
}
