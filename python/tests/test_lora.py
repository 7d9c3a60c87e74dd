"""Adapters (LoRA) trained here beside those that PEFT trains: losses, adapters, and weights with the adapters merged."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import folders
from folders import SETTINGS, folder, run
from requirements import needs, needs_torch

pytestmark = [needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH"), needs_torch]

STEPS, CONTEXT, RATE = 20, 24, 5e-3

#: Larger than usual, so that gradients next to 0 do not make updates of their rounding.
EPS = 1e-3


def with_adapters(model, rank: int, targets: str | list[str] = "all-linear"):
    """PEFT's form of a model, with random adapters, so that gradients of both matrices count from the first step."""
    import peft
    import torch

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return adapted


def train_with_peft(adapted, ids, labels) -> list[float]:
    import torch

    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(adapted(ids).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def job(directory: Path, source: Path, adapter: Path, text: Path) -> Path:
    """A job file that trains the adapters of a folder as `train_with_peft` does."""
    train = {"steps": STEPS, "batch": 2, "optimizer": {"lr": RATE, "eps": EPS}}
    data = {"files": [str(text)], "context": CONTEXT}
    return folders.job(directory, source, data, train, lora={"weights": str(adapter)})


@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize("peers", [1, 3])
def test_losses_and_adapters_are_those_of_peft(family: str, peers: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    source, adapter, out = tmp_path / "source", tmp_path / "adapter", tmp_path / "run"
    adapted = with_adapters(folder(family, source), 8)
    adapted.save_pretrained(adapter)
    # A text of one sample, so that each batch is known.
    text = tmp_path / "text.txt"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog."[: CONTEXT + 1])
    tokens = torch.tensor([list(text.read_bytes())])
    expected = train_with_peft(adapted, tokens[:, :-1], tokens[:, 1:])

    run("train", job(tmp_path, source, adapter, text), "--peers", peers, "--run-dir", out)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert max(abs(a - b) for a, b in zip(losses, expected)) < 1e-4, list(zip(losses, expected))

    # The checkpoint has the adapters and nothing else.
    [checkpoint] = (out / "checkpoints").glob(f"step-{STEPS}")
    ours = safetensors.load_file(checkpoint / "model.safetensors")
    theirs = peft.get_peft_model_state_dict(adapted)
    assert {f"base_model.model.{name}" for name in ours} == set(theirs)
    for name, matrix in ours.items():
        assert (matrix - theirs[f"base_model.model.{name}"]).abs().max() < 1e-4, name

    # PEFT opens what is exported.
    run("export", out, "-o", tmp_path / "exported")
    again = peft.PeftModel.from_pretrained(folder(family, tmp_path / "again"), tmp_path / "exported").eval()
    with torch.no_grad():
        assert (again(tokens).logits - adapted.eval()(tokens).logits).abs().max() < 1e-4

    # Merged, the adapters are in the weights.
    run("export", out, "--merge", "-o", tmp_path / "merged")
    transformers = pytest.importorskip("transformers")
    opened, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    merged = adapted.merge_and_unload().eval()
    with torch.no_grad():
        assert (opened.eval()(tokens).logits - merged(tokens).logits).abs().max() < 1e-4

    # The folder that the run started from gives the same model with the exported adapters, and the same text.
    run("export", source, "--adapter", tmp_path / "exported", "-o", tmp_path / "added")
    [one, other] = (safetensors.load_file(tmp_path / path / "model.safetensors") for path in ("merged", "added"))
    assert set(one) == set(other) and all((one[name] == other[name]).all() for name in one)
    text = ("--prompt", "The", "--tokens", 8, "--temperature", 0, "--tokenizer", "bytes")
    assert run("generate", source, "--adapter", tmp_path / "exported", *text) == run("generate", out, *text)


def exported(path: Path, trains: bool):
    """A model with linear layers in blocks and a loss, as `torch.export` writes it. `trains`: with blocks that train."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(16, 40)
            self.down = torch.nn.Linear(40, 16, bias=False)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
            self.head = torch.nn.Linear(16, 5)

        def forward(self, x, labels):
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy(self.head(x), labels)

    torch.manual_seed(2)
    model = Network()
    model.blocks.requires_grad_(trains)
    rows = torch.randn(8, 16), torch.randint(0, 5, (8,))
    batch = torch.export.Dim("batch", min=2, max=64)
    archive = torch.export.export(model, rows, dynamic_shapes={"x": {0: batch}, "labels": {0: batch}})
    torch.export.save(archive, path)
    return model, rows


@pytest.mark.parametrize("peers", [1, 3])
@pytest.mark.parametrize("frozen", ["f32", "bf16", "in the archive"])
def test_an_imported_model_trains_adapters_too(peers: int, frozen: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    in_archive = frozen == "in the archive"
    kept = "f32" if in_archive else frozen
    model, (x, labels) = exported(tmp_path / "model.pt2", not in_archive)
    safetensors.save_file({"x": x, "labels": labels}, tmp_path / "rows.safetensors")
    if frozen == "bf16":
        # What peers keep is rounded, and computes in single precision.
        model = model.to(torch.bfloat16).float()
    adapted = with_adapters(model, 4, ["up", "down"])
    adapted.save_pretrained(tmp_path / "adapter")
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    expected = []
    for _ in range(STEPS):
        loss = adapted(x, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        expected.append(loss.item())

    job = tmp_path / "job.toml"
    job.write_text(
        f"""
[model]
file = "model.pt2"
frozen_dtype = "{kept}"

[lora]
weights = "adapter"

[data]
kind = "tensors"
files = ["rows.safetensors"]
shuffle = false

[train]
steps = {STEPS}
batch = 8
micro_batch = 4
optimizer = {{ lr = {RATE}, eps = {EPS} }}

[eval]
every = 0
"""
    )
    run("train", job, "--peers", peers, "--run-dir", tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(abs(a - b) for a, b in zip(losses, expected)) < 1e-4, list(zip(losses, expected))
    [checkpoint] = (tmp_path / "run/checkpoints").glob(f"step-{STEPS}")
    ours = safetensors.load_file(checkpoint / "model.safetensors")
    theirs = peft.get_peft_model_state_dict(adapted)
    adapters = {name: matrix for name, matrix in ours.items() if "lora_" in name}
    # What the archive froze is a buffer, which a checkpoint has.
    assert in_archive or len(adapters) == len(ours)
    assert {f"base_model.model.{name}" for name in adapters} == set(theirs)
    for name, matrix in adapters.items():
        assert (matrix - theirs[f"base_model.model.{name}"]).abs().max() < 1e-4, name
    if frozen != "bf16":
        run("export", tmp_path / "run", "--merge", "-o", tmp_path / "merged")
        state = safetensors.load_file(tmp_path / "merged/model.safetensors")
        merged = adapted.merge_and_unload().state_dict()
        assert set(state) == set(merged)
        assert all((state[name] - merged[name]).abs().max() < 1e-5 for name in state)


def test_adapters_of_another_strength_are_refused(tmp_path: Path) -> None:
    source, adapter, text = tmp_path / "source", tmp_path / "adapter", tmp_path / "text.txt"
    with_adapters(folder("llama", source), 8).save_pretrained(adapter)
    text.write_bytes(bytes(range(32, 33 + CONTEXT)))
    path = job(tmp_path, source, adapter, text)

    def refusal(*settings: str) -> str:
        command = ["fusionllm", "train", str(path), *(f"--set={setting}" for setting in settings)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "`lora.alpha` is 8, but the adapters of `lora.weights` have 16" in refusal("lora.alpha=8")
    assert "`lora.rank` is 4, but the adapters of `lora.weights` have 8" in refusal("lora.rank=4")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    assert "`use_rslora` is set, which is not supported" in refusal()
    command = ["fusionllm", "generate", source, "--adapter", adapter, "--prompt", "The"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "`use_rslora` is set, which is not supported" in done.stderr
    done = subprocess.run(["fusionllm", "generate", adapter, "--prompt", "The"], capture_output=True, text=True)
    assert done.returncode == 2 and "--adapter" in done.stderr
    # The adapters of another model have other shapes.
    (adapter / "adapter_config.json").unlink()
    other = {"model.path": str(tmp_path / "other"), "lora.rank": 8}
    folder("gpt2", tmp_path / "other")
    assert "adapter_model.safetensors" in refusal(*(f"{key}={value}" for key, value in other.items()))
