"""Starts each worker, speaks the protocol with it, and compares frameworks operator by operator."""

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
from worker_client import PATIENCE, Op, Peer, Type, WorkerError, node, type_of

WORKERS = [name for name in ("numpy", "jax", "torch") if importlib.util.find_spec(name)]

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.uniform(-2, 2, shape)


def positive(*shape: int) -> np.ndarray:
    return RNG.uniform(0.3, 2, shape)


def ids(below: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, below, shape)


def bools(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.5


def f64(*shape: int) -> Type:
    return {"dtype": "f64", "shape": list(shape)}


def i64(*shape: int) -> Type:
    return {"dtype": "i64", "shape": list(shape)}


def boolean(*shape: int) -> Type:
    return {"dtype": "bool", "shape": list(shape)}


CONV = {"stride": [2, 1], "padding": [1, 2], "dilation": [1, 2], "groups": 2}
MAX_POOL = {"kernel": [3, 2], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "ceil_mode": True}
AVG_POOL = {"kernel": [3, 2], "stride": [2, 2], "padding": [1, 1], "ceil_mode": True, "count_include_pad": False}
SLICE = {"dim": 1, "start": 1, "end": 6, "step": 2}
ATTENTION = {"is_causal": True, "scale": 0.5}
ADAMW = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
SGD = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}

Case = tuple[Op, list[np.ndarray], list[Type]]


def elementwise() -> Iterator[Case]:
    unary = "neg abs sign exp expm1 reciprocal sin cos tanh sigmoid erf floor ceil round trunc relu silu softplus"
    for name in unary.split():
        yield {"unary": name}, [floats(3, 4)], [f64(3, 4)]
    for name in "log log1p sqrt rsqrt".split():
        yield {"unary": name}, [positive(3, 4)], [f64(3, 4)]
    yield {"unary": "logical_not"}, [bools(5)], [boolean(5)]
    for name in "add sub mul div pow maximum minimum fmod remainder floor_divide".split():
        yield {"binary": name}, [positive(2, 1, 3), positive(4, 1)], [f64(2, 4, 3)]
        for reverse in (False, True):
            yield {"binary_scalar": {"op": name, "scalar": 0.7, "reverse": reverse}}, [positive(5)], [f64(5)]
    for name in "add sub mul maximum minimum fmod remainder floor_divide".split():
        yield {"binary": name}, [ids(9, 6) - 4, ids(3, 6) + 1], [i64(6)]
    for name in "eq ne lt le gt ge".split():
        yield {"compare": name}, [ids(3, 4, 1), ids(3, 5)], [boolean(4, 5)]
        yield {"compare_scalar": {"op": name, "scalar": 1.0}}, [ids(3, 6)], [boolean(6)]
    for name in ("and", "or", "xor"):
        yield {"logical": name}, [bools(2, 3), bools(3)], [boolean(2, 3)]
    yield {"where": None}, [bools(2, 1), floats(3), floats(2, 3)], [f64(2, 3)]
    yield {"clamp": {"min": -0.5, "max": None, "open": False}}, [floats(7)], [f64(7)]
    extremes = np.array([2.7, -2.7, np.nan, np.inf, -np.inf, 1e30, 2.0**31])
    for dtype in ("i64", "i32", "bool", "f32"):
        yield {"cast": {"dtype": dtype}}, [extremes], [{"dtype": dtype, "shape": [7]}]


