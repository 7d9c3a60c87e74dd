"""A segment as one function of its inputs: compiled by TorchInductor, replayed as a CUDA graph, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch._inductor
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

#: Computes tensors from a segment's inputs, and leaves these as they are. It reads no tensor on the host.
Whole = Callable[..., Sequence[Tensor]]


def compiled(function: Whole, inputs: Sequence[Tensor]) -> Whole:
    """The function as TorchInductor compiles it for inputs like these."""
    # One tensor may be two of the inputs, but not the next time. So the trace sees others, all different.
    examples = [torch.empty_like(x) for x in inputs]
    # A graph of ATen's kernels needs none of `torch.compile`'s guards: a segment's inputs are always of the same types.
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    result = torch._inductor.compile(graph, examples)
    # Linked by some compilers, what was just loaded has turned small numbers into zeros, for the whole thread.
    torch.set_flush_denormal(False)
    return result


class Replayed:
    """The function as a CUDA graph.

    A graph reads and writes the same addresses each time. So inputs are copied to tensors of its own, and its outputs
    are copied before the next replay.
    """

    def __init__(self, function: Whole, inputs: Sequence[Tensor], device: torch.device) -> None:
        self.inputs = [x.clone() for x in inputs]
        with torch.cuda.device(device):
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                # This loads kernels and libraries.
                function(*self.inputs)
                mode = torch.cuda.get_sync_debug_mode()
                # Now it fails if it waits for the device, as no graph can.
                torch.cuda.set_sync_debug_mode("error")
                try:
                    function(*self.inputs)
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
                    current.wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            # A capture that fails leaves its own stream as the current one. The outer block restores the former.
            with torch.cuda.stream(current), torch.cuda.graph(self.graph):
                self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        if inputs:
            torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return [x.clone() for x in self.outputs]


def apart(outputs: Iterable[Tensor], held: Iterable[Tensor]) -> list[Tensor]:
    """The outputs, row-major, each in memory of its own that is no larger than it.

    A compiler may return one tensor twice, or a part of another one. `held` are tensors that others use.
    """
    taken = {x.untyped_storage().data_ptr() for x in held}
    found = []
    for x in outputs:
        x = x.contiguous()
        memory = x.untyped_storage()
        if memory.data_ptr() in taken or memory.nbytes() > x.nbytes:
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        found.append(x)
    return found
