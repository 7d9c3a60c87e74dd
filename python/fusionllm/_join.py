"""Takes part in a run of another machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
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
    backends: Sequence[str] = (),
    workers: Sequence[str] = (),
    name: str | None = None,
    memory: str | None = None,
    progress: bool = True,
) -> bool:
    """Takes part in a run until it ends. An interrupt hands this machine's share over before it leaves.

    Without backends and workers, each accelerator of this machine makes a peer, or else its processor.

    Args:
        ticket: The line that the broker printed.
        backends: Backends of the program, such as `cpu`. Each makes a peer.
        workers: Command lines of workers, such as :func:`worker` makes. Each makes a peer.
        name: The name of this machine in the run.
        memory: What the run may use, such as `8 GiB`.
        progress: Whether messages appear on standard error. The progress of the run is shown at its broker.

    Returns:
        Whether this machine took part to the end.

    Raises:
        FusionError: The ticket is wrong, the broker cannot be reached, or this machine failed.
    """
    options = [("--backend", b) for b in backends] + [("--worker", w) for w in workers]
    options += [(option, value) for option, value in (("--name", name), ("--memory", memory)) if value is not None]
    arguments = [word for option in options for word in option]
    # Other users can read the arguments of a process.
    environment = {"FUSIONLLM_TICKET": ticket}
    result = _program.run(["join", *arguments], environment=environment, tethered=True, progress=progress)
    return any(peer["took_part"] for peer in result.get("peers", [result]))
