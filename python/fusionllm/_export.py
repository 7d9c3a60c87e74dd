"""Writes a PyTorch model as an archive that FusionLLM trains."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def export(
    model: torch.nn.Module,
    example: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    dynamic_batch: bool = True,
) -> Path:
    """Exports a model with `torch.export`, for `[model] file` of a job.

    The model is exported in the mode that it is in: call `model.train()` before, for dropout and batch norm.

    Args:
        model: Its `forward` returns the mean loss of a batch as one number, and may return more beside it. The loss is
            the number that parameters have a gradient of; `[model] loss` of the job chooses among several.
        example: One batch: the arguments of `forward`, by position or by name. Training data have their names.
        path: The file to write, such as `model.pt2`.
        dynamic_batch: Whether the first dimension of all arguments is the batch and may have any size in training.
            Otherwise micro-batches have the size of the example.

    Returns:
        The path.

    Raises:
        ValueError: The example does not fit, or `forward` returns no single floating-point number.
    """
    import torch

    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    given = [*args, *kwargs.values()]
    if not given or not all(isinstance(value, torch.Tensor) for value in given):
        raise ValueError("the example must be one batch of tensors: the arguments of the model's forward")
    # One tensor in two places, such as tokens that are their own labels, would become one input.
    args = tuple(value.detach().clone() for value in args)
    kwargs = {name: value.detach().clone() for name, value in kwargs.items()}
    shapes: Any = None
    if dynamic_batch:
        sizes = {value.shape[0] if value.dim() else None for value in given}
        if len(sizes) != 1 or sizes <= {None, 0, 1}:
            raise ValueError(
                "the first dimension of all tensors in the example must be one batch of at least two samples, "
                f"and their shapes are {[list(value.shape) for value in given]}: pass such a batch, "
                "or dynamic_batch=False"
            )
        batch = torch.export.Dim("batch")
        shapes = (tuple({0: batch} for _ in args), {name: {0: batch} for name in kwargs})
        shapes = shapes[1] if kwargs else shapes[0]
    program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    nodes = program.graph.output_node().args[0][-_returned(program) :]
    # Besides tensors, a model may return numbers and None.
    values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in nodes]
    outputs = [value for value in values if isinstance(value, torch.Tensor)]
    if not any(value.dim() == 0 and value.is_floating_point() for value in outputs):
        found = ", ".join(f"{value.dtype} of shape {list(value.shape)}" for value in outputs) or "no tensor"
        raise ValueError(f"the model's forward must return the mean loss as one number, and it returns {found}")
    torch.export.save(program, path)
    return Path(path)


def _returned(program: Any) -> int:
    """How many values `forward` returns. Before them, the program's outputs have the buffers that it changes."""
    return len(program.graph_signature.user_outputs)
