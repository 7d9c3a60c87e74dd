use serde::{Deserialize, Serialize};

use fusionllm_graph::{DType, Graph, GraphError};
use serde_json::Value;

use crate::decoder::{Attention, Layer, Mlp, MlpInput, Names, Norm, NormKind, Norms, Projections, QueryKeyNorm};
use crate::{Activation, Decoder};

/// The names of modules in a GPT-2's checkpoints.
const NAMES: Names = Names {
    embedding: "transformer.wte",
    positions: Some("transformer.wpe"),
    layers: "transformer.h",
    attention: "attn",
    mlp: "mlp",
    norms: Norms { before_attention: Some("ln_1"), after_attention: None, before_mlp: Some("ln_2"), after_mlp: None },
    projections: Projections::Joined("c_attn"),
    query_key_norms: [""; 2],
    attention_output: "c_proj",
    mlp_input: MlpInput::Plain("c_fc"),
    mlp_output: "c_proj",
    final_norm: "transformer.ln_f",
    head: "lm_head",
    // Its linear layers are Hugging Face's `Conv1D`.
    transposed: true,
};

/// The implementation of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionImplementation {
    /// One fused operator. With dropout on the attention weights, it is made of the same operators as [`Self::Eager`].
    #[default]
    Sdpa,
    /// Separate operators: two products and a softmax.
    Eager,
}

/// GPT-2 (Radford et al., 2019). Fields have the names of Hugging Face's `config.json`; its other fields are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpt2Config {
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// The longest sequence.
    pub n_positions: usize,
    /// Width of the embeddings.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Number of attention heads. It must divide the width.
    pub n_head: usize,
    /// Width of the feed-forward layer. By default four times `n_embd`.
    pub n_inner: Option<usize>,
    /// `gelu_new`, `gelu` or `relu`.
    pub activation_function: String,
    /// Dropout of the output of each attention and feed-forward layer.
    pub resid_pdrop: f64,
    /// Dropout of the embeddings.
    pub embd_pdrop: f64,
    /// Dropout of the attention weights.
    pub attn_pdrop: f64,
    /// The number that is added to the variances in layer normalisation.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the output layer shares the weight of the input embedding.
    pub tie_word_embeddings: bool,
    /// The implementation of attention.
    #[serde(rename = "_attn_implementation")]
    pub attn_implementation: AttentionImplementation,
}

impl Default for Gpt2Config {
    fn default() -> Self {
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_new".into(),
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            tie_word_embeddings: true,
            attn_implementation: AttentionImplementation::Sdpa,
        }
    }
}

impl Gpt2Config {
    fn check(&self) -> Result<(), GraphError> {
        let fail = |m: String| Err(GraphError::Config(m));
        if self.n_head == 0 || self.n_embd == 0 || !self.n_embd.is_multiple_of(self.n_head) {
            return fail(format!("n_embd = {} must be a positive multiple of n_head = {}", self.n_embd, self.n_head));
        }
        if self.vocab_size == 0 {
            return fail("vocab_size must be positive".into());
        }
        for (name, p) in
            [("resid_pdrop", self.resid_pdrop), ("embd_pdrop", self.embd_pdrop), ("attn_pdrop", self.attn_pdrop)]
        {
            if !(0.0..1.0).contains(&p) {
                return fail(format!("{name} = {p} must lie in [0, 1)"));
            }
        }
        Ok(())
    }

    /// The decoder that these settings describe.
    ///
    /// # Errors
    ///
    /// A setting is invalid.
    pub fn decoder(&self) -> Result<Decoder, GraphError> {
        self.check()?;
        let activation = Activation::named(&self.activation_function).ok_or_else(|| {
            GraphError::Config(format!(
                "activation_function = {:?} is not known; use gelu_new, gelu, relu or silu",
                self.activation_function
            ))
        })?;
        let Value::Object(config) = serde_json::to_value(self).map_err(|e| GraphError::Config(e.to_string()))? else {
            return Err(GraphError::Config("the settings are no table".into()));
        };
        let (head_dim, std) = (self.n_embd / self.n_head, self.initializer_range);
        Ok(Decoder {
            config,
            model_type: "gpt2",
            vocab_size: self.vocab_size,
            hidden_size: self.n_embd,
            intermediate_size: self.n_inner.unwrap_or(4 * self.n_embd),
            max_positions: self.n_positions,
            layers: vec![Layer { rotary: None, window: None }; self.n_layer],
            norm: Norm { kind: NormKind::Layer, eps: self.layer_norm_epsilon },
            attention: Attention {
                heads: self.n_head,
                key_value_heads: self.n_head,
                head_dim,
                scale: 1.0 / (head_dim as f64).sqrt(),
                soft_cap: None,
                input_bias: true,
                output_bias: true,
                query_key_norm: QueryKeyNorm::None,
                dropout: self.attn_pdrop,
                fused: self.attn_implementation == AttentionImplementation::Sdpa,
            },
            mlp: Mlp { activation, bias: true },
            parallel: false,
            embedding_scale: 1.0,
            padding_idx: None,
            logit_soft_cap: None,
            tie_word_embeddings: self.tie_word_embeddings,
            embedding_dropout: self.embd_pdrop,
            residual_dropout: self.resid_pdrop,
            initializer_range: std,
            // As in GPT-2, weights before a residual addition start smaller, by the root of the number of such additions.
            residual_initializer_range: std / (2.0 * self.n_layer as f64).sqrt(),
            names: &NAMES,
        })
    }

    /// The graph for micro-batches of `batch` sequences of `sequence` tokens. See [`Decoder::build`].
    ///
    /// # Errors
    ///
    /// A setting is invalid, or the sequence is longer than `n_positions`.
    pub fn build(&self, batch: usize, sequence: usize, dtype: DType) -> Result<Graph, GraphError> {
        self.decoder()?.build(batch, sequence, dtype)
    }
}
