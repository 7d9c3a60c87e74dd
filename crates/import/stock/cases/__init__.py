"""Small cases against PyTorch. Each file here has the cases of one subject.

A case is a function of tensors that returns a loss. Its decorator says what the tensors are:

    @case(x=(3, 3), w=parameter(3, 3))
    def a_write_through_diagonal(x, w):
        y = w * 2
        y.diagonal().fill_(3.0)
        return (y * x).sum()

A shape or a tensor is an input. All inputs have the same first size, as they are one batch. `parameter` and `buffer`
take sizes, or one tensor or list with the content. Sizes are filled with random numbers that depend on the case's name
alone. A class can be a case, too: a module without arguments, whose `forward` takes the inputs.

A case is expected to match PyTorch: loss, gradients of all parameters, and buffers after the pass. Otherwise the
decorator says so:

    refused="text"      The importer refuses the archive, and its message contains this text.
    pytorch="text"      PyTorch itself refuses to export or to run it, and its message contains this text.

Further arguments of the decorator:

    loss=KEY            The function returns several values, and this one of them is the loss.
    training=False      The module is exported in evaluation mode.
    strict=True         The module is exported in strict mode.
    decomposed=True     The archive is written after `run_decompositions()`.
    tolerance=1e-3      The largest relative error, which is 1e-5 by default.
    name="text"         The name of the case, where several share one function.
"""

import dataclasses
import sys
import zlib

import torch

CASES = []


@dataclasses.dataclass
class State:
    """A tensor that the module keeps: its content, or the sizes of one that is drawn."""

    content: object
    trained: bool
    is_buffer: bool


def parameter(*content, trained=True):
    """A parameter. One that is not trained has no gradient."""
    return State(content, trained, is_buffer=False)


def buffer(*content):
    """A buffer, which the state_dict has."""
    return State(content, trained=False, is_buffer=True)


@dataclasses.dataclass
class Case:
    name: str
    model: object
    tensors: dict
    refused: str | None
    pytorch: str | None
    loss: int | str | None
    training: bool
    strict: bool
    decomposed: bool
    tolerance: float

    def build(self):
        """The module and its inputs, with the same content in every call."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        drawn = {key: made(given) for key, given in self.tensors.items()}
        inputs = tuple(drawn[key] for key, given in self.tensors.items() if not isinstance(given, State))
        module = self.model() if isinstance(self.model, type) else Function(self.model, self.tensors, drawn)
        return module.train(self.training), inputs


class Function(torch.nn.Module):
    """A module whose forward pass is a function of its inputs, parameters and buffers."""

    def __init__(self, function, tensors, drawn):
        super().__init__()
        self.function = function
        self.given = [key for key, given in tensors.items() if not isinstance(given, State)]
        self.kept = [key for key in tensors if key not in self.given]
        for key in self.kept:
            if tensors[key].is_buffer:
                self.register_buffer(key, drawn[key])
            else:
                setattr(self, key, torch.nn.Parameter(drawn[key], requires_grad=tensors[key].trained))

    def forward(self, *inputs):
        tensors = dict(zip(self.given, inputs)) | {key: getattr(self, key) for key in self.kept}
        return self.function(**tensors)


def made(given):
    """The tensor that a shape, a list or a tensor stands for."""
    if isinstance(given, State):
        given = given.content[0] if given.content and not isinstance(given.content[0], int) else given.content
    if isinstance(given, torch.Tensor):
        return given.clone()
    return torch.tensor(given) if isinstance(given, list) else torch.randn(*given)


def case(
    name=None, refused=None, pytorch=None, loss=None, training=True, strict=False, decomposed=False, tolerance=1e-5,
    **tensors,
):
    """Adds the decorated function or class to the cases."""

    subject = sys._getframe(1).f_globals["__name__"].rsplit(".", 1)[-1]

    def added(model):
        full = f"{subject}::{name or model.__name__}"
        if any(other.name == full for other in CASES):
            raise ValueError(f"there are two cases {full}")
        CASES.append(Case(full, model, tensors, refused, pytorch, loss, training, strict, decomposed, tolerance))
        return model

    return added
