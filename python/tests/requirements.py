"""Tests that need more than a clone of the repository has.

They are skipped where a requirement is not met. `FUSIONLLM_REQUIRE` names the requirements that must be met, separated
by commas: there, the same tests fail.
"""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(requirement: str, met: bool, reason: str) -> pytest.MarkDecorator:
    """Marks a test that has a requirement. `requirement` is the name by which `FUSIONLLM_REQUIRE` asks for it."""
    required = os.environ.get("FUSIONLLM_REQUIRE", "").split(",")
    if not met and requirement in (name.strip() for name in required):
        raise RuntimeError(f"FUSIONLLM_REQUIRE asks for {requirement}: {reason}")
    return pytest.mark.skipif(not met, reason=reason)


needs_torch = needs("torch", importlib.util.find_spec("torch") is not None, "needs PyTorch")
