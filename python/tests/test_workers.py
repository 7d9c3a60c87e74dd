"""What a worker owes its peer beside right results, which `fusionllm backend check` tests: the protocol.

Each worker whose framework is installed is started, and spoken to.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fusionllm_worker import ALIVE_EVERY, Worker

from requirements import needs, needs_torch
from worker_client import PATIENCE, Peer, Type, WorkerError, node

WORKERS = [name for name in ("numpy", "jax", "torch") if importlib.util.find_spec(name)]


def f64(*shape: int) -> Type:
    return {"dtype": "f64", "shape": list(shape)}


@pytest.fixture(params=WORKERS)
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A worker that nobody else uses, after its hello."""
    with Peer(f"fusionllm_{request.param}") as peer:
        peer.start()
        yield peer


@pytest.mark.parametrize("name", WORKERS)
def test_other_version_is_refused(name: str) -> None:
    with Peer(f"fusionllm_{name}") as peer:
        peer.start(protocol=1)
        status, said = peer.end()
        assert status == 1 and "protocol 1" in said and "2" in said


@pytest.mark.parametrize("line", [b"garbage", b"[]", b'{"dance": {}}'])
def test_garbage_ends_the_worker(line: bytes) -> None:
    with Peer("fusionllm_numpy") as peer:
        peer.start()
        peer.write(line)
        status, said = peer.end()
        assert status == 1 and said


def test_end_of_input_ends_the_worker(peer: Peer) -> None:
    peer.process.stdin.close()
    assert peer.process.wait(PATIENCE) == 0


def test_signs_of_life() -> None:
    """They come without a request. How often is a constant, because a busy machine delays them."""
    assert ALIVE_EVERY <= 1
    with Peer("fusionllm_numpy") as peer:
        peer.start()
        for _ in range(2):
            assert json.loads(peer.process.stdout.readline()) == {"alive": {}}


def test_forgotten_segments_cannot_run(peer: Peer) -> None:
    """Others run on, an equal one too. Nothing answers, and unknown numbers do no harm."""
    t = f64(3)
    numbers = [peer.number() for _ in range(3)]
    for number in numbers:
        peer.request("prepare", segment=number, inputs=[t], nodes=[node({"unary": "neg"}, [0], [t])], outputs=[1])
    x = peer.upload(np.ones(3))
    peer.forget(numbers[0], numbers[2], 999)
    peer.forget()
    result = peer.number()
    peer.request("run", segment=numbers[1], inputs=[x], outputs=[result], free=[])
    for number in (numbers[0], numbers[2]):
        with pytest.raises(WorkerError, match=f"no segment {number}"):
            peer.request("run", segment=number, inputs=[x], outputs=[peer.number()], free=[])


@pytest.mark.parametrize(
    "name, kind",
    [
        ("numpy", "NumPy"),
        pytest.param("jax", "Jax", marks=needs("python", "jax" in WORKERS, "needs JAX")),
        pytest.param("torch", "Torch", marks=needs_torch),
    ],
)
def test_what_was_made_of_a_forgotten_segment_goes(name: str, kind: str) -> None:
    """JAX keeps it until it forgets another one, because the peer may prepare an equal one next."""
    framework = getattr(importlib.import_module(f"fusionllm_{name}.framework"), kind)
    worker = Worker(framework(*(["cpu"] if name == "torch" else [])))
    nodes = [node({"unary": "neg"}, [0], [f64(2)])]

    def prepared(number: int) -> weakref.ref[Any]:
        worker.prepare({"segment": number, "inputs": [f64(2)], "nodes": nodes, "outputs": [1]})
        segment, runner = worker.segments[number]
        tensor = worker.framework.upload(segment.inputs[0], memoryview(np.ones(2)).cast("B"))
        runner([tensor], frozenset())
        return weakref.ref(runner)

    first = prepared(1)
    worker.forget({"segments": [1]})
    assert (first() is not None) == (name == "jax")
    second = prepared(2)
    assert (first() is second()) == (name == "jax")
    worker.forget({"segments": [2]})
    worker.forget({"segments": []})
    gc.collect()
    assert first() is None and second() is None


def test_errors_leave_the_worker_alive(peer: Peer) -> None:
    x = np.arange(6.0).reshape(3, 2)
    tensor = peer.upload(x)
    with pytest.raises(WorkerError, match="dance"):
        peer.run([node({"dance": None}, [0], [f64(3, 2)])], [tensor], [1])
    with pytest.raises(WorkerError, match="no tensor 999"):
        peer.request("download", tensor=999, at=0)
    np.testing.assert_array_equal(peer.download(tensor), x)


def test_no_room_is_told_apart(peer: Peer) -> None:
    size = [1 << 20, 1 << 24]
    with pytest.raises(WorkerError, match="'memory'"):
        peer.run([node({"full": {"ty": f64(*size), "value": 1.0}}, [], [f64(*size)])], [], [0])
        peer.request("synchronize")
