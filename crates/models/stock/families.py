"""Makes tiny Hugging Face folders of many families, with what `transformers` computes from them.

    families.py DIR [WORD...]      only the cases whose name has one of the words

Each case is a folder DIR/NAME with `config.json` and `model.safetensors` as `save_pretrained` writes them, and
`reference.safetensors`: `input_ids`, `labels` (the next tokens, -100 where none counts), `position_ids` in some,
`logits`, `loss`, `grad.NAME` of each parameter, and `losses`, those of ten steps of AdamW on this batch. DIR/cases.json lists the names. All is
float32. A model has no dropout here. Its attention is the eager one where a family asks for it.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

STEPS = 10
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
LONG = 24  # tokens where a scaling or a window has something to do


GPT2 = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def rope(**parameters):
    return dict(rope_parameters=dict(rope_theta=10000.0, **parameters))


# By name: the family, the length of a sample, and the settings that differ from SIZES.
CASES = {
    "llama": ("llama", 12, {}),
    "llama_biases": ("llama", 12, dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu")),
    "llama_head_dim": ("llama", 12, dict(head_dim=12, num_key_value_heads=1, pad_token_id=3)),
    "llama_linear": ("llama", LONG, rope(rope_type="linear", factor=4.0)),
    "llama_dynamic": ("llama", LONG, dict(rope(rope_type="dynamic", factor=4.0), max_position_embeddings=10)),
    "llama_llama3": (
        "llama",
        LONG,
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama_yarn": ("llama", LONG, rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama_yarn_all": (
        "llama",
        LONG,
        rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8,
            beta_slow=2,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "mistral": ("mistral", LONG, dict(sliding_window=5)),
    "mistral_full": ("mistral", 12, dict(sliding_window=None)),
    "qwen2": ("qwen2", 12, {}),
    "qwen2_window": ("qwen2", LONG, dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    "qwen3": ("qwen3", 12, dict(head_dim=16)),
    "qwen3_layers": (
        "qwen3",
        LONG,
        dict(
            head_dim=16,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gemma2": ("gemma2", LONG, dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=8, pad_token_id=0)),
    "gemma2_mild": (
        "gemma2",
        12,
        dict(head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=None, attention_bias=True),
    ),
    "gemma3": ("gemma3_text", LONG, dict(head_dim=16, sliding_window=5, num_hidden_layers=7, query_pre_attn_scalar=8)),
    "gemma3_scaled": (
        "gemma3_text",
        LONG,
        dict(
            head_dim=16,
            sliding_window=5,
            final_logit_softcapping=3.0,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=50000.0),
                sliding_attention=dict(rope_type="default", rope_theta=500.0),
            ),
        ),
    ),
    "phi3": ("phi3", 12, {}),
    "phi3_window": ("phi3", LONG, dict(sliding_window=5, rope_parameters=dict(partial_rotary_factor=0.5))),
    "phi3_long": (
        "phi3",
        LONG,
        dict(
            original_max_position_embeddings=16,
            rope_parameters=dict(
                rope_type="longrope", short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[2.0, 3.0, 5.0, 9.0]
            ),
        ),
    ),
    "phi3_short": (
        "phi3",
        12,
        dict(
            original_max_position_embeddings=16,
            rope_parameters=dict(
                rope_type="longrope", short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[2.0, 3.0, 5.0, 9.0]
            ),
        ),
    ),
    "olmo2": ("olmo2", 12, {}),
    "smollm3": ("smollm3", 12, {}),
    "smollm3_window": (
        "smollm3",
        LONG,
        dict(no_rope_layers=[0, 1, 0, 1], use_sliding_window=True, sliding_window=5, tie_word_embeddings=False),
    ),
    "gpt_neox": ("gpt_neox", 12, dict(num_key_value_heads=None)),
    "gpt_neox_serial": (
        "gpt_neox",
        12,
        dict(
            num_key_value_heads=None,
            use_parallel_residual=False,
            rope_parameters=dict(partial_rotary_factor=0.5),
            attention_bias=False,
        ),
    ),
    "gpt2": ("gpt2", 12, GPT2),
    "gpt2_untied": ("gpt2", 12, dict(GPT2, n_inner=40, activation_function="relu", tie_word_embeddings=False)),
    # Each sample has several documents, which `transformers` keeps apart by their positions.
    "llama_documents": ("llama", LONG, {}),
    "mistral_documents": ("mistral", LONG, dict(sliding_window=5)),
    "gemma2_documents": ("gemma2", LONG, dict(head_dim=16, sliding_window=5)),
    "smollm3_documents": ("smollm3", LONG, {}),
    "gpt_neox_documents": ("gpt_neox", LONG, dict(num_key_value_heads=None)),
    "gpt2_documents": ("gpt2", LONG, GPT2),
}


def documents(length):
    """The places of tokens in their documents, for two samples. Positions restart where one begins."""

    def places(*bounds):
        return torch.cat([torch.arange(end - start) for start, end in zip((0, *bounds), (*bounds, length))])

    return torch.stack([places(7, 8, 15), places(11)])


def make(directory, family, length, settings):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **settings})
    attention = "eager" if family == "gemma2" or getattr(config, "attn_logit_softcapping", None) else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases start as ones and zeros, which would hide their use.
            noise = 0.2 if parameter.dim() == 1 else 0.05
            parameter.add_(noise * torch.randn_like(parameter))
    model.train()
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    ids = torch.randint(4, config.vocab_size, (2, length + 1))
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    labels[0, :3] = -100
    if config.pad_token_id is not None:
        inputs[0, 1] = config.pad_token_id

    positions = documents(length) if directory.name.endswith("_documents") else None

    def run():
        return model(inputs, position_ids=positions, use_cache=False).logits

    def loss_of(logits):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    logits = run()
    loss = loss_of(logits)
    loss.backward()
    tensors = {"input_ids": inputs, "labels": labels, "logits": logits.detach(), "loss": loss.detach()}
    if positions is not None:
        tensors["position_ids"] = positions
    # The file has an older name for the module.
    file_name = {"lm_head.weight": "embed_out.weight"} if family == "gpt_neox" else {}
    tensors |= {f"grad.{file_name.get(name, name)}": p.grad.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors["losses"] = torch.tensor(losses)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "reference.safetensors")


def main():
    directory, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
    chosen = [name for name in CASES if not words or any(word in name for word in words)]
    for name in chosen:
        make(directory / name, *CASES[name])
    (directory / "cases.json").write_text(json.dumps(chosen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
