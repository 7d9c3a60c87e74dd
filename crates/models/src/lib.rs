//! Model families, built with [`Builder`].
//!
//! Each family takes the size of a micro-batch and returns a graph with the outputs `loss`, `logits` and `correct`. The
//! output `correct` is the number of targets that have the largest logit.

mod activation;
pub mod decoder;
mod gpt2;
mod resnet;

pub use activation::Activation;
pub use decoder::Decoder;
use fusionllm_graph::ops::Compare;
use fusionllm_graph::{Builder, DType, GraphError, ValueId};
pub use gpt2::{AttentionImplementation, Gpt2Config};
pub use resnet::{ResNetConfig, ResNetStem};

/// The number of targets that have the largest logit, as a float scalar.
fn count_correct(b: &mut Builder, logits: ValueId, labels: ValueId, dtype: DType) -> Result<ValueId, GraphError> {
    let last = b.ty(logits).rank() - 1;
    let best = b.argmax(logits, last)?;
    let hit = b.op(Compare::Eq, &[best, labels])?;
    let hit = b.cast(hit, dtype)?;
    let dims: Vec<usize> = (0..last).collect();
    b.sum(hit, &dims, false)
}
