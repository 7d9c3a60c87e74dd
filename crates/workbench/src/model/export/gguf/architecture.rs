//! The architectures of llama.cpp, one for each family: the names of tensors, and the variations that it computes.
//!
//! A model that an architecture does not compute exactly is refused. The facts are those of llama.cpp's loaders
//! (`src/models/`) and of its converter.

use fusionllm_models::decoder::{Attention, Layer, Rotary, Scaling};
use fusionllm_models::{Activation, Decoder};

use super::tensors::Change;

/// An architecture of llama.cpp.
pub(super) struct Architecture {
    /// The family that it computes, as `model_type` names it.
    family: &'static str,
    /// Its own name, which keys of the metadata begin with.
    pub(super) name: &'static str,
    /// The modules, in several tables.
    modules: &'static [&'static [Module]],
    /// The only activation between the products of a feed-forward layer.
    activation: Activation,
    /// Whether queries, keys and values, the output of attention, and feed-forward layers have biases.
    biases: [Bias; 3],
    /// The output layer.
    pub(super) head: Head,
    /// Whether the width of the heads may be another one than that of the residual stream.
    free_heads: bool,
    /// All layers but each n-th have a window. `None` if no layer has one.
    windows: Option<usize>,
    /// Each n-th layer has no positions. `None` if all layers have them, or none.
    without_positions: Option<usize>,
    /// Whether the file may have a divisor for each frequency of the rotary embeddings.
    divisors: Divisors,
    /// The number of layers at which the width of the stream over the heads scales the scores, and not that of a head.
    large: Option<usize>,
    /// Whether scores and logits are bounded.
    soft_caps: bool,
    /// Whether the file says that attention and feed-forward layers read the same stream. Otherwise they never do.
    pub(super) parallel: bool,
}

/// A module as a checkpoint names it, as llama.cpp does, and the change of its tensors. `*` is the number of a layer.
struct Module(&'static str, &'static str, Change);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bias {
    Never,
    Optional,
    Always,
}

/// The weight of the output layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// It is that of the embedding if the file has none.
    Optional,
    /// The file must have it.
    Needed,
    /// It is that of the embedding.
    Tied,
}

/// The divisors of frequencies that an architecture reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Divisors {
    None,
    /// Those of short and of long texts.
    ByLength,
    /// The same, or those of all texts.
    All,
}

/// The modules that most families have under the same names.
const BODY: &[Module] = &[
    Module("model.embed_tokens", "token_embd", Change::Keep),
    Module("model.norm", "output_norm", Change::Keep),
    Module("lm_head", "output", Change::Keep),
    Module("model.layers.*.input_layernorm", "blk.*.attn_norm", Change::Keep),
    Module("model.layers.*.self_attn.v_proj", "blk.*.attn_v", Change::Keep),
    Module("model.layers.*.self_attn.o_proj", "blk.*.attn_output", Change::Keep),
    Module("model.layers.*.mlp.gate_proj", "blk.*.ffn_gate", Change::Keep),
    Module("model.layers.*.mlp.up_proj", "blk.*.ffn_up", Change::Keep),
    Module("model.layers.*.mlp.down_proj", "blk.*.ffn_down", Change::Keep),
];

/// Queries and keys of architectures that turn neighbours.
const PAIRS: &[Module] = &[
    Module("model.layers.*.self_attn.q_proj", "blk.*.attn_q", Change::Pair),
    Module("model.layers.*.self_attn.k_proj", "blk.*.attn_k", Change::Pair),
];

/// Queries and keys of architectures that turn the halves of a head, as this program does.
const HALVES: &[Module] = &[
    Module("model.layers.*.self_attn.q_proj", "blk.*.attn_q", Change::Keep),
    Module("model.layers.*.self_attn.k_proj", "blk.*.attn_k", Change::Keep),
    Module("model.layers.*.self_attn.q_norm", "blk.*.attn_q_norm", Change::Keep),
    Module("model.layers.*.self_attn.k_norm", "blk.*.attn_k_norm", Change::Keep),
];

/// The normalisation before a feed-forward layer, where there is none after attention.
const PRE_NORMS: &[Module] = &[Module("model.layers.*.post_attention_layernorm", "blk.*.ffn_norm", Change::Keep)];

/// Normalisations where there is one after attention.
const POST_NORMS: &[Module] = &[
    Module("model.layers.*.post_attention_layernorm", "blk.*.post_attention_norm", Change::Keep),
    Module("model.layers.*.pre_feedforward_layernorm", "blk.*.ffn_norm", Change::Keep),
    Module("model.layers.*.post_feedforward_layernorm", "blk.*.post_ffw_norm", Change::Keep),
];

