"""PyTorch as a framework: a segment is a list of calls of its kernels, or one function of them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Set
from functools import cache, partial

import torch
from torch import Tensor

import fusionllm_torch.attention  # noqa: F401 (adds its operators)
from fusionllm_torch.device import DTYPES, Device, names
from fusionllm_torch.operators import OPERATORS, Call
from fusionllm_torch.segments import STEPS, Memory, grouped
from fusionllm_torch.whole import Replayed, Whole, apart, compiled
from fusionllm_worker import Found, Framework, NodeError, Plan, Runner, Segment, TensorType
from fusionllm_worker.segment import Function

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"this worker needs PyTorch 2.4 or newer, not {torch.__version__}")


class Torch(Framework):
    """PyTorch on one device."""

    name = "torch"
    version = torch.__version__
    operators = list(OPERATORS)

    def __init__(self, device: str, compile: bool = False, cuda_graphs: bool = False) -> None:
        self.place = Device(device)
        if cuda_graphs and not self.place.is_cuda:
            raise ValueError(f"--cuda-graphs needs a CUDA device, and --device is {device}")
        self.compile, self.cuda_graphs = compile, cuda_graphs
        self.device = self.place.label
        self.memory_bytes = self.place.memory_bytes
        self.dtypes = list(self.place.dtypes)
        # The same operands give the same bits. Kernels that cannot promise it warn; the conformance suite finds them.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        # f32 means f32, also where the device has faster products of less precision.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        warnings.filterwarnings("ignore", message="The given buffer is not writable")

    @classmethod
    def found(cls) -> list[Found]:
        devices = [(name, Device(name)) for name in names()]
        return [Found(["--device", name], d.label, d.memory_bytes, not d.is_cpu) for name, d in devices]

    @torch.inference_mode()
    def upload(self, type: TensorType, data: memoryview) -> Tensor:
        dtype = DTYPES[type.dtype]
        device = self.place.place(dtype)
        if not data:
            return torch.empty(type.shape, dtype=dtype, device=device)
        tensor = torch.frombuffer(data, dtype=dtype).view(type.shape)
        return self.place.remember(tensor, tensor.to(device, copy=True))

    @torch.inference_mode()
    def download(self, tensor: Tensor, into: memoryview) -> None:
        self.place.check()
        if into:
            torch.frombuffer(into, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    def prepare(self, segment: Segment) -> Runner:
        segment, places = grouped(segment)

        @cache
        def planned(freed: frozenset[int]) -> tuple[Plan, list[Function]]:
            """The segment as one that may overwrite these inputs, and what finishes each output."""
            memory = Memory(segment, freed)
            functions = []
            for number, place in enumerate(places):
                try:
                    functions.append(self.function(segment, number, memory.writable(number)))
                except Exception as e:
                    raise NodeError(place, e) from e
            return Plan(segment, functions), memory.finish()

        def plain(inputs: list[Tensor], freed: Set[int]) -> list[Tensor]:
            plan, finish = planned(frozenset(freed))
            try:
                return [last(output) for last, output in zip(finish, plan(inputs))]
            except NodeError as e:
                raise NodeError(places[e.node], e.reason) from e

        whole: Runner | None = None
        # The host reads an optimiser's numbers. Its steps are one kernel for many parameters anyway.
        if (self.compile or self.cuda_graphs) and not any(node.name in STEPS for node in segment.nodes):
            whole = self.whole(segment, lambda: planned(frozenset())[0])

        @torch.inference_mode()
        def run(inputs: list[Tensor], freed: Set[int]) -> list[Tensor]:
            nonlocal whole
            if whole is None:
                return plain(inputs, freed)
            try:
                return whole(inputs, freed)
            except Exception as e:
                # The inputs are as they were. If a node is to blame, it fails here, too, and is named.
                outputs = plain(inputs, freed)
                whole = None
                reason = e.reason if isinstance(e, NodeError) else e
                print(f"a segment runs node by node: {reason!r}", file=sys.stderr)
                return outputs

        return run

    def whole(self, segment: Segment, plan: Callable[[], Plan]) -> Runner:
        """Runs the segment as one function, which the first run makes of a plan that overwrites no input."""
        place, count = self.place, len(segment.outputs)
        function: Whole | None = None

        def run(inputs: list[Tensor], freed: Set[int]) -> list[Tensor]:
            nonlocal function
            if function is None:
                function = partial(place.late, plan())
                if self.compile:
                    function = compiled(function, inputs)
                if self.cuda_graphs:
                    function = Replayed(function, inputs, place.torch)
            results = function(*inputs)
            for bad in results[count:]:
                place.fail_if(bad)
            if place.is_cpu:
                place.check()
            return apart(results[:count], (x for i, x in enumerate(inputs) if i not in freed))

        return run

    def function(self, segment: Segment, number: int, writable: frozenset[int]) -> Function:
        """The function of a node."""
        node = segment.nodes[number]
        operands = [segment.types[i] for i in node.inputs]
        results = [segment.types[i] for i in node.results]
        if not any(type.nbytes for type in results) and results:
            # Nothing to compute, and not all kernels take empty tensors.
            return lambda *_: self.empty(results)
        return OPERATORS[node.name](Call(node.attributes, operands, results, writable, self.place))

    def empty(self, types: list[TensorType]) -> Tensor | tuple[Tensor, ...]:
        tensors = tuple(
            torch.empty(t.shape, dtype=DTYPES[t.dtype], device=self.place.place(DTYPES[t.dtype])) for t in types
        )
        return tensors if len(tensors) > 1 else tensors[0]

    def synchronize(self) -> None:
        self.place.synchronize()
