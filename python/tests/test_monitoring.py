"""What other programs read of a run: Prometheus, Grafana, TensorBoard and trackers of experiments."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from requirements import needs

needs_program = needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH")
needs_readers = needs(
    "python",
    all(importlib.util.find_spec(name) for name in ("prometheus_client", "tensorboard")),
    "needs prometheus_client and tensorboard, which python/requirements.txt has",
)

ROOT = Path(__file__).resolve().parents[2]

#: A model so small that a step takes milliseconds.
TINY = [
    "--set=model.n_layer=2",
    "--set=model.n_embd=16",
    "--set=model.n_head=2",
    "--set=data.context=16",
    "--set=train.batch=4",
    "--set=train.micro_batch=1",
    "--set=eval.every=2",
    "--set=eval.batches=1",
]


def train(directory: Path, *options: str) -> None:
    subprocess.run(["fusionllm", "train", "--peers", "2", *options], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The figures of a run that trains, once it has a checkpoint. Its machines are known, so there are predictions."""
    directory = tmp_path_factory.mktemp("run")
    device = 'tflops = 0.1\nmemory_bandwidth = "10 GB/s"\nmemory = "1 GiB"\nslowdown = 2\nsite = "here"\n'
    devices = "".join(f'[[device]]\nname = "peer-{i}"\n{device}' for i in range(2))
    (directory / "testbed.toml").write_text(f'{devices}[[site]]\nname = "here"\nrate = "1 Gbps"\nlatency = "0.1 ms"\n')
    command = ["fusionllm", "train", "--testbed", "testbed.toml", "--run-dir", "run", "--steps", "1000000", *TINY]
    command += ["--set=checkpoint.every=2", "--set=plan.scheduler=equal-number"]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stderr is not None
            # The page comes before the first validation.
            seen: list[str] = []
            while not any("validation loss" in line for line in seen):
                seen.append(run.stderr.readline())
                assert seen[-1], f"the run ended: {seen}"
            url = (directory / "run/dashboard").read_text().strip()
            assert any(url in line for line in seen)
            text = ""
            while "\nfusionllm_checkpoint_step " not in text:
                with urllib.request.urlopen(f"{url}metrics") as answer:
                    text = answer.read().decode()
            return text
        finally:
            run.send_signal(signal.SIGTERM)
            run.stderr.read()


@needs_program
@needs_readers
def test_prometheus_reads_the_figures_of_a_run(exposition: str) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(exposition)}
    values = {sample.name: sample.value for family in families.values() for sample in family.samples}
    # The parser leaves out the `_total` of a counter's name.
    kinds = {"fusionllm_loss": "gauge", "fusionllm_tokens": "counter", "fusionllm_step_seconds": "histogram"}
    assert {name: families[name].type for name in kinds} == kinds
    assert all(family.documentation for family in families.values())
    assert 0 < values["fusionllm_loss"] < 10
    assert values["fusionllm_steps_total"] == values["fusionllm_step_seconds_count"] == values["fusionllm_step"]
    assert values["fusionllm_tokens_total"] == 64 * values["fusionllm_step"]
    peers = {sample.labels["peer"] for sample in families["fusionllm_peer_info"].samples}
    assert peers == {"peer-0", "peer-1"}
    assert {sample.labels["standing"]: sample.value for sample in families["fusionllm_peers"].samples}["present"] == 2


@needs_program
@needs_readers
def test_the_figures_that_the_board_shows_exist(exposition: str) -> None:
    board = json.loads((ROOT / "deploy/grafana/fusionllm.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [json.dumps(variable["query"]) for variable in board["templating"]["list"]]
    shown = {name for query in queries for name in re.findall(r"fusionllm_\w+", query)}
    named = set(re.findall(r"^(fusionllm_\w+)", exposition, re.MULTILINE))
    # There is a sample of an incident once there was one.
    named |= set(re.findall(r"^# TYPE (\w+) counter", exposition, re.MULTILINE))
    assert shown <= named, shown - named
    assert len(shown) > 20


@needs_program
@needs_readers
def test_tensorboard_reads_a_run_that_went_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "--run-dir", "run", "--steps", "6", "--set=checkpoint.every=2", *TINY)
    # The learning rate tells the steps that are computed again from those that were there before.
    again = ["--set=checkpoint.every=2", "--set=train.optimizer.lr=2e-3", *TINY]
    train(tmp_path, "--resume", "run/checkpoints/step-4", "--steps", "5", *again)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    names = [name for name in lines[3] if name not in ("step", "skipped", "codecs", "spectra")]
    assert sorted(board.Tags()["scalars"]) == sorted(names)
    for name in names:
        expected = {line["step"]: line[name] for line in lines if line.get(name) is not None}
        read = {scalar.step: scalar.value for scalar in board.Scalars(name)}
        assert read == pytest.approx(expected, rel=1e-6), name
        assert len(board.Scalars(name)) == len(expected), name
    assert all(scalar.wall_time > 1.6e9 for scalar in board.Scalars("loss"))


@needs_program
@pytest.mark.parametrize("tracker", ["trackio", "wandb"])
def test_a_tracker_gets_each_step(tmp_path: Path, tracker: str) -> None:
    """A module stands in that has the functions of both and writes down their calls."""
    (tmp_path / f"{tracker}.py").write_text(
        "import json\n"
        "calls = []\n"
        "def init(project, config): calls.append(['init', project])\n"
        "def log(metrics, step): calls.append(['log', metrics, step])\n"
        "def finish(): print(json.dumps(calls))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "python")])
    command = [sys.executable, str(ROOT / "examples/python/trackers.py"), tracker]
    ran = subprocess.run(
        command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    first, *logged = json.loads(ran.stdout)
    assert first == ["init", "fusionllm"]
    assert [step for _, _, step in logged] == list(range(1, 21))
    assert all(metrics["step"] == step and metrics["loss"] > 0 for _, metrics, step in logged)
    assert [step for _, metrics, step in logged if "val_loss" in metrics] == [10, 20]
