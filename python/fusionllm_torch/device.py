"""The device of a worker: where tensors live, and the errors that it finds late."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}


def names() -> list[str]:
    """The devices of this machine, the processor last."""
    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if hasattr(torch, "xpu"):
        found += [f"xpu:{i}" for i in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


class Device:
    """A PyTorch device."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cpu = self.torch.type == "cpu"
        self.is_cuda = self.torch.type == "cuda"
        self.dtypes = dict(DTYPES)
        if self.torch.type == "mps":
            del self.dtypes["f64"]
        #: Whether an index was out of range, since this was last asked. It stays on the device.
        self.bad_index: Tensor | None = None
        #: Whether checks may read a tensor at once. Else they are late: :meth:`check` tells.
        self.reads = self.is_cpu

    @property
    def module(self) -> object:
        """`torch.cuda` and the like."""
        return getattr(torch, self.torch.type)

    @property
    def label(self) -> str:
        """The maker's name."""
        if self.is_cpu or self.torch.type == "mps":
            return platform.processor() or platform.machine()
        return self.module.get_device_name(self.torch)

    @property
    def memory_bytes(self) -> int | None:
        if self.is_cpu:
            return None
        if self.torch.type == "mps":
            return torch.mps.recommended_max_memory()
        return self.module.get_device_properties(self.torch).total_memory

    def place(self, dtype: torch.dtype) -> torch.device:
        """Where tensors of a type live. A device without f64 leaves these, which are few and small, to the host."""
        return self.torch if dtype in self.dtypes.values() else torch.device("cpu")

    def remember(self, host: Tensor, tensor: Tensor) -> Tensor:
        """The tensor, with its numbers if they are few: they may be an optimiser's, and are read without waiting."""
        if not self.is_cpu and host.dtype == torch.float64 and host.numel() <= 8:
            tensor.numbers = host.reshape(-1).tolist()
        return tensor

    def numbers(self, tensor: Tensor) -> list[float]:
        """The elements of a short f64 tensor."""
        return tensor.numbers if hasattr(tensor, "numbers") else tensor.tolist()

    def checked(self, index: Tensor, size: int) -> Tensor:
        """The index, whose elements must lie in `0 .. size`.

        A device other than the processor is not waited for, and a trace has no elements. There they are limited to the
        range, and :meth:`check` tells later.
        """
        if not index.numel():
            return index
        if not self.reads and size > 0:
            self.fail_if(((index < 0) | (index >= size)).any())
            return index.clamp(0, size - 1)
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= size:
            raise IndexError(f"index {low if low < 0 else high} is out of range for size {size}")
        return index

    def nonzero(self, divisor: Tensor) -> Tensor:
        """An integer divisor, whose elements must not be 0."""
        zero = (divisor == 0).any()
        if self.reads:
            if zero:
                raise ZeroDivisionError("an integer is divided by zero")
            return divisor
        self.fail_if(zero)
        return divisor.masked_fill(zero, 1)

    def fail_if(self, bad: Tensor) -> None:
        self.bad_index = bad if self.bad_index is None else self.bad_index | bad

    def late(self, plan: Callable[[list[Tensor]], list[Tensor]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """The row-major outputs of a plan, and at the end, if it has checks, whether one failed. None is read here."""
        reads, bad = self.reads, self.bad_index
        self.reads, self.bad_index = False, None
        try:
            outputs = tuple(x.contiguous() for x in plan(list(inputs)))
            return outputs if self.bad_index is None else (*outputs, self.bad_index)
        finally:
            self.reads, self.bad_index = reads, bad

    def check(self) -> None:
        """Raises what the device has found since the last check. Waits for it."""
        bad, self.bad_index = self.bad_index, None
        if bad is not None and bool(bad):
            raise IndexError("an index was out of range, or an integer divided by zero")

    def synchronize(self) -> None:
        if self.torch.type == "mps":
            torch.mps.synchronize()
        elif not self.is_cpu:
            self.module.synchronize(self.torch)
        self.check()
