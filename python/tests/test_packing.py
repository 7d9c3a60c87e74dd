"""Packed conversations beside PyTorch, which computes each of them alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from folders import SETTINGS, folder, job, run
from requirements import needs, needs_torch

pytestmark = [needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH"), needs_torch]

STEPS, BATCH, CONTEXT, RATE, EPS = 6, 4, 48, 5e-3, 1e-3

#: Pairs of unlike lengths. Some fit into a sample together, and none fills it.
CHATS = [("ab" * (1 + i % 5), "xyz" * (1 + 3 * i % 7)) for i in range(60)]


def packed() -> list[list[tuple[str, str]]]:
    """The samples: as many of the pairs that follow each other as fit."""
    samples, room = [], 0
    for prompt, answer in CHATS:
        places = len(prompt) + len(answer) - 1
        if places > room:
            samples.append([])
            room = CONTEXT
        samples[-1].append((prompt, answer))
        room -= places
    return samples


def train_with_pytorch(model) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    samples, losses = packed(), []
    for step in range(STEPS):
        sums, targets = [], 0
        for prompt, answer in sum(samples[step * BATCH : (step + 1) * BATCH], []):
            tokens = torch.tensor([list((prompt + answer).encode())])
            logits = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
            sums.append(torch.nn.functional.cross_entropy(logits, tokens[0, len(prompt) :], reduction="sum"))
            targets += len(answer)
        loss = sum(sums) / targets
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize("peers", [1, 3])
def test_losses_are_those_of_each_conversation_alone(family: str, peers: int, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "run"
    expected = train_with_pytorch(folder(family, source))
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": p, "completion": a}) + "\n" for p, a in CHATS))
    data = {"files": [str(chats)], "context": CONTEXT, "packing": True, "shuffle": False}
    optimizer = {"lr": RATE, "eps": EPS, "weight_decay": 0.0}
    train = {"steps": STEPS, "batch": BATCH, "optimizer": optimizer}
    path = job(tmp_path, source, data, train)
    run("train", path, "--peers", peers, "--run-dir", out)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in metrics] == pytest.approx(expected, abs=1e-5)