def moves() -> Iterator[Case]:
    for kind in "sum mean amax amin prod".split():
        yield {"reduce": {"kind": kind, "dims": [0, 2], "keepdim": True}}, [floats(2, 3, 4)], [f64(1, 3, 1)]
    for kind in ("any", "all"):
        yield {"reduce": {"kind": kind, "dims": [1], "keepdim": False}}, [bools(4, 2)], [boolean(4)]
    yield {"reduce": {"kind": "sum", "dims": [], "keepdim": False}}, [floats(2, 3)], [f64(2, 3)]
    yield {"arg_reduce": {"largest": True, "dim": 1, "keepdim": False}}, [ids(3, 4, 6)], [i64(4)]
    yield {"cum_sum": {"dim": 1}}, [floats(2, 5)], [f64(2, 5)]
    yield {"reshape": {"shape": [4, 3]}}, [floats(2, 6)], [f64(4, 3)]
    yield {"permute": {"dims": [2, 0, 1]}}, [floats(2, 3, 4)], [f64(4, 2, 3)]
    yield {"expand": {"shape": [2, 3]}}, [floats(3)], [f64(2, 3)]
    yield {"detach": None}, [floats(3)], [f64(3)]
    yield {"slice": SLICE}, [floats(2, 7)], [f64(2, 3)]
    yield {"slice": {**SLICE, "step": 2**64 - 1}}, [floats(2, 7)], [f64(2, 1)]
    yield {"slice_backward": {"slice": SLICE, "size": 7}}, [floats(2, 3)], [f64(2, 7)]
    yield {"cat": {"dim": 1}}, [floats(2, 3), floats(2, 1)], [f64(2, 4)]
    yield {"split": {"dim": 0, "sizes": [1, 3]}}, [floats(4, 2)], [f64(1, 2), f64(3, 2)]
    yield {"split": {"dim": 0, "sizes": [4]}}, [floats(4, 2)], [f64(4, 2)]
    yield {"flip": {"dims": [0, 1]}}, [floats(3, 2)], [f64(3, 2)]
    yield {"constant_pad": {"pads": [[1, 0], [0, 2]], "value": "-inf"}}, [floats(2, 3)], [f64(3, 5)]
    yield {"triangle": {"upper": True, "diagonal": -1}}, [floats(3, 4)], [f64(3, 4)]
    yield {"full": {"ty": f64(2, 2), "value": "inf"}}, [], [f64(2, 2)]
    yield {"arange": {"dtype": "i64", "start": 3.0, "step": -2.0, "len": 4}}, [], [i64(4)]
    yield {"embedding": {"padding_idx": 1}}, [floats(5, 2), ids(5, 2, 3)], [f64(2, 3, 2)]
    backward = {"num_weights": 5, "padding_idx": 1}
    yield {"embedding_dense_backward": backward}, [floats(2, 3, 2), ids(5, 2, 3)], [f64(5, 2)]
    yield {"index_select": {"dim": 1}}, [floats(2, 4), ids(4, 3)], [f64(2, 3)]
    yield {"index_add": {"dim": 1}}, [floats(2, 4), ids(4, 6), floats(2, 6)], [f64(2, 4)]
    yield {"gather": {"dim": 0}}, [floats(3, 4), ids(3, 5, 2)], [f64(5, 2)]
    yield {"scatter_add": {"dim": 0}}, [floats(3, 4), ids(3, 5, 2), floats(5, 2)], [f64(3, 4)]
    yield {"scatter": {"dim": 0}}, [floats(3, 4), ids(3, 5, 2), floats(5, 2)], [f64(3, 4)]
    marked = [True, False, True]
    yield {"index": {"indexed": marked}}, [floats(2, 3, 4), ids(2, 5), ids(4, 1)], [f64(5, 3)]
    for accumulate in (True, False):
        put = {"indexed": marked, "accumulate": accumulate}
        yield {"index_put": put}, [floats(2, 3, 4), floats(5, 3), ids(2, 5), ids(4, 1)], [f64(2, 3, 4)]
    yield {"top_k": {"k": 3, "dim": 1, "largest": True}}, [ids(4, 2, 7)], [i64(2, 3), i64(2, 3)]
    yield {"sort": {"dim": 1, "descending": True}}, [ids(4, 2, 7)], [i64(2, 7), i64(2, 7)]


