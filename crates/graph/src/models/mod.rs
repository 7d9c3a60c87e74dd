//! Model families written on the [`Builder`](crate::Builder).
//!
//! Each takes the micro-batch's size and gives a graph whose outputs are `loss`, `logits` and `correct` (how many targets the largest logit hits).

mod gpt2;
mod resnet;

pub use gpt2::{AttentionImplementation, Gpt2Config};
pub use resnet::{ResNetConfig, ResNetStem};