/// Phi-3's products that make several things at once.
const JOINED: &[Module] = &[
    Module("model.layers.*.self_attn.qkv_proj", "blk.*.attn_qkv", Change::Keep),
    Module("model.layers.*.mlp.gate_up_proj", "blk.*.ffn_up", Change::Keep),
];

const GPT_NEOX_MODULES: &[Module] = &[
    Module("gpt_neox.embed_in", "token_embd", Change::Keep),
    Module("gpt_neox.final_layer_norm", "output_norm", Change::Keep),
    Module("embed_out", "output", Change::Keep),
    Module("gpt_neox.layers.*.input_layernorm", "blk.*.attn_norm", Change::Keep),
    Module("gpt_neox.layers.*.attention.query_key_value", "blk.*.attn_qkv", Change::Gather),
    Module("gpt_neox.layers.*.attention.dense", "blk.*.attn_output", Change::Keep),
    Module("gpt_neox.layers.*.post_attention_layernorm", "blk.*.ffn_norm", Change::Keep),
    Module("gpt_neox.layers.*.mlp.dense_h_to_4h", "blk.*.ffn_up", Change::Keep),
    Module("gpt_neox.layers.*.mlp.dense_4h_to_h", "blk.*.ffn_down", Change::Keep),
];

const GPT2_MODULES: &[Module] = &[
    Module("transformer.wte", "token_embd", Change::Keep),
    Module("transformer.wpe", POSITIONS, Change::Keep),
    Module("transformer.ln_f", "output_norm", Change::Keep),
    Module("lm_head", "output", Change::Keep),
    Module("transformer.h.*.ln_1", "blk.*.attn_norm", Change::Keep),
    Module("transformer.h.*.attn.c_attn", "blk.*.attn_qkv", Change::Transpose),
    Module("transformer.h.*.attn.c_proj", "blk.*.attn_output", Change::Transpose),
    Module("transformer.h.*.ln_2", "blk.*.ffn_norm", Change::Keep),
    Module("transformer.h.*.mlp.c_fc", "blk.*.ffn_up", Change::Transpose),
    Module("transformer.h.*.mlp.c_proj", "blk.*.ffn_down", Change::Transpose),
];

/// llama.cpp's name of the embedding of positions.
pub(super) const POSITIONS: &str = "position_embd";

const LLAMA: Architecture = Architecture {
    family: "llama",
    name: "llama",
    modules: &[BODY, PAIRS, PRE_NORMS],
    activation: Activation::Silu,
    biases: [Bias::Optional; 3],
    head: Head::Optional,
    free_heads: true,
    windows: None,
    without_positions: None,
    divisors: Divisors::All,
    large: None,
    soft_caps: false,
    parallel: false,
};

const QWEN2: Architecture = Architecture {
    family: "qwen2",
    name: "qwen2",
    modules: &[BODY, HALVES, PRE_NORMS],
    biases: [Bias::Always, Bias::Never, Bias::Never],
    free_heads: false,
    divisors: Divisors::None,
    ..LLAMA
};

const GEMMA2: Architecture = Architecture {
    family: "gemma2",
    name: "gemma2",
    modules: &[BODY, HALVES, POST_NORMS],
    activation: Activation::GeluTanh,
    biases: [Bias::Never; 3],
    head: Head::Tied,
    windows: Some(2),
    divisors: Divisors::None,
    large: Some(46),
    soft_caps: true,
    ..LLAMA
};

const GPT2: Architecture = Architecture {
    family: "gpt2",
    name: "gpt2",
    modules: &[GPT2_MODULES],
    activation: Activation::GeluTanh,
    biases: [Bias::Always; 3],
    free_heads: false,
    divisors: Divisors::None,
    ..LLAMA
};

const ARCHITECTURES: [Architecture; 11] = [
    LLAMA,
    Architecture { family: "mistral", ..LLAMA },
    QWEN2,
    Architecture { family: "qwen3", name: "qwen3", biases: [Bias::Never; 3], free_heads: true, ..QWEN2 },
    GEMMA2,
    Architecture {
        family: "gemma3_text",
        name: "gemma3",
        head: Head::Optional,
        windows: Some(6),
        large: Some(62),
        soft_caps: false,
        ..GEMMA2
    },
    Architecture {
        family: "phi3",
        name: "phi3",
        modules: &[BODY, JOINED, PRE_NORMS],
        biases: [Bias::Never; 3],
        free_heads: false,
        divisors: Divisors::ByLength,
        ..LLAMA
    },
    Architecture {
        family: "olmo2",
        name: "olmo2",
        modules: &[BODY, HALVES, POST_NORMS],
        biases: [Bias::Never; 3],
        head: Head::Needed,
        free_heads: false,
        divisors: Divisors::None,
        ..LLAMA
    },
    Architecture {
        family: "smollm3",
        name: "smollm3",
        biases: [Bias::Never; 3],
        free_heads: false,
        without_positions: Some(4),
        divisors: Divisors::None,
        ..LLAMA
    },
    Architecture {
        family: "gpt_neox",
        name: "gptneox",
        modules: &[GPT_NEOX_MODULES],
        head: Head::Needed,
        parallel: true,
        ..GPT2
    },
    GPT2,
];

