//! Decoder-only transformers: one builder, and the variations of the families as data.
//!
//! [`Decoder::from_config`] reads a `config.json` of Hugging Face by the table of its family. [`Decoder::build`] makes
//! the graph. Its parameters have the names and the shapes of the family's checkpoints.

mod build;
mod config;
mod families;
mod read;
mod rotary;

pub use config::ConfigError;
pub use families::MODEL_TYPES;
pub use rotary::{Rotary, Scaling};
use serde_json::{Map, Value};

use crate::Activation;

/// A decoder-only transformer for language, as its `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoder {
    /// The `config.json` that it was read from.
    pub config: Map<String, Value>,
    /// The name of the family, such as `llama`.
    pub model_type: &'static str,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// The longest sequence that the model was made for.
    pub max_positions: usize,
    /// The blocks, from the first to the last.
    pub layers: Vec<Layer>,
    /// Normalisation, wherever it stands.
    pub norm: Norm,
    /// Attention.
    pub attention: Attention,
    /// The feed-forward layers.
    pub mlp: Mlp,
    /// Whether attention and feed-forward layer read the same residual stream, instead of one after the other.
    pub parallel: bool,
    /// The factor of the token embeddings.
    pub embedding_scale: f64,
    /// The token whose embedding gets no gradient from the input.
    pub padding_idx: Option<usize>,
    /// The bound `c` of the logits `c tanh(x / c)`.
    pub logit_soft_cap: Option<f64>,
    /// Whether the output layer shares the weight of the token embedding.
    pub tie_word_embeddings: bool,
    /// Dropout of the embeddings.
    pub embedding_dropout: f64,
    /// Dropout of the output of each attention and feed-forward layer.
    pub residual_dropout: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// The same for weights whose products are added to the residual stream.
    pub residual_initializer_range: f64,
    /// The names of weights.
    pub(crate) names: &'static Names,
}

/// The properties in which blocks differ.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The rotary position embedding of queries and keys. `None` for a layer without positions.
    pub rotary: Option<Rotary>,
    /// The number of keys that a query reads, its own included. `None` for all before it.
    pub window: Option<usize>,
}

/// Normalisation over the width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// The formula.
    pub kind: NormKind,
    /// The number that is added to the mean square, or to the variance.
    pub eps: f64,
}

/// The formula of a normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square, times the weight.
    Rms,
    /// Root mean square, times one plus the weight.
    RmsPlusOne,
    /// Mean and variance, with weight and bias.
    Layer,
}

/// Attention with grouped queries.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads. It divides the number of query heads.
    pub key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The factor of the scores.
    pub scale: f64,
    /// The bound `c` of the scores `c tanh(x / c)`.
    pub soft_cap: Option<f64>,
    /// Whether queries, keys and values have a bias.
    pub input_bias: bool,
    /// Whether the output has a bias.
    pub output_bias: bool,
    /// Normalisation of queries and keys.
    pub query_key_norm: QueryKeyNorm,
    /// Dropout of the attention weights.
    pub dropout: f64,
    /// Whether attention is one operator, where dropout and soft cap allow it.
    pub fused: bool,
}

/// Where queries and keys are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// Nowhere.
    None,
    /// Over each head.
    Head,
    /// Over all heads together.
    Heads,
}

/// A feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mlp {
    /// The function between the two products.
    pub activation: Activation,
    /// Whether the products have biases.
    pub bias: bool,
}

/// The names of modules in checkpoints. Those of a layer start at the layer's own name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Names {
    /// The token embedding.
    pub(crate) embedding: &'static str,
    /// The embedding of positions, if it is learnt.
    pub(crate) positions: Option<&'static str>,
    /// The layers, without their numbers.
    pub(crate) layers: &'static str,
    /// Attention in a layer. The names of its parts start there.
    pub(crate) attention: &'static str,
    /// The feed-forward part of a layer. The names of its parts start there.
    pub(crate) mlp: &'static str,
    /// Normalisation before and after attention, and before and after the feed-forward layer, where it stands.
    pub(crate) norms: Norms,
    /// The modules of queries, keys and values.
    pub(crate) projections: Projections,
    /// Normalisation of queries and of keys.
    pub(crate) query_key_norms: [&'static str; 2],
    /// The output of attention.
    pub(crate) attention_output: &'static str,
    /// The feed-forward layer's first products.
    pub(crate) mlp_input: MlpInput,
    /// The feed-forward layer's last product.
    pub(crate) mlp_output: &'static str,
    /// The last normalisation.
    pub(crate) final_norm: &'static str,
    /// The output layer.
    pub(crate) head: &'static str,
    /// Whether the weights of a layer's products are stored as `[in, out]`, instead of `[out, in]`.
    pub(crate) transposed: bool,
}

/// The normalisations of a block. Which there are tells where they stand.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Norms {
    pub(crate) before_attention: Option<&'static str>,
    pub(crate) after_attention: Option<&'static str>,
    pub(crate) before_mlp: Option<&'static str>,
    pub(crate) after_mlp: Option<&'static str>,
}

/// How a checkpoint has the weights of queries, keys and values.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Projections {
    /// One module each.
    Separate([&'static str; 3]),
    /// One module: all queries, then all keys, then all values.
    Joined(&'static str),
    /// One module: of each head its query, its key and its value.
    ByHead(&'static str),
}

/// How a checkpoint has the weights of a feed-forward layer's first products.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MlpInput {
    /// One product.
    Plain(&'static str),
    /// A product that goes through the activation, and one that it is multiplied by.
    Gated([&'static str; 2]),
    /// The same two in one module, in this order.
    GatedJoined(&'static str),
}
