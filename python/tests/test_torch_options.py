"""The options of PyTorch's worker: `--compile` against the same worker without it, and `--cuda-graphs`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from requirements import needs, needs_torch
from worker_client import Node, Peer, Type, WorkerError, node

pytestmark = needs_torch
needs_compiler = needs("torch", bool(shutil.which("g++") or shutil.which("clang++")), "needs a C++ compiler")

RNG = np.random.default_rng(0)


def typed(dtype: str, *shape: int) -> Type:
    return {"dtype": dtype, "shape": list(shape)}


#: Looks up rows, and drops some of them. Inputs: rows, ids, key, divisor. Values 5 and 8 are equal, and 9 is a view.
DROPPED: list[Node] = [
    node({"embedding": {"padding_idx": None}}, [0, 1], [typed("f32", 4, 6)]),  # 4
    node({"binary_scalar": {"op": "mul", "scalar": 0.5, "reverse": False}}, [4], [typed("f32", 4, 6)]),  # 5
    node({"dropout": {"p": 0.3, "stream": 2**63 + 5}}, [5, 2], [typed("f32", 4, 6), typed("bool", 4, 6)]),  # 6, 7
    node({"binary_scalar": {"op": "add", "scalar": 0.0, "reverse": False}}, [5], [typed("f32", 4, 6)]),  # 8
    node({"permute": {"dims": [1, 0]}}, [6], [typed("f32", 6, 4)]),  # 9
    node({"matmul": None}, [9, 8], [typed("f32", 6, 6)]),  # 10
    node({"binary": "floor_divide"}, [1, 3], [typed("i64", 4)]),  # 11
]
OUTPUTS = [0, 5, 6, 7, 8, 9, 10, 11]
TYPES = [typed("f32", 5, 6), typed("i64", 4), typed("i64"), typed("i64", 4)]


class Segment:
    """The segment above, prepared once."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.number = peer, peer.number()
        peer.request("prepare", segment=self.number, inputs=TYPES, nodes=DROPPED, outputs=OUTPUTS)

    def run(self, inputs: list[int], free: list[int]) -> list[int]:
        results = [self.peer.number() for _ in OUTPUTS]
        self.peer.request("run", segment=self.number, inputs=inputs, outputs=results, free=free)
        types = [*TYPES, *(t for n in DROPPED for t in n["outputs"])]
        self.peer.types.update(zip(results, (types[i] for i in OUTPUTS)))
        return results


@pytest.fixture(scope="module")
def plain() -> Iterator[Peer]:
    with Peer("fusionllm_torch") as peer:
        peer.start()
        yield peer


@pytest.fixture(scope="module")
def compiling() -> Iterator[Peer]:
    """A worker with `--compile`, which at the end must have compiled all."""
    peer = Peer("fusionllm_torch", "--compile")
    peer.start()
    yield peer
    peer.process.stdin.close()
    status, said = peer.end()
    assert status == 0 and "node by node" not in said


def operands(ids: list[int], divisor: list[int]) -> list[np.ndarray]:
    rows = RNG.uniform(-2, 2, (5, 6)).astype(np.float32)
    return [rows, np.array(ids), np.array(-(2**63) + 3), np.array(divisor)]


@needs_compiler
def test_compiled_segment(plain: Peer, compiling: Peer) -> None:
    """It gives what a plain one does, the same bits each time, and no output changes with another tensor."""
    segments = [Segment(plain), Segment(compiling)]
    # The ids and their divisor are one tensor in the first run, and two in the second.
    for values, same in (operands([1, 4, 3, 2], [1, 4, 3, 2]), True), (operands([0, 4, 4, 2], [3, -1, 2, 7]), False):
        found = []
        for segment in (*segments, segments[1]):
            peer = segment.peer
            inputs = [peer.upload(x) for x in values]
            if same:
                inputs[3] = inputs[1]
            results = segment.run(inputs, [inputs[0]])
            found.append([peer.download(r) for r in results])
            for i, (result, output) in enumerate(zip(results, OUTPUTS)):
                if output not in (0, 5, 8):
                    continue
                peer.run([node({"unary": "exp"}, [0], [peer.types[result]])], [result], [1], [result])
                for other, want in zip(results[i + 1 :], found[-1][i + 1 :]):
                    np.testing.assert_array_equal(peer.download(other), want)
        for want, got, again in zip(*found, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(got, again)


@needs_compiler
@pytest.mark.parametrize(
    "ids, divisor, number, reason",
    [
        ([1, 5, 0, 0], [1] * 4, 0, "index 5"),
        ([0, -1, 0, 0], [1] * 4, 0, "index -1"),
        ([0] * 4, [1, 0, 1, 1], 6, "zero"),
    ],
)
def test_compiled_segment_names_the_node(
    compiling: Peer, ids: list[int], divisor: list[int], number: int, reason: str
) -> None:
    """After that, it is still compiled, and what stays in use is as it was."""
    segment, good = Segment(compiling), operands([0] * 4, [1] * 4)
    for failing in (True, False, True):
        values = operands(ids, divisor) if failing else good
        inputs = [compiling.upload(x) for x in values]
        if failing:
            with pytest.raises(WorkerError, match=f"{reason}.*'node': {number}.*'operator'"):
                segment.run(inputs, inputs[2:])
        else:
            segment.run(inputs, inputs[2:])
        for tensor, x in zip(inputs[:2], values):
            np.testing.assert_array_equal(compiling.download(tensor), x)


@needs_compiler
def test_compiled_segment_keeps_small_numbers(compiling: Peer) -> None:
    """Libraries linked with fast arithmetic round them to 0, for the whole process."""
    compiling.apply({"unary": "exp"}, [np.ones(3)], [typed("f64", 3)])
    x = np.full(64, 1e-40, np.float32)
    half = {"binary_scalar": {"op": "mul", "scalar": 0.5, "reverse": False}}
    [halves] = compiling.apply(half, [x], [typed("f32", 64)])
    np.testing.assert_array_equal(halves, x / 2)


def test_what_cannot_be_compiled_runs_plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with Peer("fusionllm_torch", "--compile") as peer:
        peer.start()
        [result] = peer.apply({"unary": "exp"}, [np.zeros(3)], [typed("f64", 3)])
        np.testing.assert_array_equal(result, np.ones(3))
        peer.process.stdin.close()
        status, said = peer.end()
    assert status == 0 and "a segment runs node by node" in said


def test_cuda_graphs_need_cuda() -> None:
    with Peer("fusionllm_torch", "--cuda-graphs") as peer:
        status, said = peer.end()
    assert status == 1 and "--cuda-graphs needs a CUDA device, and --device is cpu" in said
