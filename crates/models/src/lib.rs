//! Model families, built with [`Builder`](fusionllm_graph::Builder).
//!
//! Each family takes the size of a micro-batch and returns a graph with the outputs `loss`, `logits` and `correct`. The
//! output `correct` is the number of targets that have the largest logit.

mod gpt2;
mod resnet;

pub use gpt2::{AttentionImplementation, Gpt2Config};
pub use resnet::{ResNetConfig, ResNetStem};
