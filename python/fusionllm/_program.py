"""Runs the program `fusionllm`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: How often what a running program has written is looked at, in seconds.
GLANCE = 0.2

#: How the program's last message begins if it fails.
ERROR = "error: "


class FusionError(Exception):
    """What `fusionllm` could not do, in its words."""


def find() -> str:
    """The path of the program: the one that was installed with this package, or else the one on the `PATH`.

    Raises:
        FusionError: There is none.
    """
    installed = Path(sysconfig.get_path("scripts")) / ("fusionllm.exe" if os.name == "nt" else "fusionllm")
    if installed.is_file():
        return str(installed)
    found = shutil.which("fusionllm")
    if found is None:
        raise FusionError(f"there is no program at {installed}, and no `fusionllm` on the PATH: pip install fusionllm")
    return found


def run(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
    tethered: bool = False,
    progress: bool = True,
    glance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs the program and returns the JSON object that it prints.

    Args:
        arguments: The command and its arguments, without `--json`.
        environment: Variables beside those of this process.
        text: What a tethered program reads on standard input.
        tethered: Whether the command takes `--tethered`. It then saves what it has and ends as soon as its standard input
            closes, so also if this process is killed.
        progress: Whether what the program says while it runs appears on standard error. Its error does not: that is
            in the exception.
        glance: Called a few times a second, and once after the program has ended.

    Raises:
        FusionError: The program failed.
        KeyboardInterrupt: The program was interrupted, too, and has ended. Saving may take a while; another interrupt
            ends the program at once.
    """
    process = subprocess.Popen(
        [find(), *arguments, *(["--tethered"] if tethered else []), "--json"],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE if tethered else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    if process.stdin is not None and text is not None:
        # A program that has ended already says why.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(text + "\0")
            process.stdin.flush()
    said: list[str] = []
    printed: list[str] = []
    listeners = [
        threading.Thread(target=_listen, args=(process.stderr, said, progress), daemon=True),
        threading.Thread(target=_listen, args=(process.stdout, printed, False), daemon=True),
    ]
    for listener in listeners:
        listener.start()
    try:
        while True:
            try:
                process.wait(GLANCE)
                break
            except subprocess.TimeoutExpired:
                glance()
    except BaseException:
        _end(process)
        raise
    for listener in listeners:
        listener.join()
    glance()
    if process.returncode != 0:
        raise FusionError(_reason(said) or f"fusionllm ended with status {process.returncode}")
    result: dict[str, Any] = json.loads("".join(printed))
    return result


def _listen(stream: Any, into: list[str], show: bool) -> None:
    """Collects the lines of a stream, and shows those before the error that the program ends with."""
    for line in stream:
        into.append(line)
        show = show and not line.startswith(ERROR)
        if show:
            try:
                sys.stderr.write(line)
                sys.stderr.flush()
            except (OSError, ValueError):
                # The terminal has closed. The program must not wait until somebody reads.
                show = False


def _reason(said: list[str]) -> str:
    """What the program said from its error on."""
    start = next((i for i, line in enumerate(said) if line.startswith(ERROR)), max(0, len(said) - 5))
    return "".join(said[start:]).removeprefix(ERROR).strip()


def _end(process: subprocess.Popen[str]) -> None:
    """Lets the program end in good order, however long it takes. Ends it at once if it has nothing to save."""
    try:
        if process.stdin is None:
            process.kill()
        else:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
