use serde::{Deserialize, Serialize};

use fusionllm_graph::ops::{Compare, ScaledDotProductAttention, Triangle};
use fusionllm_graph::{Builder, DType, Graph, GraphError, Init, TensorType, ValueId};

use crate::{Activation, count_correct};

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
    fn check(&self, sequence: usize) -> Result<(), GraphError> {
        let fail = |m: String| Err(GraphError::Config(m));
        if self.n_head == 0 || self.n_embd == 0 || !self.n_embd.is_multiple_of(self.n_head) {
            return fail(format!("n_embd = {} must be a positive multiple of n_head = {}", self.n_embd, self.n_head));
        }
        if self.vocab_size == 0 {
            return fail("vocab_size must be positive".into());
        }
        if sequence == 0 || sequence > self.n_positions {
            return fail(format!("a sequence of {sequence} tokens is longer than n_positions = {}", self.n_positions));
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

    /// The graph for micro-batches of `batch` sequences of `sequence` tokens.
    ///
    /// The inputs are `input_ids` and `labels`, both `i64 [batch, sequence]`. Labels are already shifted: the label of
    /// a position is the next token. The label -100 does not count. Parameters have the names of Hugging Face's
    /// checkpoints.
    pub fn build(&self, batch: usize, sequence: usize, dtype: DType) -> Result<Graph, GraphError> {
        self.check(sequence)?;
        let (d, std) = (self.n_embd, self.initializer_range);
        let mut b = Builder::new("gpt2");
        let ids = b.input("input_ids", DType::I64, [batch, sequence])?;
        let labels = b.input("labels", DType::I64, [batch, sequence])?;
        let (mut x, wte) = b.scope("transformer", |b| {
            let wte = b.parameter("wte.weight", dtype, [self.vocab_size, d], Init::Normal { std })?;
            let wpe = b.parameter("wpe.weight", dtype, [self.n_positions, d], Init::Normal { std })?;
            let tokens = b.scope("wte", |b| b.embedding(wte, ids))?;
            let positions = b.scope("wpe", |b| b.slice(wpe, 0, 0, sequence, 1))?;
            let x = b.add(tokens, positions)?;
            Ok((b.scope("drop", |b| b.dropout(x, self.embd_pdrop))?, wte))
        })?;
        for layer in 0..self.n_layer {
            x = b.scope(format!("transformer.h.{layer}"), |b| self.block(b, x, dtype))?;
        }
        x = b.scope("transformer.ln_f", |b| self.layer_norm(b, x, dtype))?;
        let head = if self.tie_word_embeddings {
            wte
        } else {
            b.parameter("lm_head.weight", dtype, [self.vocab_size, d], Init::Normal { std })?
        };
        let logits = b.scope("lm_head", |b| b.linear(x, head, None))?;
        let loss = b.scope("loss", |b| b.cross_entropy(logits, labels, -100))?;
        b.output("logits", logits)?;
        b.output("loss", loss)?;
        let correct = b.scope("correct", |b| count_correct(b, logits, labels, dtype))?;
        b.output("correct", correct)?;
        let config = serde_json::to_value(self).map_err(|e| GraphError::Config(e.to_string()))?;
        b.metadata("family", "gpt2".into());
        b.metadata("config", config);
        b.finish()
    }

    fn layer_norm(&self, b: &mut Builder, x: ValueId, dtype: DType) -> Result<ValueId, GraphError> {
        let w = b.parameter("weight", dtype, [self.n_embd], Init::Constant(1.0))?;
        let bias = b.parameter("bias", dtype, [self.n_embd], Init::Constant(0.0))?;
        b.layer_norm(x, w, bias, self.layer_norm_epsilon)
    }

    /// Hugging Face's `Conv1D`: `x weight + bias` with the weight as `[in, out]`.
    fn conv1d(&self, b: &mut Builder, x: ValueId, sizes: [usize; 2], std: f64) -> Result<ValueId, GraphError> {
        let dtype = b.ty(x).dtype;
        let w = b.parameter("weight", dtype, sizes, Init::Normal { std })?;
        let bias = b.parameter("bias", dtype, [sizes[1]], Init::Constant(0.0))?;
        let y = b.matmul(x, w)?;
        b.add(y, bias)
    }

    fn block(&self, b: &mut Builder, x: ValueId, dtype: DType) -> Result<ValueId, GraphError> {
        let (d, std) = (self.n_embd, self.initializer_range);
        let inner = self.n_inner.unwrap_or(4 * d);
        // As in GPT-2, weights before a residual addition start smaller, by the root of the number of such additions.
        let residual_std = std / (2.0 * self.n_layer as f64).sqrt();
        let h = b.scope("ln_1", |b| self.layer_norm(b, x, dtype))?;
        let h = b.scope("attn", |b| {
            let qkv = b.scope("c_attn", |b| self.conv1d(b, h, [d, 3 * d], std))?;
            let y = self.attention(b, qkv)?;
            let y = b.scope("c_proj", |b| self.conv1d(b, y, [d, d], residual_std))?;
            b.dropout(y, self.resid_pdrop)
        })?;
        let x = b.add(x, h)?;
        let h = b.scope("ln_2", |b| self.layer_norm(b, x, dtype))?;
        let h = b.scope("mlp", |b| {
            let y = b.scope("c_fc", |b| self.conv1d(b, h, [d, inner], std))?;
            let activation = Activation::named(&self.activation_function).ok_or_else(|| {
                GraphError::Config(format!(
                    "activation_function = {:?} is not known; use gelu_new, gelu, relu or silu",
                    self.activation_function
                ))
            })?;
            let y = activation.apply(b, y)?;
            let y = b.scope("c_proj", |b| self.conv1d(b, y, [inner, d], residual_std))?;
            b.dropout(y, self.resid_pdrop)
        })?;
        b.add(x, h)
    }

    fn attention(&self, b: &mut Builder, qkv: ValueId) -> Result<ValueId, GraphError> {
        let (n, t) = (b.ty(qkv).shape[0], b.ty(qkv).shape[1]);
        let (heads, width) = (self.n_head, self.n_embd / self.n_head);
        let mut parts = Vec::with_capacity(3);
        for part in b.chunk(qkv, 3, 2)? {
            let part = b.reshape(part, [n, t, heads, width])?;
            parts.push(b.permute(part, &[0, 2, 1, 3])?);
        }
        let (q, k, v) = (parts[0], parts[1], parts[2]);
        let scale = 1.0 / (width as f64).sqrt();
        let fused = self.attn_implementation == AttentionImplementation::Sdpa && self.attn_pdrop == 0.0;
        let y = if fused {
            b.op(ScaledDotProductAttention { is_causal: true, scale }, &[q, k, v])?
        } else {
            let kt = b.transpose(k)?;
            let scores = b.matmul(q, kt)?;
            let scores = b.mul_scalar(scores, scale)?;
            let ones = b.full(TensorType::new(DType::I64, [t, t]), 1.0)?;
            let seen = b.op(Triangle { upper: false, diagonal: 0 }, &[ones])?;
            let seen = b.compare_scalar(Compare::Ne, seen, 0.0)?;
            let dtype = b.ty(scores).dtype;
            let minus_infinity = b.full(TensorType::new(dtype, []), f64::NEG_INFINITY)?;
            let scores = b.where_(seen, scores, minus_infinity)?;
            let weights = b.softmax(scores, 3)?;
            let weights = b.dropout(weights, self.attn_pdrop)?;
            b.matmul(weights, v)?
        };
        let y = b.permute(y, &[0, 2, 1, 3])?;
        b.reshape(y, [n, t, self.n_embd])
    }
}
