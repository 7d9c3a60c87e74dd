"""JAX as a framework: a segment is one jitted function."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from fusionllm_jax.operators import DTYPES, OPERATORS, Array, checks
from fusionllm_worker import Found, Framework, NodeError, Runner, Segment, TensorType

jax.config.update("jax_enable_x64", True)
# f32 means f32, also where the device has faster products of less precision.
jax.config.update("jax_default_matmul_precision", "highest")
# A freed input that no output can take the place of is no mistake.
warnings.filterwarnings("ignore", message="Some donated buffers were not usable")


class Jax(Framework):
    """JAX on its default device."""

    name = "jax"
    version = jax.__version__
    dtypes = list(DTYPES)
    operators = list(OPERATORS)

    def __init__(self, device: int = 0) -> None:
        devices = jax.devices()
        if device >= len(devices):
            raise ValueError(f"JAX has no device {device}, only {devices}")
        self.placement = devices[device]
        self.device = self.placement.device_kind
        self.memory_bytes = (self.placement.memory_stats() or {}).get("bytes_limit")
        self.latest: list[Array] = []
        #: By their segments' text, as long as a segment has them.
        self.runners: WeakValueDictionary[str, Runner] = WeakValueDictionary()
        #: Those that were forgotten last. Equal segments may come next.
        self.forgotten: Sequence[Runner] = ()

    @classmethod
    def found(cls) -> list[Found]:
        devices = [cls(number) for number in range(len(jax.devices()))]
        return [
            Found(["--device", str(number)], d.device, d.memory_bytes, d.placement.platform != "cpu")
            for number, d in enumerate(devices)
        ]

    def upload(self, type: TensorType, data: memoryview) -> Array:
        # JAX may keep the array that it is given. So this one is a copy.
        return jax.device_put(np.ndarray(type.shape, DTYPES[type.dtype], data).copy(), self.placement)

    def download(self, tensor: Array, into: memoryview) -> None:
        np.ndarray(tensor.shape, tensor.dtype, into)[...] = tensor

    def prepare(self, segment: Segment) -> Runner:
        # A peer may prepare equal segments for several places of its graph. Compilation takes longer than a look-up.
        key = repr(segment)
        runner = self.runners.get(key)
        if runner is None:
            runner = self.runners[key] = self.runner(segment)
        return runner

    def forget(self, runners: Sequence[Runner]) -> None:
        # A peer that goes on in another generation forgets all segments, and then prepares many of them again.
        self.forgotten = runners

    def runner(self, segment: Segment) -> Runner:
        told: list[tuple[int, str]] = []

        def trace(*inputs: Array) -> tuple[list[Array], list[tuple[Array, Array]]]:
            """The outputs, and for each check whether it failed and the value that did."""
            values: list[Any] = list(inputs)
            told.clear()
            found: list[tuple[Array, Array]] = []
            for number, node in enumerate(segment.nodes):
                checks.clear()
                try:
                    results = OPERATORS[node.name](*(values[i] for i in node.inputs), **node.attributes)
                except Exception as e:
                    raise NodeError(number, e) from e
                values.extend(results if isinstance(results, tuple) else [results])
                for failed, value, text in checks:
                    found.append((failed, value))
                    told.append((number, text))
            # An array may be given away only if it is no other tensor, too: so none is passed through.
            seen, outputs = {id(x) for x in inputs}, []
            for output in (values[i] for i in segment.outputs):
                outputs.append(jnp.copy(output) if id(output) in seen else output)
                seen.add(id(output))
            return outputs, found

        @cache
        def compiled(freed: frozenset[int]) -> Any:
            """The segment as a function that may overwrite these inputs."""
            return jax.jit(trace, donate_argnums=sorted(freed))

        def run(inputs: list[Array], freed: Set[int]) -> list[Array]:
            outputs, found = compiled(frozenset(freed))(*inputs)
            for (number, text), (failed, value) in zip(told, jax.device_get(found)):
                if failed:
                    raise NodeError(number, ValueError(text.format(value)))
            self.latest = outputs
            return outputs

        return run

    def synchronize(self) -> None:
        # A device runs segments in order.
        jax.block_until_ready(self.latest)