/// A reason why llama.cpp does not compute a model. It is a clause that follows "llama.cpp cannot compute this model:".
pub(super) type Refusal = String;

/// A model that llama.cpp computes.
pub(super) struct Fit {
    /// Its architecture.
    pub(super) architecture: &'static Architecture,
    /// The embedding of layers without a window. `None` for learnt positions.
    pub(super) rotary: Option<Rotary>,
    /// The layers with a window, where llama.cpp knows windows.
    pub(super) local: Option<Local>,
    /// The longest text that llama.cpp computes as this program does, in tokens.
    pub(super) context: usize,
    /// Sentences for the user about differences.
    pub(super) notes: Vec<String>,
}

/// The layers with a window, which are all alike.
pub(super) struct Local {
    pub(super) rotary: Rotary,
    /// The number of keys that a query reads, its own included.
    pub(super) window: usize,
}

impl Architecture {
    /// The architecture of a model's family.
    pub(super) fn of(decoder: &Decoder) -> Option<&'static Self> {
        const ALL: &[Architecture] = &ARCHITECTURES;
        ALL.iter().find(|architecture| architecture.family == decoder.model_type)
    }

    /// The name that llama.cpp has for a parameter, and the change of it. `None` for one that it does not know.
    pub(super) fn tensor(&self, parameter: &str) -> Option<(String, Change)> {
        let (module, kind) = parameter.rsplit_once('.')?;
        let number = module.split('.').find(|part| part.parse::<usize>().is_ok());
        let in_layer = |pattern: &str| number.map_or(pattern.to_owned(), |number| pattern.replace('*', number));
        let Module(_, name, change) =
            self.modules.iter().copied().flatten().find(|Module(name, ..)| in_layer(name) == module)?;
        Some((format!("{}.{kind}", in_layer(name)), *change))
    }

    /// Checks that llama.cpp computes a model as this program does.
    ///
    /// # Errors
    ///
    /// It cannot, for the reason that the error says.
    pub(super) fn fit(&'static self, decoder: &Decoder) -> Result<Fit, Refusal> {
        let mut notes = Vec::new();
        let Attention { heads, head_dim, input_bias, output_bias, scale, soft_cap, .. } = decoder.attention;
        if decoder.mlp.activation != self.activation {
            if (decoder.mlp.activation, self.activation) != (Activation::Gelu, Activation::GeluTanh) {
                let name = |wanted| Activation::NAMES.iter().find(|(_, a)| *a == wanted).map_or("another", |(n, _)| n);
                let (own, theirs) = (name(decoder.mlp.activation), name(self.activation));
                return Err(format!("its activation is {own}, and in {} it is always {theirs}", self.name));
            }
            notes.push("llama.cpp computes GELU with a tanh, so its logits differ a little from this model's".into());
        }
        let there = [input_bias, output_bias, decoder.mlp.bias];
        let places = ["queries", "outputs of attention", "feed-forward layers"];
        for ((bias, there), place) in self.biases.iter().zip(there).zip(places) {
            let (own, theirs) = match (bias, there) {
                (Bias::Never, true) => ("have biases", "never have"),
                (Bias::Always, false) => ("have no biases", "always have"),
                _ => continue,
            };
            return Err(format!("its {place} {own}, which they {theirs} in {}", self.name));
        }
        if !self.free_heads && heads * head_dim != decoder.hidden_size {
            let (width, stream) = (heads * head_dim, decoder.hidden_size);
            return Err(format!("its heads are {width} wide together, and in {} they are {stream}", self.name));
        }
        if self.head == Head::Tied && !decoder.tie_word_embeddings {
            return Err(format!("its output layer has a weight of its own, and in {} it has none", self.name));
        }
        let wide = self.large.filter(|layers| decoder.layers.len() == *layers).map(|_| decoder.hidden_size / heads);
        let expected = 1.0 / (wide.unwrap_or(head_dim) as f64).sqrt();
        if (scale / expected - 1.0).abs() > 1e-6 {
            return Err(format!("its scores are multiplied by {scale}, and in {} by {expected}", self.name));
        }
        let caps = [soft_cap, decoder.logit_soft_cap];
        if !caps.iter().all(|cap| cap.is_some() == self.soft_caps) {
            let theirs = if self.soft_caps { "are bounded" } else { "are not" };
            return Err(format!("bounds of its scores or logits differ from {}, where they {theirs}", self.name));
        }
        let (rotary, local) = self.positions(&decoder.layers)?;
        let context = self.context(decoder, rotary.as_ref());
        if context < decoder.longest() {
            notes.push(format!(
                "llama.cpp computes this model as here for texts of up to {context} tokens, so the file names that as \
                 the longest, and not {}",
                decoder.longest()
            ));
        }
        Ok(Fit { architecture: self, rotary, local, context, notes })
    }

    /// The positions of layers without a window and of those with one.
    fn positions(&self, layers: &[Layer]) -> Result<(Option<Rotary>, Option<Local>), Refusal> {
        let turned = |number: usize| self.without_positions.is_none_or(|n| !(number + 1).is_multiple_of(n));
        let learnt = layers.iter().all(|layer| layer.rotary.is_none());
        if !learnt && layers.iter().enumerate().any(|(number, layer)| layer.rotary.is_some() != turned(number)) {
            return Err(match self.without_positions {
                Some(n) => format!("its layers without positions are not each {n}th one, as in {}", self.name),
                None => format!("some of its layers have no positions, and in {} all have them", self.name),
            });
        }
        let full = |layer: &&Layer| layer.rotary.is_some() && (self.windows.is_none() || layer.window.is_none());
        let rotary = layers.iter().find(full).and_then(|layer| layer.rotary.clone());
        if let Some(rotary) = &rotary {
            self.check_scaling(rotary)?;
        }
        let Some(pattern) = self.windows else { return Ok((rotary, None)) };
        let slides = |number: usize| !(number + 1).is_multiple_of(pattern);
        if layers.iter().enumerate().any(|(number, layer)| layer.window.is_some() != slides(number)) {
            return Err(format!("its windows are not in all layers but each {pattern}th, as in {}", self.name));
        }
        let of = |layer: &Layer| Some(Local { rotary: layer.rotary.clone()?, window: layer.window? });
        let local = layers.iter().find_map(of);
        if let Some(Local { rotary: local, .. }) = &local {
            let same = rotary.as_ref().is_none_or(|rotary| rotary == local);
            // In gemma2, both kinds of layers have one embedding. In gemma3, that of windows is never scaled.
            if (self.soft_caps && !same) || (!self.soft_caps && local.scaling != Scaling::Default) {
                return Err(format!("the positions of its layers with a window differ from those of {}", self.name));
            }
        }
        // A model of few layers may have windows in all of them.
        let rotary = rotary.or_else(|| local.as_ref().map(|local| local.rotary.clone()));
        Ok((rotary, local))
    }

    fn check_scaling(&self, rotary: &Rotary) -> Result<(), Refusal> {
        let kind = match &rotary.scaling {
            Scaling::Default | Scaling::Linear { .. } | Scaling::Dynamic { .. } => return Ok(()),
            Scaling::Llama3 { .. } if self.divisors == Divisors::All => return Ok(()),
            Scaling::LongRope { .. } if self.divisors != Divisors::None => return Ok(()),
            Scaling::Yarn { beta_fast, beta_slow, truncate, .. } if self.windows.is_none() => {
                return match (*beta_fast, *beta_slow, *truncate) {
                    (32.0, 1.0, true) => Ok(()),
                    _ => Err("`beta_fast`, `beta_slow` or `truncate` of its yarn are not 32, 1 and true".into()),
                };
            }
            Scaling::Llama3 { .. } => "llama3",
            Scaling::LongRope { .. } => "longrope",
            Scaling::Yarn { .. } => "yarn",
        };
        Err(format!("its rope_type is \"{kind}\", which {} does not know", self.name))
    }

    /// The longest text that llama.cpp computes as this program does.
    fn context(&self, decoder: &Decoder, rotary: Option<&Rotary>) -> usize {
        let window = decoder.layers.iter().filter_map(|layer| layer.window).min();
        let window = window.filter(|_| self.windows.is_none()).unwrap_or(usize::MAX);
        let positions = match rotary.map(|rotary| &rotary.scaling) {
            // Here, the frequencies follow from the length of a text, and in llama.cpp from the length of its cache.
            Some(Scaling::Dynamic { positions, .. } | Scaling::LongRope { positions, .. }) => *positions,
            _ => usize::MAX,
        };
        decoder.longest().min(window).min(positions)
    }
}
