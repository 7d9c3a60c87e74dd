"""Weight decay and learning rates by parameter, beside PyTorch's parameter groups."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from folders import SETTINGS, folder, job, run
from requirements import needs, needs_torch

pytestmark = [needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH"), needs_torch]

STEPS, CONTEXT, RATE, DECAY = 10, 24, 5e-3, 5.0

#: A group with a rate and a decay of its own for the matrices of one block, and one that decays norms, but not biases.
GROUPS = [
    {"parameters": ["1.mlp"], "lr": RATE / 4, "weight_decay": 1.0},
    {"parameters": ["*norm*.weight", "ln_*.weight"], "weight_decay": 2.0},
]


def standard_groups(model) -> list[dict]:
    """The groups of a training script by hand: biases, norms and embeddings are not decayed."""
    import torch

    kept, decayed = [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            plain = name != "bias" and "Norm" not in type(module).__name__
            (decayed if plain and not isinstance(module, torch.nn.Embedding) else kept).append(parameter)
    # A tied output layer names the table again.
    tables = {id(parameter) for parameter in kept}
    decayed = [parameter for parameter in decayed if id(parameter) not in tables]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": list(dict.fromkeys(kept)), "weight_decay": 0.0}]


def own_groups(model) -> list[dict]:
    """The groups that `GROUPS` names, before those of `standard_groups`."""
    named = dict(model.named_parameters())
    mlp = {id(p): p for name, p in named.items() if ".1.mlp." in name}
    is_norm = [("norm" in name or "ln_" in name) and name.endswith(".weight") for name in named]
    norms = {id(p): p for p, norm in zip(named.values(), is_norm) if norm and id(p) not in mlp}
    groups = standard_groups(model)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in mlp and id(p) not in norms]
    return [
        {"params": list(mlp.values()), "lr": RATE / 4, "weight_decay": 1.0},
        {"params": list(norms.values()), "weight_decay": 2.0},
        *groups,
    ]


def train_with_pytorch(model, groups: list[dict], ids, labels) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=DECAY)
    # Groups share the shape of the rate: a warm-up, then half a cosine down to a tenth.
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 3, 1.0, 2)
    losses = []
    for step in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step < 2:
            warmup.step()
    return losses


@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize(("groups", "peers"), [([], 1), (GROUPS, 1), (GROUPS, 3)])
def test_losses_and_weights_are_those_of_pytorch(family: str, groups: list[dict], peers: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    source, out = tmp_path / "source", tmp_path / "run"
    model = folder(family, source)
    # A text of one sample, so that each batch is known.
    text = tmp_path / "text.txt"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog."[: CONTEXT + 1])
    tokens = torch.tensor([list(text.read_bytes())])
    expected = train_with_pytorch(
        model, own_groups(model) if groups else standard_groups(model), tokens[:, :-1], tokens[:, 1:]
    )

    # A pattern must name a parameter.
    other = "*norm*.weight" if family == "gpt2" else "ln_*.weight"
    own = [{**group, "parameters": [p for p in group["parameters"] if p != other]} for group in groups]
    optimizer = {"lr": RATE, "eps": 1e-3, "weight_decay": DECAY, "warmup": 3, "groups": own}
    train = {"steps": STEPS, "batch": 2, "optimizer": optimizer}
    path = job(tmp_path, source, {"files": [str(text)], "context": CONTEXT}, train)
    run("train", path, "--peers", peers, "--run-dir", out)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in metrics] == pytest.approx(expected, abs=1e-5)
    exported = tmp_path / "exported"
    run("export", out, "-o", exported)
    ours = safetensors.load_file(exported / "model.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), atol=2e-5, rtol=1e-4, msg=name)


def test_a_pattern_that_names_nothing_is_refused_with_the_names(tmp_path: Path) -> None:
    folder("llama", tmp_path / "source")
    text = tmp_path / "text.txt"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog.")
    optimizer = {"groups": [{"parameters": ["attn.bias"], "lr": 1.0}]}
    path = job(tmp_path, tmp_path / "source", {"files": [str(text)], "context": 8}, {"optimizer": optimizer})
    done = subprocess.run(["fusionllm", "train", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert 'no parameter that is trained is named "attn.bias"' in done.stderr
    assert "model.layers.*.self_attn.q_proj.weight" in done.stderr
