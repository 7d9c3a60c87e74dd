"""What a run has left in its directory."""

from __future__ import annotations

import html
import json
import math
import os
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionllm import _program

if TYPE_CHECKING:
    import numpy
    import torch


@dataclass(frozen=True)
class Step:
    """The figures of one step."""

    step: int
    #: The mean loss of the batch. It is `nan` where the loss was not finite; such a step changes no weight.
    loss: float
    #: How long the step took, in seconds.
    step_s: float
    #: Targets per second, or samples where the targets of an imported model are unknown.
    tokens_per_s: float
    #: Bytes that all peers sent to each other.
    bytes_sent: int
    #: The learning rate.
    lr: float
    #: The global norm of the gradient, before clipping.
    grad_norm: float | None = None
    #: The loss on held-out data, where it was measured after this step.
    val_loss: float | None = None
    #: The share of held-out targets that were predicted, likewise.
    val_accuracy: float | None = None
    #: Whether the update was left out, because the loss or the gradient was not finite.
    skipped: bool = False

    @classmethod
    def parse(cls, line: str) -> Step:
        """Reads a line of `metrics.jsonl`."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in json.loads(line).items() if name in known}
        if values["loss"] is None:
            values["loss"] = math.nan
        return cls(**values)


class Run:
    """A run's directory: its figures and its weights."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def steps(self) -> list[Step]:
        """The figures of each step so far.

        Raises:
            FusionError: There is no run here, or it has not begun.
        """
        text = self._read("metrics.jsonl", "it is written from the first step on")
        # A line without its end is still being written.
        return [Step.parse(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step so far: `nan` where it was not finite.

        Raises:
            FusionError: There is no run here, or it has not begun.
        """
        return [step.loss for step in self.steps]

    @property
    def summary(self) -> dict[str, Any]:
        """The whole run in figures. It is written when the run ends.

        Raises:
            FusionError: There is no run here, or it has not ended.
        """
        summary: dict[str, Any] = json.loads(self._read("summary.json", "it is written when the run ends"))
        return summary

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights of the newest checkpoint as PyTorch's tensors, for `load_state_dict`.

        They have the names of the exported model, of `transformers` (GPT-2) or of torchvision (ResNet).

        Raises:
            FusionError: There is no checkpoint yet.
        """
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory() as directory:
            return load_file(self._export(directory))

    def weights(self) -> dict[str, numpy.ndarray]:
        """The same as NumPy's arrays.

        Raises:
            FusionError: There is no checkpoint yet.
        """
        from safetensors.numpy import load_file

        with tempfile.TemporaryDirectory() as directory:
            return load_file(self._export(directory))

    def report(self) -> str:
        """A page about the run, as HTML that needs no other file: curves, the cluster, a step, events.

        Raises:
            FusionError: There is no run here.
        """
        with tempfile.TemporaryDirectory() as directory:
            page = Path(directory) / "report.html"
            _program.run(["report", str(self.directory), "--output", str(page)], progress=False)
            return page.read_text(encoding="utf-8")

    def _repr_html_(self) -> str | None:
        """The page, in a frame of its own, as notebooks show it. A directory without a run is shown as text."""
        try:
            page = html.escape(self.report())
        except _program.FusionError:
            return None
        style, title = "width:100%;height:900px;border:0", html.escape(repr(self))
        return f'<iframe srcdoc="{page}" title="{title}" style="{style}"></iframe>'

    def _read(self, name: str, when: str) -> str:
        """The text of a file that the program writes."""
        path = self.directory / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if not (self.directory / "job.toml").exists():
                raise _program.FusionError(f"{self.directory}: there is no run here") from None
            raise _program.FusionError(f"{path}: this file is not there yet; {when}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise _program.FusionError(f"{path}: this file cannot be read: {error}") from error

    def _export(self, directory: str) -> Path:
        _program.run(["export", str(self.directory), "--output", directory], progress=False)
        return Path(directory) / "model.safetensors"
