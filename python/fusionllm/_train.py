"""Trains a model on this machine, or over several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.numpy import save_file

from fusionllm import _program
from fusionllm._run import Run, Step

#: A job: the path of a file, or its sections as `docs/job.md` names them.
Job = str | os.PathLike[str] | Mapping[str, Any]

#: The file in a run's directory with data that were given in memory.
DATA = "data.safetensors"


def train(
    job: Job | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    peers: int | None = None,
    backends: Sequence[str] = (),
    workers: Sequence[str] = (),
    testbed: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    on_step: Callable[[Step], None] | None = None,
    progress: bool = True,
) -> Run:
    """Trains on this machine, one process per peer. Without a job, it trains a small GPT-2 on a built-in text.

    Args:
        job: The job. Relative paths start at the directory of its file, or at the current directory.
        data: Training data in memory, by the names of the model's inputs, with one row per sample: tensors of PyTorch
            or whatever NumPy takes. They stand for the job's `[data]`, and are kept in the run's directory.
        peers: The number of peers; 4 if nothing else says so.
        backends: Backends of the program, which peers take in turn.
        workers: Command lines of workers, which peers take in turn after the backends. See :func:`worker`.
        testbed: A file of devices and links to emulate.
        steps: The step at which the run stops, before or after the end of the job. A job without `steps` has this
            length.
        run_dir: The run's directory. Without it, it is a new one under `runs/`.
        resume: A run's directory, or a checkpoint, to continue from.
        on_step: Called after each step, once. Steps that are computed again after a machine was lost do not count.
        progress: Whether the progress appears on standard error.

    Returns:
        The run, with its figures and its weights.

    Raises:
        FusionError: The job is wrong, or training failed.
        ValueError: Data in memory stand beside a job file, or the job has something that no file can have.
    """
    arguments = [word for name in backends for word in ("--backend", name)]
    arguments += [word for command in workers for word in ("--worker", command)]
    if testbed is not None:
        arguments += ["--testbed", os.fspath(testbed)]
    return _conduct("train", job, data, peers, arguments, steps, run_dir, resume, on_step, progress)


def broker(
    job: Job | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    peers: int | None = None,
    steps: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    on_step: Callable[[Step], None] | None = None,
    progress: bool = True,
) -> Run:
    """Trains over several machines, once `peers` of them have joined with :func:`join` or `fusionllm join`.

    The ticket that they need is part of the progress, and stands in the file `ticket` of the run's directory.
    Arguments, results and errors are those of :func:`train`.
    """
    return _conduct("broker", job, data, peers, [], steps, run_dir, resume, on_step, progress)


def _conduct(
    command: str,
    job: Job | None,
    data: Mapping[str, Any] | None,
    peers: int | None,
    options: list[str],
    steps: int | None,
    run_dir: str | os.PathLike[str] | None,
    resume: str | os.PathLike[str] | None,
    on_step: Callable[[Step], None] | None,
    progress: bool,
) -> Run:
    if data is not None and not isinstance(job, Mapping):
        raise ValueError("data in memory need the job as a mapping; a job file names its data itself")
    arguments = [command, *options]
    if resume is not None:
        arguments += ["--resume", os.fspath(resume)]
    if peers is not None:
        arguments += ["--peers", str(peers)]
    if steps is not None:
        arguments += ["--steps", str(steps)]
    if job is not None:
        arguments.append("-" if isinstance(job, Mapping) else os.fspath(job))
    directory, new = _directory(arguments, run_dir)
    if run_dir is not None or new:
        arguments += ["--run-dir", str(directory)]
    try:
        job_text = None
        if isinstance(job, Mapping):
            job_text = toml(job if data is None else {**job, "data": _keep(directory, data, job.get("data", {}))})
        metrics = _Metrics(directory / "metrics.jsonl", on_step)
        _program.run(arguments, text=job_text, tethered=True, progress=progress, glance=metrics.glance)
    except _program.FusionError as error:
        if isinstance(job, Mapping) and not job.get("data") and data is None and "file" in job.get("model", {}):
            error.add_note("No data were given, so the job has the built-in text. `data=` takes tensors by name.")
        raise
    finally:
        if new:
            _drop_unbegun(directory)
    return Run(directory)


class _Metrics:
    """Reports the steps that a run adds to its file, each once.

    The file is cut when a run goes back to an earlier step, and may have grown again before anybody looks.
    """

    def __init__(self, path: Path, on_step: Callable[[Step], None] | None) -> None:
        self.path = path
        self.on_step = on_step
        #: The number of the last step that was reported.
        self.reported = 0
        #: How many bytes were read, and the last line of them. If that line is elsewhere now, the file was cut.
        self.read = 0
        self.last = b""
        #: What an earlier run has left. A step that it computed, too, is a new line if it is computed again.
        self.earlier = frozenset(self._new_lines())

    def glance(self) -> None:
        if self.on_step is None:
            return
        for line in self._new_lines():
            step = None if line in self.earlier else Step.parse(line.decode())
            if step is not None and step.step > self.reported:
                self.reported = step.step
                self.on_step(step)

    def _new_lines(self) -> list[bytes]:
        """The whole lines behind those that were read, or all lines if the file was cut."""
        if not self.path.exists():
            return []
        # Without a buffer, each call reads what the file has at one moment.
        with self.path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self.read - len(self.last))
            text = file.read(size)
            if text.startswith(self.last):
                text = text[len(self.last) :]
            else:
                file.seek(0)
                text, self.read, self.last = file.read(size), 0, b""
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
        if lines:
            self.read += sum(map(len, lines))
            self.last = lines[-1]
        return lines


def _directory(arguments: Sequence[str], run_dir: str | os.PathLike[str] | None) -> tuple[Path, bool]:
    """The run's directory, and whether it is new. The program chooses it, before the run begins: data go there."""
    if run_dir is not None:
        return Path(run_dir), not Path(run_dir).exists()
    reserved = _program.run([*arguments, "--reserve"], progress=False)
    return Path(reserved["directory"]), reserved["new"]


def _drop_unbegun(directory: Path) -> None:
    """Removes a directory that was made for a run that never began: the program has written nothing to it."""
    if directory.is_dir() and {entry.name for entry in directory.iterdir()} <= {DATA}:
        (directory / DATA).unlink(missing_ok=True)
        directory.rmdir()


def _keep(directory: Path, data: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes data to the run's directory, where a resumed run finds them, and returns the job's `[data]`."""
    file = (directory / DATA).resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: _rows(value) for name, value in data.items()}, file)
    return {**settings, "kind": "tensors", "files": [file]}


def _rows(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy has no bfloat16. Its values are f32's, too.
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    return np.ascontiguousarray(value)


def toml(sections: Mapping[str, Any]) -> str:
    """A job file with these sections."""
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"the job's {name!r} must be a section: a mapping of its settings, not {section!r}")
    return tomli_w.dumps(_plain(sections))


def _plain(value: Any) -> Any:
    """The same value, with strings for paths and lists for other sequences: the types that `tomli_w` takes."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise ValueError(f"a job takes strings, numbers, booleans, lists and mappings, not {value!r}")
