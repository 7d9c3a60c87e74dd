#!/usr/bin/env python3
"""Exports the small cases of `cases/`, with the results that PyTorch computes for them in eager mode.

    pip install torch safetensors
    python crates/import/stock/export_cases.py DIR [TEXT ...]

It writes NAME.pt2 and NAME.safetensors for each case whose name contains one of the texts: the archive, and its inputs,
loss, gradients and buffers after one pass. A case with state that is not trained gets a second archive, NAME.other.pt2,
with another state, and NAME.weights.safetensors, the state to load into it. `cases.json` lists the cases: what is
expected of each, and the message where PyTorch refuses it. The test `crates/workbench/tests/pytorch` compares them with
ours.
"""

import importlib
import json
import pathlib
import sys
import warnings

sys.dont_write_bytecode = True

import torch
from safetensors.torch import save_file

from cases import CASES


def main():
    directory, *texts = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for file in sorted((pathlib.Path(__file__).parent / "cases").glob("[!_]*.py")):
        importlib.import_module(f"cases.{file.stem}")
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, case in enumerate(CASES):
        if not texts or any(text in case.name for text in texts):
            stem = f"case{number}"
            try:
                export(case, directory / stem)
                failure = None
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            listed.append({
                "name": case.name, "stem": stem, "refused": case.refused, "pytorch": case.pytorch,
                "tolerance": case.tolerance, "failure": failure,
            })
    (directory / "cases.json").write_text(json.dumps(listed, indent=1))


def export(case, stem):
    """Writes the archive of a case, and PyTorch's results in eager mode."""
    program = save_archive(case, *case.build(), f"{stem}.pt2")
    module, inputs = case.build()
    state = {name: tensor.detach().clone().contiguous() for name, tensor in module.state_dict().items()}
    trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    if state.keys() - trained:
        other, _ = case.build()
        other.load_state_dict({name: another(tensor) for name, tensor in state.items()})
        save_archive(case, other, inputs, f"{stem}.other.pt2")
        save_file(state, f"{stem}.weights.safetensors")
    names = program.graph_signature.user_inputs
    tensors = {f"input.{name}": tensor.clone() for name, tensor in zip(names, inputs)}
    returned = module(*inputs)
    loss = returned if case.loss is None else returned[case.loss]
    if loss.requires_grad:
        loss.backward()
    tensors["loss"] = loss.detach()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in parameters.items():
        if tensor.requires_grad and loss.requires_grad:
            tensors[f"grad.{name}"] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    for name, tensor in module.state_dict().items():
        if name not in parameters:
            tensors[f"buffer.{name}"] = tensor
    save_file({key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}, f"{stem}.safetensors")


def save_archive(case, module, inputs, file):
    program = torch.export.export(module, inputs, strict=case.strict)
    if case.decomposed:
        program = program.run_decompositions()
    torch.export.save(program, file)
    return program


def another(tensor):
    """Another content for a tensor. Integers may be places, so they are those of the tensor in another order."""
    return torch.randn_like(tensor) if tensor.is_floating_point() else tensor.flatten().flip(0).view_as(tensor)


if __name__ == "__main__":
    main()
