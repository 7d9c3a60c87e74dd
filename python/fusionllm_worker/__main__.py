"""`python -m fusionllm_worker`: lists the workers that this Python could run here, as one JSON object."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict
from typing import Any

from fusionllm_worker import streams

#: The modules of the workers and their frameworks, the one to prefer first.
WORKERS = [("fusionllm_torch", "Torch"), ("fusionllm_jax", "Jax"), ("fusionllm_numpy", "NumPy")]


def found(module: str, name: str) -> list[dict[str, Any]]:
    """The devices of a framework. None if it is not installed, or does not work."""
    try:
        framework = getattr(importlib.import_module(f"{module}.framework"), name)
        return [
            {
                "name": framework.name,
                "version": framework.version,
                **asdict(device),
                "arguments": ["-m", module, *device.arguments],
            }
            for device in framework.found()
        ]
    except Exception:  # A framework that is broken in any way is none.
        return []


def main() -> None:
    # Frameworks print what is no JSON.
    _, out = streams()
    # JAX would take most of the memory of a device that somebody else computes on.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    workers = [worker for module, name in WORKERS for worker in found(module, name)]
    out.write(json.dumps({"workers": workers}).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    main()
