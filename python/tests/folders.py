"""Small models of several families, as Hugging Face writes them, and jobs, for tests that run the program on them."""

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


def small(family: str, settings: dict):
    """A small model of a family with random weights."""
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
    config = transformers.AutoConfig.for_model(family, **{**sizes, **settings})
    return transformers.AutoModelForCausalLM.from_config(config)


def folder(family: str, path: Path):
    """A small model of one of the `SETTINGS`, and its folder."""
    model = small(family, SETTINGS[family])
    model.save_pretrained(path)
    return model


def job(directory: Path, source: Path, data: dict, train: dict, **sections: dict) -> Path:
    """A job file that trains a folder on bytes, without validation."""
    import tomli_w

    path = directory / "job.toml"
    data = {"tokenizer": "bytes", "validation": 0, **data}
    whole = {"model": {"path": str(source)}, "data": data, "train": train, "eval": {"every": 0}, **sections}
    path.write_text(tomli_w.dumps(whole))
    return path