def compound() -> Iterator[Case]:
    yield {"matmul": None}, [floats(2, 1, 3, 4), floats(5, 4, 2)], [f64(2, 5, 3, 2)]
    yield {"linear": None}, [floats(2, 3), floats(4, 3), floats(4)], [f64(2, 4)]
    x, weight, y = floats(2, 4, 5, 6), floats(6, 2, 3, 3), f64(2, 6, 3, 6)
    yield {"conv2d": CONV}, [x, weight, floats(6)], [y]
    g = floats(*y["shape"])
    yield {"conv2d_input_grad": {"conv": CONV, "input": [5, 6]}}, [g, weight], [f64(2, 4, 5, 6)]
    yield {"conv2d_weight_grad": {"conv": CONV, "kernel": [3, 3]}}, [g, x], [f64(6, 2, 3, 3)]
    yield {"max_pool2d": MAX_POOL}, [floats(1, 2, 6, 5)], [f64(1, 2, 4, 3), i64(1, 2, 4, 3)]
    yield {"max_pool2d_backward": {"input": [6, 5]}}, [floats(1, 2, 4, 3), ids(30, 1, 2, 4, 3)], [f64(1, 2, 6, 5)]
    yield {"avg_pool2d": AVG_POOL}, [floats(1, 2, 6, 5)], [f64(1, 2, 4, 3)]
    yield {"avg_pool2d_backward": {"pool": AVG_POOL, "input": [6, 5]}}, [floats(1, 2, 4, 3)], [f64(1, 2, 6, 5)]
    yield {"adaptive_avg_pool2d": {"output": [2, 3]}}, [floats(1, 2, 5, 7)], [f64(1, 2, 2, 3)]
    yield {"adaptive_avg_pool2d_backward": {"input": [5, 7]}}, [floats(1, 2, 2, 3)], [f64(1, 2, 5, 7)]
    dropped = {"p": 0.3, "stream": 2**64 - 1}
    yield {"dropout": dropped}, [floats(5, 7), np.array(-(2**63) + 3)], [f64(5, 7), boolean(5, 7)]
    yield {"dropout_backward": {"scale": 1.25}}, [floats(6), bools(6)], [f64(6)]
    for form in ("none", "tanh"):
        yield {"gelu": {"approximate": form}}, [floats(9)], [f64(9)]
        yield {"gelu_backward": {"approximate": form}}, [floats(9), floats(9)], [f64(9)]
    yield {"threshold_backward": {"threshold": 0.5}}, [floats(9), floats(9)], [f64(9)]
    x, mean, rstd = floats(3, 4, 5), floats(3, 1, 1), positive(3, 1, 1)
    affine = [floats(4, 5), floats(4, 5)]
    yield {"layer_norm": {"dims": 2, "eps": 1e-3}}, [x, *affine], [f64(3, 4, 5), f64(3, 1, 1), f64(3, 1, 1)]
    statistics = x.mean((1, 2), keepdims=True), 1 / x.std((1, 2), keepdims=True)
    yield {"layer_norm_input_grad": {"dims": 2}}, [floats(3, 4, 5), x, *statistics, affine[0]], [f64(3, 4, 5)]
    yield {"layer_norm_weight_grad": {"dims": 2}}, [floats(3, 4, 5), x, mean, rstd], [f64(4, 5), f64(4, 5)]
    batch = [x, *(positive(4) for _ in range(4))]
    yield {"batch_norm": {"momentum": 0.1, "eps": 1e-3}}, batch, [f64(3, 4, 5), *[f64(4)] * 4]
    statistics = x.mean((0, 2)), 1 / x.std((0, 2))
    yield {"batch_norm_input_grad": None}, [floats(3, 4, 5), x, *statistics, floats(4)], [f64(3, 4, 5)]
    yield {"batch_norm_weight_grad": None}, [floats(3, 4, 5), x, *statistics], [f64(4), f64(4)]
    for name in ("softmax", "log_softmax"):
        yield {name: {"dim": 1}}, [floats(2, 3, 4)], [f64(2, 3, 4)]
        yield {f"{name}_backward": {"dim": 1}}, [floats(2, 3, 4), floats(2, 3, 4)], [f64(2, 3, 4)]
    q, k, v = floats(2, 4, 3, 6), floats(2, 2, 5, 6), floats(2, 2, 5, 6)
    # The first query sees no key.
    mask = np.array([[0, 1, 1, 1, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1]], bool)
    for extra in ([], [mask], [np.where(mask, 0.5, -np.inf)]):
        results = [f64(2, 4, 3, 6), f64(2, 4, 3)]
        yield {"scaled_dot_product_attention": ATTENTION}, [q, k, v, *extra], results
    out, lse, g = attention(q, k, v)
    gradients = [f64(*q.shape), f64(*k.shape), f64(*v.shape)]
    yield {"scaled_dot_product_attention_backward": {"forward": ATTENTION}}, [g, q, k, v, out, lse], gradients
    logits, target = floats(4, 5), np.array([0, -100, 4, 2])
    yield {"cross_entropy": {"ignore_index": -100}}, [logits, target], [f64(), f64(4)]
    lse = np.log(np.exp(logits).sum(1))
    yield {"cross_entropy_backward": {"ignore_index": -100}}, [floats(), logits, target, lse], [f64(4, 5)]
    state = [floats(3, 4), floats(3, 4), floats(3, 4), positive(3, 4)]
    yield {"adamw_step": ADAMW}, [*state, np.array([1e-2, 0.2, 0.3, 0.5])], [f64(3, 4)] * 3
    yield {"sgd_step": SGD}, [*state[:3], np.array([1e-2, 0.5])], [f64(3, 4)] * 2
    yield {"squared_norm": None}, [floats(3, 4)], [f64()]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Causal attention and its `lse`, and a gradient of the former."""
    k, v = (np.repeat(t, q.shape[1] // t.shape[1], axis=1) for t in (k, v))
    scores = ATTENTION["scale"] * q @ k.swapaxes(2, 3)
    scores[..., ~np.tri(*scores.shape[2:], dtype=bool)] = -np.inf
    lse = np.log(np.exp(scores).sum(3))
    out = np.exp(scores - lse[..., None]) @ v
    return out, lse, floats(*out.shape)


CASES = [*elementwise(), *moves(), *compound()]


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, tuple[Peer, list[str]]]]:
    """A worker of each framework, with its operators."""
    started = {name: Peer(f"fusionllm_{name}") for name in WORKERS}
    try:
        yield {name: (peer, peer.start()["operators"]) for name, peer in started.items()}
    finally:
        for peer in started.values():
            peer.__exit__()


@pytest.fixture(params=WORKERS)
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A worker that nobody else uses, after its hello."""
    with Peer(f"fusionllm_{request.param}") as peer:
        peer.start()
        yield peer


