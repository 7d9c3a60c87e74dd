"""Takes part in a run of another machine."""

from __future__ import annotations

import shlex
import sys
from typing import Literal

from fusionllm import _program


def worker(framework: Literal["torch", "jax", "numpy"], *, device: str | None = None) -> str:
    """The command line of a worker that computes with a framework of this Python's environment.

    Args:
        framework: The framework.
        device: PyTorch's name of the device, such as `cuda`, `cuda:1`, `mps` or `xpu`. PyTorch alone takes one.

    Raises:
        ValueError: There is no such worker, or it takes no device.
    """
    if framework not in ("torch", "jax", "numpy"):
        raise ValueError(f'there is no worker for {framework!r}, only for "torch", "jax" and "numpy"')
    if device is not None and framework != "torch":
        raise ValueError(f"the worker for {framework} computes on the framework's default device; it takes no device")
    command = [sys.executable, "-m", f"fusionllm_{framework}"]
    return shlex.join(command if device is None else [*command, "--device", device])


def join(
    ticket: str,
    *,
    backend: str | None = None,
    worker: str | None = None,
    name: str | None = None,
    memory: str | None = None,
    progress: bool = True,
) -> bool:
    """Takes part in a run until it ends. An interrupt hands this machine's share over before it leaves.

    Args:
        ticket: The line that the broker printed.
        backend: A backend of the program, such as `cpu`.
        worker: The command line of a worker, such as :func:`worker` makes.
        name: The name of this machine in the run.
        memory: What the run may use, such as `8 GiB`.
        progress: Whether messages appear on standard error. The progress of the run is shown at its broker.

    Returns:
        Whether this machine took part to the end.

    Raises:
        FusionError: The ticket is wrong, the broker cannot be reached, or this machine failed.
    """
    options = {"--backend": backend, "--worker": worker, "--name": name, "--memory": memory}
    arguments = [word for option, value in options.items() if value is not None for word in (option, value)]
    # Other users can read the arguments of a process.
    result = _program.run(["join", *arguments], environment={"FUSIONLLM_TICKET": ticket}, progress=progress)
    return bool(result["took_part"])
