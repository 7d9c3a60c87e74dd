"""The functions of the package `fusionllm`. Those that train need the program on the `PATH`."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fusionllm
import numpy as np
import pytest
from fusionllm import _program
from fusionllm._train import _Metrics, toml

from requirements import needs, needs_torch

needs_program = needs("wheel", shutil.which("fusionllm") is not None, "needs the program on the PATH")

#: Where the package is. The path of modules may be relative to a directory that tests leave.
PACKAGES = str(Path(fusionllm.__file__).resolve().parents[1])

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has neither signals nor scripts that are programs")

TINY = {
    "model": {"family": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1},
    "data": {"context": 8},
    "train": {"steps": 3, "batch": 2},
}


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_mapping_becomes_the_same_job_file() -> None:
    job = {
        "model": {"file": Path('my "model"\n.pt2'), "n_layer": 2},
        "data": {"files": ["a/*.txt", "größe \x7f"], "validation": 0.05},
        "train": {"optimizer": {"name": "adamw", "betas": [0.9, 0.95], "lr": 1e-5}},
        "eval": {},
        "checkpoint": {"copies": False},
    }
    read = tomllib.loads(toml(job))
    job["model"]["file"] = str(job["model"]["file"])
    assert read == job


def test_what_no_job_file_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="'steps' must be a section"):
        toml({"steps": 3})
    with pytest.raises(ValueError, match="not None"):
        toml({"train": {"steps": None}})


def test_data_in_memory_do_not_stand_beside_a_job_file() -> None:
    with pytest.raises(ValueError, match="job as a mapping"):
        fusionllm.train("job.toml", data={"x": np.zeros(2)})


def test_a_workers_command_line_is_that_of_this_python() -> None:
    assert shlex.split(fusionllm.worker("torch", device="cuda:1")) == [
        sys.executable, "-m", "fusionllm_torch", "--device", "cuda:1",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no device"):
        fusionllm.worker("jax", device="cuda")
    with pytest.raises(ValueError, match="no worker"):
        fusionllm.worker("tensorflow")


def line(step: int, loss: float | None = 1.0) -> str:
    """A line of `metrics.jsonl`. Its length depends on the loss."""
    return json.dumps({"step": step, "loss": loss, "step_s": 1, "tokens_per_s": 1, "bytes_sent": 1, "lr": 1}) + "\n"


def test_a_loss_that_is_not_finite_is_a_number() -> None:
    Path("metrics.jsonl").write_text(line(1) + line(2, None).replace("}", ', "skipped": true}'))
    first, second = fusionllm.Run(".").steps
    assert (first.loss, first.skipped) == (1.0, False)
    assert math.isnan(second.loss) and second.skipped


def test_a_directory_without_a_run_says_so() -> None:
    with pytest.raises(fusionllm.FusionError, match=r"^nowhere: there is no run here$"):
        fusionllm.Run("nowhere").losses  # noqa: B018
    Path("job.toml").touch()
    with pytest.raises(fusionllm.FusionError, match=r"summary.json: .*; it is written when the run ends$"):
        fusionllm.Run(".").summary  # noqa: B018


def test_a_run_that_goes_back_cuts_its_file() -> None:
    """A machine was lost at step 4, so the run went back to step 2. Nobody looked before it had gone further."""
    path, seen = Path("metrics.jsonl"), []
    metrics = _Metrics(path, seen.append)
    metrics.glance()
    path.write_text("".join(map(line, [1, 2, 3, 4])) + line(5)[:10])
    metrics.glance()
    # A byte offset lies in the middle of a line now.
    path.write_text("".join([line(1), line(2), *(line(step, 0.123456789) for step in (3, 4, 5, 6))]))
    metrics.glance()
    # All of it is shorter, and then longer again. No line stays where it was.
    path.write_text(line(1) + line(2)[:20])
    metrics.glance()
    path.write_text("".join(line(step, 0.5) for step in range(1, 9)))
    metrics.glance()
    metrics.glance()
    assert [s.step for s in seen] == [*range(1, 9)]
    assert [s.loss for s in seen] == [1.0] * 4 + [0.123456789] * 2 + [0.5] * 2


def test_steps_of_an_earlier_run_are_reported_if_computed_again() -> None:
    path, seen = Path("metrics.jsonl"), []
    earlier = [line(step, 0.25) for step in (1, 2, 3)]
    path.write_text("".join(earlier))
    metrics = _Metrics(path, seen.append)
    metrics.glance()
    # Its checkpoint was that of step 1.
    path.write_text(earlier[0] + "".join(line(step, 0.125) for step in (2, 3, 4)))
    metrics.glance()
    assert [s.step for s in seen] == [2, 3, 4]


@needs_program
def test_every_step_is_reported_once_and_runs_are_numbered(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[fusionllm.Step] = []
    run = fusionllm.train(TINY, peers=1, on_step=seen.append, progress=False)
    assert (run.directory, [s.step for s in seen]) == (Path("runs/0001"), [1, 2, 3])
    assert run.steps == seen and run.losses == [s.loss for s in seen]
    assert run.summary["steps"] == 3 and run.summary["loss_last"] == run.losses[-1]
    assert capfd.readouterr().err == ""
    assert fusionllm.train(TINY, peers=1, progress=False).losses == run.losses
    assert Path("runs/0002").is_dir()


@needs_program
def test_a_run_is_resumed_in_its_directory() -> None:
    whole = fusionllm.train({**TINY, "train": {"steps": 5, "batch": 2}}, peers=1, run_dir="whole", progress=False)
    fusionllm.train(TINY, peers=1, run_dir="half", progress=False)
    seen: list[int] = []
    rest = {**TINY, "train": {"steps": 5, "batch": 2}}
    run = fusionllm.train(rest, peers=1, resume="half", on_step=lambda s: seen.append(s.step), progress=False)
    assert (run.directory, seen, run.losses) == (Path("half"), [4, 5], whole.losses)


@needs_program
def test_a_run_that_stops_early_keeps_its_learning_rates() -> None:
    job = {**TINY, "train": {"steps": 5, "batch": 2, "optimizer": {"decay": "cosine"}}}
    whole = fusionllm.train(job, peers=1, run_dir="whole", progress=False)
    fusionllm.train(job, peers=1, steps=3, run_dir="half", progress=False)
    run = fusionllm.train(peers=1, steps=5, resume="half", progress=False)
    assert [(s.lr, s.loss) for s in run.steps] == [(s.lr, s.loss) for s in whole.steps]


@needs_program
def test_a_checkpoint_outside_of_a_run_begins_a_new_one() -> None:
    fusionllm.train(TINY, peers=1, run_dir="run", progress=False)
    Path("run/checkpoints/step-3").rename("elsewhere")
    run = fusionllm.train({**TINY, "train": {"steps": 4, "batch": 2}}, peers=1, resume="elsewhere", progress=False)
    assert (run.directory, [s.step for s in run.steps]) == (Path("runs/0001"), [4])


@needs_program
def test_runs_that_begin_at_once_do_not_meet() -> None:
    train = lambda _: fusionllm.train(TINY, peers=1, progress=False)
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(train, range(3)))
    assert {run.directory for run in runs} == {Path(f"runs/000{number}") for number in (1, 2, 3)}
    assert all(run.summary["steps"] == 3 for run in runs)


@needs_program
def test_weights_have_the_names_of_transformers() -> None:
    weights = fusionllm.train(TINY, peers=2, progress=False).weights()
    assert weights["transformer.wte.weight"].shape == (256, 8)


@needs_program
def test_a_notebook_shows_the_page_of_a_run() -> None:
    run = fusionllm.train(TINY, peers=1, progress=False)
    page = run.report()
    assert page.startswith("<!DOCTYPE html>") and "One training step" in page
    frame = run._repr_html_()
    assert frame is not None and frame.count("<") == 2, "the page is escaped"
    assert html.unescape(frame.split('srcdoc="')[1].split('"')[0]) == page
    assert fusionllm.Run("nowhere")._repr_html_() is None


@needs_program
@needs_torch
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_an_export_is_a_model_of_transformers_with_its_tokenizer(tokenizer: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = fusionllm.train({**TINY, "data": {"context": 8, "tokenizer": tokenizer}}, peers=1, progress=False)
    subprocess.run(["fusionllm", "export", str(run.directory), "--output", "exported"], check=True)
    theirs = AutoTokenizer.from_pretrained("exported")
    text = "Hello world, it's 2024!\n\n  ok Größe \U0001f980\t\x00 , ."
    ids = theirs(text)["input_ids"]
    assert theirs.decode(ids) == text
    if tokenizer == "bytes":
        assert (ids, len(theirs), theirs.eos_token) == (list(text.encode()), 256, None)
    else:
        # Those of OpenAI's encoder.
        assert ids[:10] == [15496, 995, 11, 340, 338, 48609, 0, 628, 220, 12876]
        assert (theirs("<|endoftext|>")["input_ids"], len(theirs), theirs.eos_token_id) == ([50256], 50257, 50256)
    model = AutoModelForCausalLM.from_pretrained("exported")
    prompt = torch.tensor([ids[:6]])
    assert model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 8)


@needs_program
def test_errors_are_those_of_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(fusionllm.FusionError, match=r"standard input.*unknown setting `stepz`[\s\S]*did you mean"):
        fusionllm.train({"train": {"stepz": 3}})
    # They are not printed beside.
    assert capfd.readouterr().err == ""
    with pytest.raises(fusionllm.FusionError, match="this checkpoint is not there"):
        fusionllm.Run("nowhere").weights()
    with pytest.raises(fusionllm.FusionError, match="ticket"):
        fusionllm.join("nonsense", progress=False)


@needs_program
def test_a_run_that_never_began_leaves_nothing() -> None:
    rows = np.zeros((4, 8), np.int64)
    with pytest.raises(fusionllm.FusionError, match="tensors are for models from elsewhere"):
        fusionllm.train({**TINY, "data": {}}, data={"input_ids": rows, "labels": rows}, progress=False)
    assert not list(Path("runs").iterdir())


@needs_program
@needs_torch
def test_what_the_readme_says_about_a_pytorch_model_works() -> None:
    import torch
    from safetensors.torch import load_file, save_file

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.line(x), y)

    model, x, y = Model(), torch.randn(64, 8), torch.randint(3, (64,))
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Your own PyTorch model", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "toml", "console", "python"]
    recipe, job, commands, notebook = (block for _, block in blocks)
    exec(recipe, {"torch": torch, "model": model, "x": x, "y": y})  # noqa: S102
    Path("shards").mkdir()
    save_file({"x": x, "y": y}, "shards/0.safetensors")
    Path("job.toml").write_text(job + "[train]\nsteps = 2\n")
    for command in commands.splitlines():
        subprocess.run(shlex.split(command.removeprefix("$ "), comments=True), check=True)
    model.load_state_dict(load_file("out/model.safetensors"))
    notebook = notebook.replace('"model.pt2"}}', '"model.pt2"}, "train": {"steps": 2}}')
    exec(notebook, {"fusionllm": fusionllm, "model": model, "x": x, "y": y})  # noqa: S102


@needs_program
@needs_torch
def test_data_in_memory_find_the_inputs_that_they_are_meant_for() -> None:
    import torch

    class Distance(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.scale * x - y).square().mean()

    rows = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    # One tensor for both: `torch.export` alone makes one input of them.
    fusionllm.export(Distance(), (example := rows.float(), example), "model.pt2")
    job = {"model": {"file": "model.pt2"}, "train": {"steps": 1, "batch": 4, "micro_batch": 4}}
    run = fusionllm.train(job, data={"x": rows, "y": 0 * rows}, peers=1, progress=False)
    assert run.losses == pytest.approx([rows.float().square().mean().item()])
    with pytest.raises(fusionllm.FusionError, match=r"the model takes x: .*, but the data have a: "):
        fusionllm.train(job, data={"a": rows, "b": 0 * rows}, peers=1, progress=False)
    with pytest.raises(fusionllm.FusionError) as caught:
        fusionllm.train(job, peers=1, progress=False)
    assert caught.value.__notes__ == [
        "No data were given, so the job has the built-in text. `data=` takes tensors by name."
    ]


@needs_program
def test_what_a_callback_raises_ends_the_run() -> None:
    def stop(step: fusionllm.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fusionllm.train({**TINY, "train": {"steps": 100_000, "batch": 2}}, peers=1, on_step=stop, progress=False)
    # It ended as by Ctrl-C: what was done is summed up.
    assert 1 <= fusionllm.Run("runs/0001").summary["steps"] < 100_000


@needs_torch
def test_models_that_cannot_be_trained_are_refused() -> None:
    import torch

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Several(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
            return x * 2, None, x.mean()

    assert fusionllm.export(Several(), (torch.zeros(2, 3),), "several.pt2").exists()
    with pytest.raises(ValueError, match=r"mean loss as one number, and it returns torch.float32 of shape"):
        fusionllm.export(Twice(), (torch.zeros(2, 3),), "m.pt2")
    with pytest.raises(ValueError, match=r"at least two samples.*\[\[1, 3\]\]"):
        fusionllm.export(Twice(), {"x": torch.zeros(1, 3)}, "m.pt2")
    with pytest.raises(ValueError, match="one batch of tensors"):
        fusionllm.export(Twice(), [3], "m.pt2")
    assert not Path("m.pt2").exists()


@needs_program
@needs_torch
def test_a_model_of_pytorch_comes_back_trained() -> None:
    import torch
    from safetensors.torch import save_file

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)
            self.line = torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.line(self.norm(x)), y)

    torch.manual_seed(1)
    x = torch.randn(64, 3)
    y = x.sum(dim=1, keepdim=True)
    model = Mean()
    # By name, and with a batch norm, whose statistics stand among the outputs of the exported program.
    fusionllm.export(model, {"x": x[:2], "y": y[:2]}, "mean.pt2")
    train = {"steps": 80, "batch": 16, "micro_batch": 16, "optimizer": {"name": "sgd", "lr": 0.02}}
    job = {"model": {"file": "mean.pt2"}, "train": train}
    run = fusionllm.train(job, data={"x": x, "y": y}, peers=2, progress=False)
    before = model.eval()(x, y).item()
    model.load_state_dict(run.state_dict())
    assert model(x, y).item() < 0.2 < before

    # Another run starts from the whole state, batch norm's statistics among it. At this rate only they change.
    save_file(model.state_dict(), "mean.safetensors")
    train = {"steps": 1, "batch": 48, "micro_batch": 48, "optimizer": {"name": "sgd", "lr": 1e-30}}
    job = {"model": {**job["model"], "weights": "mean.safetensors"}, "train": train, "data": {"validation": 0.25}}
    again = fusionllm.train(job, data={"x": x, "y": y}, peers=1, progress=False)
    assert again.losses == pytest.approx([model.train()(x[:48], y[:48]).item()], rel=1e-5)
    assert again.steps[0].val_loss == pytest.approx(model.eval()(x[48:], y[48:]).item(), rel=1e-5)


@needs_program
@needs_torch
def test_a_moved_run_has_its_data_and_its_model() -> None:
    import torch

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.line(x), y)

    torch.manual_seed(1)
    x = torch.randn(16, 3)
    data = {"x": x, "y": x.sum(dim=1, keepdim=True)}
    fusionllm.export(Line(), {name: rows[:2] for name, rows in data.items()}, "line.pt2")
    train = {"steps": 4, "batch": 4, "optimizer": {"name": "sgd", "lr": 0.1}}
    job = {"model": {"file": "line.pt2"}, "train": train}
    whole = fusionllm.train(job, data=data, peers=1, run_dir="whole", progress=False)
    half = fusionllm.train(job, data=data, peers=1, run_dir="half", steps=2, progress=False)
    weights = half.weights()

    shutil.move("half", "moved")
    Path("line.pt2").unlink()
    moved = fusionllm.Run("moved").weights()
    assert all(np.array_equal(moved[name], weights[name]) for name in weights)
    run = fusionllm.train(peers=1, steps=4, resume="moved", progress=False)
    assert run.losses == whole.losses
    assert not Path("half").exists()


class Session:
    """Python in a session of its own, as in a terminal of its own, that trains until it is stopped."""

    SCRIPT = "import fusionllm; fusionllm.train({job}, peers=2, run_dir='run', on_step=lambda step: print(step.step))"

    def __init__(self) -> None:
        job = {**TINY, "train": {"steps": 1_000_000, "batch": 2}}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", self.SCRIPT.format(job=job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": PACKAGES},
            start_new_session=True,
        )
        for line in self.process.stdout:
            if int(line) >= 5:
                return
        raise AssertionError("the run ended early")

    def wait(self) -> int:
        """Waits for the end of Python, and of the program that it started."""
        import fcntl

        self.process.stdout.close()
        status = self.process.wait()
        # The program has a lock on it.
        with Path("run/metrics.jsonl").open() as metrics:
            fcntl.flock(metrics, fcntl.LOCK_EX)
        return status


@needs_program
@posix
@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT", "SIGTERM", "SIGINT", "SIGKILL"])
@pytest.mark.parametrize("group", [True, False], ids=["group", "python"])
def test_whatever_ends_python_saves_the_run_and_leaves_no_process(name: str, group: bool) -> None:
    session = Session()
    number = getattr(signal, name)
    if group:
        os.killpg(session.process.pid, number)
    else:
        session.process.send_signal(number)
    assert session.wait() != 0
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    saved = max((int(path.name.removeprefix("step-")) for path in Path("run/checkpoints").glob("step-*")), default=0)
    if group and name == "SIGKILL":
        assert saved <= steps[-1]
    else:
        assert saved == steps[-1] >= 5


@posix
def test_a_program_may_take_any_time_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program stands for one with a slow disk: it ends when the test lets it, long after its standard input did."""
    program = tmp_path / "program"
    os.mkfifo(tmp_path / "disk")
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "sys.stdin.read()\n"
        "print('saving', file=sys.stderr, flush=True)\n"
        f"open({str(tmp_path / 'disk')!r}).read()\n"
        f"open({str(tmp_path / 'saved')!r}, 'w').close()\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(_program, "find", lambda: str(program))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with ThreadPoolExecutor() as pool:
        # Opening waits until the program reads.
        pool.submit(lambda: (tmp_path / "disk").open("w").close())
        with pytest.raises(KeyboardInterrupt):
            _program.run(["train"], tethered=True, progress=False, glance=interrupt)
    assert (tmp_path / "saved").exists()


@posix
def test_a_closed_terminal_does_not_hold_a_program_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    # More than a pipe holds.
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.stderr.write('line\\n' * 100_000)\nprint('{{}}')\n")
    program.chmod(0o755)
    monkeypatch.setattr(_program, "find", lambda: str(program))

    class Closed:
        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    assert _program.run(["train"], tethered=True) == {}
