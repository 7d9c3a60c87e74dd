//! What is read from a `config.json`, and what is refused.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fusionllm_graph::DType;
use fusionllm_models::Decoder;
use fusionllm_models::decoder::{MODEL_TYPES, Scaling};
use serde_json::{Map, Value, json};

/// A small model of a family, with some keys replaced. Null removes a key.
fn config(family: &str, changes: Value) -> Map<String, Value> {
    let base = json!({
        "model_type": family, "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    });
    let Value::Object(mut base) = base else { unreachable!() };
    base.extend(changes.as_object().unwrap().clone());
    base
}

fn read(family: &str, changes: Value) -> Decoder {
    Decoder::from_config(&config(family, changes)).unwrap()
}

fn refused(family: &str, changes: Value) -> (String, String) {
    let e = Decoder::from_config(&config(family, changes)).unwrap_err();
    (e.key, e.message)
}

#[test]
fn every_family_has_a_graph_without_further_keys() {
    for family in MODEL_TYPES {
        let decoder = read(family, json!({"num_key_value_heads": 2, "head_dim": 8}).filtered(family));
        let graph = decoder.build(2, 6, DType::F32).unwrap();
        assert!(graph.parameters().count() > 4 * 6, "{family}");
        assert!(decoder.build(1, decoder.longest() + 1, DType::F32).is_err(), "{family}");
    }
}

trait Filtered {
    fn filtered(self, family: &str) -> Self;
}

impl Filtered for Value {
    /// Without the keys that a family does not have.
    fn filtered(mut self, family: &str) -> Self {
        let keys = self.as_object_mut().unwrap();
        if ["phi3", "olmo2", "smollm3", "gpt_neox"].contains(&family) {
            keys.remove("head_dim");
        }
        if family == "gpt_neox" {
            keys.remove("num_key_value_heads");
        }
        self
    }
}

/// `transformers` 4 writes `rope_theta` and `rope_scaling`, `transformers` 5 `rope_parameters`.
#[test]
fn old_and_new_keys_of_positions_mean_the_same() {
    let layers = |decoder: Decoder| decoder.layers;
    let old = json!({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}});
    let new = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}});
    assert_eq!(layers(read("llama", old)), layers(read("llama", new)));

    let old = json!({"rope_theta": 500.0, "rope_local_base_freq": 50.0, "sliding_window": 5, "head_dim": 8,
        "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 2.0}});
    let new = json!({"sliding_window": 5, "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }});
    assert_eq!(layers(read("gemma3_text", old)), layers(read("gemma3_text", new)));

    let old = json!({"rotary_pct": 0.5, "rotary_emb_base": 500});
    let new = json!({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500}});
    assert_eq!(layers(read("gpt_neox", old)), layers(read("gpt_neox", new)));
}

#[test]
fn a_null_is_not_a_missing_key() {
    let windows = |decoder: Decoder| decoder.layers.iter().filter(|layer| layer.window.is_some()).count();
    assert_eq!(windows(read("mistral", json!({"num_key_value_heads": 4}))), 4);
    assert_eq!(windows(read("mistral", json!({"num_key_value_heads": 4, "sliding_window": null}))), 0);
    assert_eq!(read("mistral", json!({"num_key_value_heads": null})).attention.key_value_heads, 4);
    assert_eq!(read("gemma2", json!({"head_dim": 8})).attention.soft_cap, Some(50.0));
    assert_eq!(read("gemma2", json!({"head_dim": 8, "attn_logit_softcapping": null})).attention.soft_cap, None);
    assert_eq!(read("gemma2", json!({"head_dim": 8})).padding_idx, Some(0));
    assert_eq!(read("gemma2", json!({"head_dim": 8, "pad_token_id": null})).padding_idx, None);
    assert_eq!(read("llama", json!({"pad_token_id": -1})).padding_idx, Some(60));
}

/// Keys that say nothing, or nothing about results, may be anything.
#[test]
fn keys_without_an_effect_are_skipped() {
    let changes = json!({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "use_cache": true,
        "transformers.js_config": {"dtype": "q4"}, "is_llama_config": true, "quantization_config": null,
        "new_kind_of_attention": false, "pruned_heads": {}, "pretraining_tp": 2});
    assert_eq!(read("llama", changes).layers, read("llama", json!({})).layers);
}

#[test]
fn what_is_not_understood_is_refused_by_its_key() {
    let cases = [
        ("mamba", json!({}), "model_type", "the family \"mamba\" is not known"),
        ("llama", json!({"model_type": null}), "model_type", "`model_type` is missing"),
        ("llama", json!({"hidden_size": null}), "hidden_size", "`hidden_size` is missing"),
        (
            "llama",
            json!({"quantization_config": {"bits": 4}}),
            "quantization_config",
            "`quantization_config` = {\"bits\":4} is not understood, and may change what the model computes",
        ),
        (
            "llama",
            json!({"vocab_size": "many"}),
            "vocab_size",
            "`vocab_size` is \"many\", but it must be a whole number above 0",
        ),
        (
            "llama",
            json!({"num_key_value_heads": 3}),
            "num_key_value_heads",
            "`num_key_value_heads` is 3, but it must be a divisor of `num_attention_heads` = 4",
        ),
        (
            "llama",
            json!({"hidden_act": "mish"}),
            "hidden_act",
            "`hidden_act` is \"mish\", but it must be one of gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish",
        ),
        (
            "llama",
            json!({"num_hidden_layers": 1u64 << 40}),
            "num_hidden_layers",
            "`num_hidden_layers` is 1099511627776, but it must be at most 10000",
        ),
        (
            "llama",
            json!({"rope_scaling": {"rope_type": "spiral"}}),
            "rope_scaling",
            "`rope_scaling.rope_type` is \"spiral\", but it must be \"default\", \"linear\", \"dynamic\", \"llama3\", \
             \"yarn\" or \"longrope\"",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "linear"}}),
            "rope_parameters",
            "`rope_parameters.factor` is missing",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "default", "factor": 2.0}}),
            "rope_parameters",
            "`rope_parameters.factor` = 2.0 is not understood, and may change what the model computes",
        ),
        (
            "llama",
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
            "`partial_rotary_factor` = 0.5 is not understood, and may change what the model computes",
        ),
        (
            "qwen2",
            json!({"num_key_value_heads": 2, "layer_types": ["full_attention"]}),
            "layer_types",
            "`layer_types` is [\"full_attention\"], but it must be a list of 4 values",
        ),
        (
            "gemma3_text",
            json!({"head_dim": 8, "use_bidirectional_attention": true}),
            "use_bidirectional_attention",
            "`use_bidirectional_attention` is true, but it must be false, for a model that writes text",
        ),
    ];
    for (family, changes, key, message) in cases {
        assert_eq!(refused(family, changes), (key.to_owned(), message.to_owned()));
    }
}

#[test]
fn scaled_positions_extend_the_longest_sequence() {
    let longest = |scaling: Value| read("llama", json!({"rope_scaling": scaling})).longest();
    assert_eq!(longest(json!({"rope_type": "linear", "factor": 4.0})), 256);
    assert_eq!(longest(json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})), 64);
    let decoder = read("llama", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}));
    let rotary = decoder.layers[0].rotary.as_ref().unwrap();
    assert_eq!(rotary.scaling, Scaling::Dynamic { factor: 2.0, positions: 64 });
    // Short sequences are as they were.
    assert_eq!(rotary.frequencies(8), rotary.frequencies(64));
    assert!(rotary.frequencies(65)[3] < rotary.frequencies(64)[3]);
}
