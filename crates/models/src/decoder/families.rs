//! The families: what each has, and the keys of `config.json` that say it.

use super::{MlpInput, Names, NormKind, Norms, Projections, QueryKeyNorm};

/// The properties in which families differ, with the defaults of Hugging Face's `transformers` for keys that may be
/// missing.
pub(super) struct Family {
    pub(super) model_type: &'static str,
    pub(super) names: Names,
    pub(super) norm: NormKind,
    /// The key of the number that is added to variances, and its default.
    pub(super) norm_eps: (&'static str, f64),
    pub(super) query_key_norm: QueryKeyNorm,
    pub(super) input_bias: Given,
    pub(super) output_bias: Given,
    pub(super) mlp_bias: Given,
    /// The key of the activation, and its default.
    pub(super) activation: (&'static str, &'static str),
    /// Key and value heads, if their number is not that of the query heads.
    pub(super) key_value_heads: Option<usize>,
    /// The width of a head, if it is not the width of the stream over the heads.
    pub(super) head_dim: Option<usize>,
    /// Whether the width of a head has a key.
    pub(super) names_head_dim: bool,
    pub(super) windows: Windows,
    pub(super) rotary: RotaryKeys,
    /// The default of `query_pre_attn_scalar`, whose root divides the scores. Otherwise the root of a head's width does.
    pub(super) query_scalar: Option<f64>,
    /// The defaults of `attn_logit_softcapping` and `final_logit_softcapping`, if there are such keys.
    pub(super) soft_caps: Option<[Option<f64>; 2]>,
    /// Whether embeddings are multiplied by the root of their width.
    pub(super) scaled_embedding: bool,
    /// Whether the embedding of `pad_token_id` is not trained, and the default of that key.
    pub(super) padding: Option<Option<usize>>,
    pub(super) tied: bool,
    /// The key of dropout on the residual stream, and whether it is that of the embeddings, too.
    pub(super) residual_dropout: Option<(&'static str, bool)>,
    /// Whether `use_parallel_residual` is a key. Its default is true.
    pub(super) parallel: bool,
    /// Keys that change nothing here.
    pub(super) harmless: &'static [&'static str],
}

/// A property that a family has, has not, or has by a key with a default.
#[derive(Clone, Copy)]
pub(super) enum Given {
    Never,
    Always,
    ByKey(&'static str, bool),
}

/// Which layers have a sliding window, if `layer_types` does not say it.
#[derive(Clone, Copy)]
pub(super) enum Windows {
    /// None, and no key says otherwise.
    Never,
    /// All, if `sliding_window` is not null. With the default of that key.
    All(Option<usize>),
    /// The layers from `max_window_layers` on, if `use_sliding_window` is true.
    Upper,
    /// All but each n-th. With the key of n, if it has one, and the default of n.
    Between(Option<&'static str>, usize),
    /// The layers without positions, if `use_sliding_window` is true.
    WithoutPositions,
}

/// The keys of rotary embeddings.
#[derive(Clone, Copy)]
pub(super) struct RotaryKeys {
    /// The key of the base, outside of `rope_parameters`, and its default.
    pub(super) theta: (&'static str, f64),
    /// The key of the share of a head that is turned, and its default.
    pub(super) share: Option<(&'static str, f64)>,
    /// The key of the base of layers with a window, and its default.
    pub(super) local_theta: Option<(&'static str, f64)>,
    /// Whether `no_rope_layers` and `no_rope_layer_interval` name layers without positions.
    pub(super) may_be_left_out: bool,
    /// The default of `original_max_position_embeddings` outside of `rope_parameters`.
    pub(super) original: Option<usize>,
}

const LLAMA_NAMES: Names = Names {
    embedding: "model.embed_tokens",
    positions: None,
    layers: "model.layers",
    attention: "self_attn",
    mlp: "mlp",
    norms: Norms {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    },
    projections: Projections::Separate(["q_proj", "k_proj", "v_proj"]),
    query_key_norms: ["q_norm", "k_norm"],
    attention_output: "o_proj",
    mlp_input: MlpInput::Gated(["gate_proj", "up_proj"]),
    mlp_output: "down_proj",
    final_norm: "model.norm",
    head: "lm_head",
    transposed: false,
};

const LLAMA: Family = Family {
    model_type: "llama",
    names: LLAMA_NAMES,
    norm: NormKind::Rms,
    norm_eps: ("rms_norm_eps", 1e-6),
    query_key_norm: QueryKeyNorm::None,
    input_bias: Given::ByKey("attention_bias", false),
    output_bias: Given::ByKey("attention_bias", false),
    mlp_bias: Given::ByKey("mlp_bias", false),
    activation: ("hidden_act", "silu"),
    key_value_heads: None,
    head_dim: None,
    names_head_dim: true,
    windows: Windows::Never,
    rotary: RotaryKeys {
        theta: ("rope_theta", 10_000.0),
        share: None,
        local_theta: None,
        may_be_left_out: false,
        original: None,
    },
    query_scalar: None,
    soft_caps: None,
    scaled_embedding: false,
    padding: Some(None),
    tied: false,
    residual_dropout: None,
    parallel: false,
    harmless: &["pretraining_tp"],
};

const MISTRAL: Family = Family {
    model_type: "mistral",
    input_bias: Given::Never,
    output_bias: Given::Never,
    mlp_bias: Given::Never,
    key_value_heads: Some(8),
    windows: Windows::All(Some(4096)),
    harmless: &[],
    ..LLAMA
};

const QWEN2: Family = Family {
    model_type: "qwen2",
    input_bias: Given::Always,
    output_bias: Given::Never,
    mlp_bias: Given::Never,
    key_value_heads: Some(32),
    windows: Windows::Upper,
    harmless: &[],
    ..LLAMA
};

const QWEN3: Family = Family {
    model_type: "qwen3",
    query_key_norm: QueryKeyNorm::Head,
    mlp_bias: Given::Never,
    key_value_heads: Some(32),
    head_dim: Some(128),
    windows: Windows::Upper,
    harmless: &[],
    ..LLAMA
};

const GEMMA2: Family = Family {
    model_type: "gemma2",
    names: Names {
        norms: Norms {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_attention_layernorm"),
            before_mlp: Some("pre_feedforward_layernorm"),
            after_mlp: Some("post_feedforward_layernorm"),
        },
        ..LLAMA_NAMES
    },
    norm: NormKind::RmsPlusOne,
    mlp_bias: Given::Never,
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    key_value_heads: Some(4),
    head_dim: Some(256),
    windows: Windows::Between(None, 2),
    query_scalar: Some(256.0),
    soft_caps: Some([Some(50.0), Some(30.0)]),
    scaled_embedding: true,
    padding: Some(Some(0)),
    tied: true,
    // `hidden_act` is written for older versions, which read the other key as well.
    harmless: &["hidden_act", "cache_implementation"],
    ..LLAMA
};

const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    query_key_norm: QueryKeyNorm::Head,
    windows: Windows::Between(Some("sliding_window_pattern"), 6),
    rotary: RotaryKeys {
        theta: ("rope_theta", 1_000_000.0),
        local_theta: Some(("rope_local_base_freq", 10_000.0)),
        ..LLAMA.rotary
    },
    soft_caps: Some([None, None]),
    harmless: &["hidden_act", "cache_implementation"],
    ..GEMMA2
};

const PHI3: Family = Family {
    model_type: "phi3",
    names: Names {
        projections: Projections::Joined("qkv_proj"),
        mlp_input: MlpInput::GatedJoined("gate_up_proj"),
        ..LLAMA_NAMES
    },
    norm_eps: ("rms_norm_eps", 1e-5),
    input_bias: Given::Never,
    output_bias: Given::Never,
    mlp_bias: Given::Never,
    names_head_dim: false,
    windows: Windows::All(None),
    rotary: RotaryKeys { share: Some(("partial_rotary_factor", 1.0)), original: Some(4096), ..LLAMA.rotary },
    padding: Some(Some(32_000)),
    residual_dropout: Some(("resid_pdrop", false)),
    // The embeddings' dropout is a key that no version of the model reads.
    harmless: &["embd_pdrop", "attention_bias"],
    ..LLAMA
};

const OLMO2: Family = Family {
    model_type: "olmo2",
    names: Names {
        norms: Norms {
            before_attention: None,
            after_attention: Some("post_attention_layernorm"),
            before_mlp: None,
            after_mlp: Some("post_feedforward_layernorm"),
        },
        ..LLAMA_NAMES
    },
    norm_eps: ("rms_norm_eps", 1e-5),
    query_key_norm: QueryKeyNorm::Heads,
    mlp_bias: Given::Never,
    names_head_dim: false,
    padding: Some(Some(1)),
    harmless: &[],
    ..LLAMA
};

const SMOLLM3: Family = Family {
    model_type: "smollm3",
    key_value_heads: Some(4),
    names_head_dim: false,
    windows: Windows::WithoutPositions,
    rotary: RotaryKeys { theta: ("rope_theta", 2_000_000.0), may_be_left_out: true, ..LLAMA.rotary },
    padding: Some(Some(128_004)),
    tied: true,
    harmless: &["pretraining_tp"],
    ..LLAMA
};

const GPT_NEOX: Family = Family {
    model_type: "gpt_neox",
    names: Names {
        embedding: "gpt_neox.embed_in",
        layers: "gpt_neox.layers",
        attention: "attention",
        projections: Projections::ByHead("query_key_value"),
        attention_output: "dense",
        mlp_input: MlpInput::Plain("dense_h_to_4h"),
        mlp_output: "dense_4h_to_h",
        final_norm: "gpt_neox.final_layer_norm",
        head: "embed_out",
        ..LLAMA_NAMES
    },
    norm: NormKind::Layer,
    norm_eps: ("layer_norm_eps", 1e-5),
    input_bias: Given::ByKey("attention_bias", true),
    output_bias: Given::ByKey("attention_bias", true),
    mlp_bias: Given::Always,
    activation: ("hidden_act", "gelu"),
    names_head_dim: false,
    rotary: RotaryKeys { theta: ("rotary_emb_base", 10_000.0), share: Some(("rotary_pct", 0.25)), ..LLAMA.rotary },
    padding: None,
    residual_dropout: Some(("hidden_dropout", true)),
    parallel: true,
    harmless: &["classifier_dropout", "is_decoder"],
    ..LLAMA
};

pub(super) const FAMILIES: [&Family; 10] =
    [&LLAMA, &MISTRAL, &QWEN2, &QWEN3, &GEMMA2, &GEMMA3, &PHI3, &OLMO2, &SMOLLM3, &GPT_NEOX];

/// The families that [`Decoder::from_config`](super::Decoder::from_config) reads, as `model_type` names them.
pub const MODEL_TYPES: [&str; FAMILIES.len()] = {
    let mut names = [""; FAMILIES.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = FAMILIES[i].model_type;
        i += 1;
    }
    names
};

/// Keys of any `config.json` that do not change what a model computes: where it comes from, how it is stored, which
/// tokens are special, and how text is generated.
pub(super) const HARMLESS: [&str; 24] = [
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_llama_config",
    "label2id",
    "max_length",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "rope_interleaved",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
    "use_return_dict",
    "task_specific_params",
    "unk_token_id",
];
