"""Models of Hugging Face folders, trained here over three peers and opened again by `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from folders import run, small
from requirements import needs, needs_torch

pytestmark = [needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH"), needs_torch]

ROOT = Path(__file__).resolve().parents[2]

#: One case per way in which folders differ: fused weights, shards, tied embeddings, half precision.
SETTINGS = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_neox": {},
}


@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16 in shards"])
def test_a_folder_goes_in_and_comes_out(family: str, kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors")
    model = small(family, SETTINGS[family])
    sharded = kind != "float32"
    source, out = tmp_path / "source", tmp_path / "out"
    if sharded:
        model.to(torch.bfloat16)
    model.save_pretrained(source, max_shard_size="20KB" if sharded else "1GB")
    assert (source / "model.safetensors.index.json").exists() == sharded

    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    job = {"model.path": source, "data.files": json.dumps([str(text)]), "data.context": 16, "train.steps": 2}
    job |= {"data.tokenizer": "bytes", "train.batch": 4, "eval.every": 0}
    settings = [f"--set={key}={value}" for key, value in job.items()]
    run("train", *settings, "--peers", 3, "--run-dir", tmp_path / "run")
    run("export", tmp_path / "run", "-o", out)

    # The same files with the same tensors, of the same type; and every tensor has learnt.
    for file in source.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as before, safetensors.safe_open(out / file.name, "pt") as after:
            assert set(before.keys()) == set(after.keys())
            for name in before.keys():
                old, new = before.get_tensor(name), after.get_tensor(name)
                assert (old.dtype, old.shape) == (new.dtype, new.shape)
    # The checkpoint has the weights in single precision. Both folders are the same model to `transformers`.
    [checkpoint] = (tmp_path / "run/checkpoints").glob("step-2")
    ids = torch.tensor([list(b"The quick brown fox jumps")])

    def logits(folder: Path) -> torch.Tensor:
        opened, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
        return opened.eval()(ids).logits

    trained, exported, original = logits(checkpoint), logits(out), logits(source)
    largest = trained.abs().max()
    assert (trained - exported).abs().max() <= (2e-2 if sharded else 1e-6) * largest
    assert not torch.equal(trained, original)