@pytest.mark.parametrize("case", CASES, ids=[json.dumps(op).replace('"', "")[:60] for op, *_ in CASES])
def test_frameworks_agree(peers: dict[str, tuple[Peer, list[str]]], case: Case) -> None:
    """All that have the operator have the same results, in f64 and f32."""
    op, operands, types = case
    able = [peer for peer, operators in peers.values() if next(iter(op)) in operators]
    if len(able) < 2:
        pytest.skip("fewer than two frameworks have it")
    first, *others = able
    # `hyper` is f64, whatever the other operands are. And what has no operand has no other type.
    narrow = bool(operands) and not {"adamw_step", "sgd_step", "squared_norm", "cast"} & set(op)
    for dtype, tolerance in (("f64", 1e-11), *([("f32", 2e-5)] if narrow else [])):
        inputs = [x.astype(np.float32) if dtype == "f32" and x.dtype == np.float64 else x for x in operands]
        results = [{**t, "dtype": dtype} if t["dtype"] == "f64" else t for t in types]
        expected = first.apply(op, inputs, results)
        for other in others:
            for want, got in zip(expected, other.apply(op, inputs, results), strict=True):
                np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_every_operator_is_tested(peers: dict[str, tuple[Peer, list[str]]]) -> None:
    tested = {next(iter(op)) for op, *_ in CASES}
    for _, operators in peers.values():
        assert set(operators) <= tested


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
    x = peer.upload(floats(3))
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
    x = floats(3, 2)
    tensor = peer.upload(x)
    unknown = node({"dance": None}, [0], [type_of(x)])
    with pytest.raises(WorkerError, match="dance"):
        peer.run([unknown], [tensor], [1])
    for bad in (3, -1, 2**63 - 1):
        index = peer.upload(np.array([0, bad]))
        nodes = [node({"unary": "exp"}, [0], [f64(3, 2)]), node({"index_select": {"dim": 0}}, [2, 1], [f64(2, 2)])]
        with pytest.raises(WorkerError, match=r"'node': 1.*'operator'"):
            peer.run(nodes, [tensor, index], [3], [index])
    with pytest.raises(WorkerError, match="no tensor 999"):
        peer.request("download", tensor=999, at=0)
    with pytest.raises(WorkerError, match="zero"):
        peer.apply({"binary": "remainder"}, [np.array([4, 5]), np.array([2, 0])], [i64(2)])
    np.testing.assert_array_equal(peer.download(tensor), x)


