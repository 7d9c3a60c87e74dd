"""Small models of several families, as Hugging Face writes them, for tests that run the program on them."""

from __future__ import annotations

import subprocess
from pathlib import Path

#: One case per way in which families write linear layers: plain, with biases, and as `Conv1D`.
SETTINGS = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def run(*arguments: object) -> str:
    done = subprocess.run(["fusionllm", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def folder(family: str, path: Path):
    """A small model of a family, and its folder."""
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    config = transformers.AutoConfig.for_model(family, **{**sizes, **SETTINGS[family]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return model
