//! The state that a model starts from, as a file of weights has it.

use std::collections::BTreeSet;

use fusionllm_data::Differences;
use fusionllm_data::weights::Weights;
use fusionllm_graph::units::counted;
use fusionllm_graph::{Graph, StateTensor};
use fusionllm_workspace::config::Family;

use crate::WorkbenchError;

/// The token embedding of a GPT-2, and the head, which may be the same tensor.
const EMBEDDING_AND_HEAD: [&str; 2] = ["transformer.wte.weight", "lm_head.weight"];

/// Masks of attention that older versions of `transformers` write into files of a GPT-2.
const MASKS: [&str; 2] = [".attn.bias", ".attn.masked_bias"];

/// The most names that a note lists.
const MAX_NAMES: usize = 3;

/// The names under which files may have a tensor of a family that this program builds.
pub fn names(family: &Family, name: &str) -> Vec<String> {
    match family {
        Family::Gpt2(config) if config.tie_word_embeddings && name == EMBEDDING_AND_HEAD[0] => {
            EMBEDDING_AND_HEAD.map(str::to_owned).to_vec()
        }
        Family::Decoder(decoder) => decoder.checkpoint_names(name),
        _ => vec![name.to_owned()],
    }
}

/// The state of a family's network, under the names that files have for it. Adapters are not part of it.
pub fn state(family: &Family, graph: &Graph, adapters: &BTreeSet<String>) -> Vec<StateTensor> {
    let own = graph.state().filter(|tensor| tensor.names.iter().all(|name| !adapters.contains(name)));
    let known = |tensor: StateTensor| StateTensor {
        names: tensor.names.iter().flat_map(|name| names(family, name)).collect(),
        ..tensor
    };
    own.map(known).collect()
}

/// Compares a file of weights with the state of a family's network, and returns notes about their differences.
///
/// # Errors
///
/// The file is one of another model, or can no longer be read.
pub fn compare(weights: &Weights, family: &Family, state: &[StateTensor]) -> Result<Vec<String>, WorkbenchError> {
    let mut differences = weights.compare(state)?;
    if matches!(family, Family::Gpt2(_)) {
        differences.extra.retain(|name| !MASKS.iter().any(|mask| name.ends_with(mask)));
    }
    Ok(notes(weights, differences, "in a new model"))
}

/// Notes about a file that lacks buffers of the model or has further tensors. `place` has the buffers instead.
pub(super) fn notes(weights: &Weights, differences: Differences, place: &str) -> Vec<String> {
    let file = weights.path().display();
    let Differences { missing, extra } = differences;
    let lacking = (!missing.is_empty()).then(|| {
        let what = counted(missing.len(), "tensor");
        let they = if missing.len() == 1 { "it starts" } else { "they start" };
        format!("{file}: it lacks {what} of the model, so {they} as {place}: {}", listed(&missing))
    });
    let further = (!extra.is_empty()).then(|| {
        format!("{file}: the model has no place for {} in it: {}", counted(extra.len(), "tensor"), listed(&extra))
    });
    lacking.into_iter().chain(further).collect()
}

/// The first of these names, and the number of the others.
fn listed(names: &[String]) -> String {
    let (shown, rest) = names.split_at(names.len().min(MAX_NAMES));
    let shown: Vec<String> = shown.iter().map(|name| format!("`{name}`")).collect();
    match rest.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