def test_no_room_is_told_apart(peer: Peer) -> None:
    size = [1 << 20, 1 << 24]
    with pytest.raises(WorkerError, match="'memory'"):
        peer.run([node({"full": {"ty": f64(*size), "value": 1.0}}, [], [f64(*size)])], [], [0])
        peer.request("synchronize")


def test_tensors_share_no_memory(peer: Peer) -> None:
    """A freed input is overwritten, if the framework can, and no other tensor shows it."""
    x = floats(4, 3)
    t, flat = type_of(x), f64(12)
    given = peer.upload(x)
    views = [node({"detach": None}, [0], [t]), node({"reshape": {"shape": [12]}}, [1], [flat])]
    same, again, detached, reshaped, twin = peer.run(views, [given], [0, 0, 1, 2, 2])
    for tensor in (given, same, again, detached):
        peer.run([node({"unary": "neg"}, [0], [t])], [tensor], [1], [tensor])
    peer.run([node({"unary": "neg"}, [0], [flat])], [twin], [1], [twin])
    np.testing.assert_array_equal(peer.download(reshaped), x.reshape(-1))


def test_one_tensor_as_two_inputs(peer: Peer) -> None:
    x = floats(5)
    tensor = peer.upload(x)
    nodes = [node({"unary": "neg"}, [0], [f64(5)]), node({"binary": "sub"}, [2, 1], [f64(5)])]
    [result] = peer.run(nodes, [tensor, tensor], [3], [tensor])
    np.testing.assert_array_equal(peer.download(result), -2 * x)


def test_long_segment_with_reused_values(peer: Peer) -> None:
    """Operands that are read again later keep their values, although others are overwritten."""
    x = floats(3, 4)
    tensor, t = peer.upload(x), type_of(x)
    nodes = [
        node({"unary": "neg"}, [0], [t]),  # 1: -x
        node({"permute": {"dims": [1, 0]}}, [1], [f64(4, 3)]),  # 2: a view of 1
        node({"unary": "abs"}, [1], [t]),  # 3: |x|
        node({"binary": "add"}, [3, 0], [t]),  # 4: |x| + x
        node({"binary_scalar": {"op": "mul", "scalar": 2.0, "reverse": False}}, [4], [t]),  # 5
        node({"matmul": None}, [5, 2], [f64(3, 3)]),  # 6
    ]
    product, doubled = peer.run(nodes, [tensor], [6, 5], [tensor])
    np.testing.assert_allclose(peer.download(doubled), 2 * (np.abs(x) + x), rtol=1e-12)
    np.testing.assert_allclose(peer.download(product), 2 * (np.abs(x) + x) @ -x.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op, state, hyper", [("adamw_step", 4, [1e-2, 0.2, 0.3, 0.5]), ("sgd_step", 3, [0.1, 0.5])])
def test_steps_of_many_parameters(
    peers: dict[str, tuple[Peer, list[str]]], op: str, state: int, hyper: list[float]
) -> None:
    """A worker may run them at once. Parameters, state and gradients that stay in use do not change."""
    attributes = {"adamw_step": ADAMW, "sgd_step": SGD}[op]
    shapes = [(3, 4), (5,), (), (2, 0)]
    operands = [[positive(*shape) for _ in range(state)] for shape in shapes]
    found = []
    for peer, operators in peers.values():
        if op not in operators:
            continue
        held = [peer.upload(x) for group in operands for x in group]
        last = len(held)
        nodes, outputs = [], []
        for i, shape in enumerate(shapes):
            inputs = [*range(i * state, (i + 1) * state), last]
            nodes.append(node({op: attributes}, inputs, [f64(*shape)] * (state - 1)))
            outputs += [last + 1 + i * (state - 1) + j for j in range(state - 1)]
        freed = held[:state]
        inputs = [*held, peer.upload(np.array(hyper))]
        found.append([peer.download(r) for r in peer.run(nodes, inputs, outputs, freed)])
        for tensor, x in list(zip(held, (x for group in operands for x in group)))[state:]:
            np.testing.assert_array_equal(peer.download(tensor), x)
    for other in found[1:]:
        for want, got in zip(found[0], other, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)
