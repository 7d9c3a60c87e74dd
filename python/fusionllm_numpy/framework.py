"""Every operator that has no decomposition, in NumPy.

Each operator is a function of its operands. Its attributes are keyword arguments of the same names.
"""

from __future__ import annotations

import math
import operator
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fusionllm_worker import Framework, Plan, Runner, Segment, TensorType
from fusionllm_worker.windows import Pair, pool, windows

Array = np.ndarray
Attributes = dict[str, Any]

CODES = {"f64": "<f8", "f32": "<f4", "i64": "<i8", "i32": "<i4", "bool": "?"}
DTYPES = {name: np.dtype(code) for name, code in CODES.items()}


# Element by element


def convert(x: Array, dtype: np.dtype) -> Array:
    """Floats become integers by truncation, limited to the range, and NaN becomes 0."""
    if x.dtype.kind != "f" or dtype.kind != "i":
        return x.astype(dtype)
    # The bound is a float, but the largest integer of 64 bits is none: so it is filled in afterwards.
    bound, limits = 2.0 ** (8 * dtype.itemsize - 1), np.iinfo(dtype)
    inside = np.where(np.abs(x) < bound, x, 0).astype(dtype)
    return np.where(x >= bound, limits.max, np.where(x <= -bound, limits.min, inside))


def number(value: float, dtype: np.dtype) -> Array:
    """A scalar of an element type."""
    return convert(np.asarray(value, np.float64), dtype).astype(dtype)


UNARY: dict[str, Callable[[Array], Array]] = {
    **{name: getattr(np, name) for name in ("abs", "exp", "log", "log1p", "expm1", "sqrt", "sin", "cos", "tanh")},
    **{name: getattr(np, name) for name in ("floor", "ceil", "trunc", "logical_not")},
    "neg": np.negative,
    "sign": lambda x: (x > 0).astype(x.dtype) - (x < 0),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "round": np.rint,
    "relu": lambda x: np.where(x < 0, 0, x),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    **{name: getattr(np, name) for name in ("maximum", "minimum", "fmod", "remainder", "floor_divide")},
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power},
}


def binary(a: Array, b: Array, *, op: str) -> Array:
    if op in ("fmod", "remainder", "floor_divide") and a.dtype.kind == "i" and not np.all(b):
        raise ZeroDivisionError("an integer is divided by zero")
    return BINARY[op](a, b)


def binary_scalar(x: Array, *, op: str, scalar: float, reverse: bool) -> Array:
    other = number(scalar, x.dtype)
    return binary(other, x, op=op) if reverse else binary(x, other, op=op)


def clamp(x: Array, *, min: float | None = None, max: float | None = None, open: bool = False) -> Array:
    # `open` concerns the gradient alone.
    x = x if min is None else np.maximum(x, number(min, x.dtype))
    return x if max is None else np.minimum(x, number(max, x.dtype))


# Reductions

REDUCE = {"sum": np.sum, "mean": np.mean, "amax": np.max, "amin": np.min, "prod": np.prod, "any": np.any, "all": np.all}


def reduce(x: Array, *, kind: str, dims: Sequence[int], keepdim: bool) -> Array:
    # Sums of i32 stay i32, which NumPy would widen.
    dtype = {"dtype": x.dtype} if kind in ("sum", "prod") else {}
    return REDUCE[kind](x, axis=tuple(dims), keepdims=keepdim, **dtype)


# Views and moves


def along(dim: int, index: Any) -> tuple[Any, ...]:
    """Addresses one dimension, and all of each dimension before it."""
    return (slice(None),) * dim + (index,)


def part(x: Array, *, dim: int, start: int, end: int, step: int) -> Array:
    return x[along(dim, slice(start, end, step))]


def slice_backward(g: Array, *, slice: Attributes, size: int) -> Array:
    dim = slice["dim"]
    x = np.zeros((*g.shape[:dim], size, *g.shape[dim + 1 :]), g.dtype)
    part(x, **slice)[...] = g
    return x


def split(x: Array, *, dim: int, sizes: Sequence[int]) -> Array | tuple[Array, ...]:
    parts = np.split(x, np.cumsum(sizes)[:-1], axis=dim)
    return tuple(parts) if len(parts) > 1 else parts[0]


def constant_pad(x: Array, *, pads: Sequence[Pair], value: float) -> Array:
    y = np.full([before + n + after for n, (before, after) in zip(x.shape, pads)], number(value, x.dtype))
    y[tuple(slice(before, before + n) for n, (before, _) in zip(x.shape, pads))] = x
    return y


def arange(*, dtype: str, start: float, step: float, len: int) -> Array:
    return convert(start + step * np.arange(len, dtype=np.float64), DTYPES[dtype])


# Addresses given by integer tensors


def checked(index: Array, size: int) -> Array:
    """The index, whose elements must lie in `0 .. size`: NumPy would take -1 for the last element."""
    bad = (index < 0) | (index >= size)
    if bad.any():
        raise IndexError(f"index {index[bad][0]} is out of range for size {size}")
    return index


def embedding_dense_backward(g: Array, ids: Array, *, num_weights: int, padding_idx: int | None) -> Array:
    kept = checked(ids, num_weights) != (-1 if padding_idx is None else padding_idx)
    weight = np.zeros((num_weights, g.shape[-1]), g.dtype)
    np.add.at(weight, ids[kept], g[kept])
    return weight


def slices(x: Array, index: Array, dim: int) -> tuple[Any, ...]:
    """Addresses the slices of one dimension that the index names."""
    return along(dim, checked(index, x.shape[dim]))


def elements(x: Array, index: Array, dim: int) -> tuple[Any, ...]:
    """Addresses, for each element of the index, the element of `x` in that place, but in `dim` the one it names."""
    at = list(np.indices(index.shape, sparse=True))
    at[dim] = checked(index, x.shape[dim])
    return tuple(at)


def advanced(x: Array, index: Sequence[Array], indexed: Sequence[bool]) -> tuple[Any, ...]:
    """Addresses what advanced indexing reads."""
    given = iter(index)
    return tuple(checked(next(given), n) if marked else slice(None) for n, marked in zip(x.shape, indexed))


def put(x: Array, at: tuple[Any, ...], values: Array, accumulate: bool) -> Array:
    """A copy of `x` where values are written to, or added at, the places in `at`, in row-major order of the values."""
    y = x.copy()
    if accumulate:
        np.add.at(y, at, values)
    else:
        y[at] = values
    return y


def sort(x: Array, *, dim: int, descending: bool) -> tuple[Array, Array]:
    if descending:
        # Reversed twice, so that equal elements keep their order.
        at = x.shape[dim] - 1 - np.flip(np.argsort(np.flip(x, dim), axis=dim, stable=True), dim)
    else:
        at = np.argsort(x, axis=dim, stable=True)
    return np.take_along_axis(x, at, dim), at


def top_k(x: Array, *, k: int, dim: int, largest: bool) -> tuple[Array, Array]:
    values, at = sort(x, dim=dim, descending=largest)
    return values[along(dim, slice(k))], at[along(dim, slice(k))]


# Convolutions and pools


def padded(x: Array, padding: Pair, value: float = 0, beyond: Pair = (0, 0)) -> Array:
    """`x [.., H, W]` with padding on both sides, and more at its ends."""
    sides = [(p, p + more) for p, more in zip(padding, beyond)]
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + sides, constant_values=value)


def taps(x: Array, kernel: Pair, stride: Pair, dilation: Pair, size: Pair) -> Iterator[Array]:
    """For each element of the kernel in turn, the elements of `x [.., H, W]` under it: views of `x`, `[.., *size]`."""
    for i, j in np.ndindex(*kernel):
        starts = i * dilation[0], j * dilation[1]
        yield x[(..., *(slice(at, at + n * s, s) for at, n, s in zip(starts, size, stride)))]


def columns(x: Array, kernel: Pair, size: Pair, *, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Array:
    """What each window of `x [N, C, H, W]` reads: `[groups, C / groups * KH * KW, N * H' * W']`."""
    windows = np.stack(list(taps(padded(x, padding), kernel, stride, dilation, size)), axis=2)
    (n, c), k = x.shape[:2], math.prod(kernel)
    return windows.transpose(1, 2, 0, 3, 4).reshape(groups, c // groups * k, n * math.prod(size))


def rows(g: Array, groups: int) -> Array:
    """`g [N, O, H', W']` as `[groups, O / groups, N * H' * W']`."""
    n, o, h, w = g.shape
    return g.transpose(1, 0, 2, 3).reshape(groups, o // groups, n * h * w)


def conv2d(x: Array, weight: Array, bias: Array | None = None, **conv: Any) -> Array:
    (o, c, *kernel), groups = weight.shape, conv["groups"]
    sides = zip(x.shape[2:], kernel, conv["stride"], conv["padding"], conv["dilation"])
    size = [windows(*side)[0] for side in sides]
    y = weight.reshape(groups, o // groups, c * math.prod(kernel)) @ columns(x, kernel, size, **conv)
    y = y.reshape(o, len(x), *size).transpose(1, 0, 2, 3)
    return y if bias is None else y + bias[:, None, None]


def conv2d_input_grad(g: Array, weight: Array, *, conv: Attributes, input: Pair) -> Array:
    (n, _, *size), (o, c, *kernel), groups = g.shape, weight.shape, conv["groups"]
    matrix = weight.reshape(groups, o // groups, c * math.prod(kernel))
    spread = (matrix.transpose(0, 2, 1) @ rows(g, groups)).reshape(groups * c, math.prod(kernel), n, *size)
    (h, w), (p, q) = input, conv["padding"]
    x = np.zeros((n, groups * c, h + 2 * p, w + 2 * q), g.dtype)
    for i, tap in enumerate(taps(x, kernel, conv["stride"], conv["dilation"], size)):
        tap += spread[:, i].transpose(1, 0, 2, 3)
    return x[:, :, p : p + h, q : q + w]


def conv2d_weight_grad(g: Array, x: Array, *, conv: Attributes, kernel: Pair) -> Array:
    dw = rows(g, conv["groups"]) @ columns(x, kernel, g.shape[2:], **conv).transpose(0, 2, 1)
    return dw.reshape(g.shape[1], x.shape[1] // conv["groups"], *kernel)


def max_pool2d(
    x: Array, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Array, Array]:
    size, beyond = pool(x.shape[2:], kernel, stride, padding, dilation, ceil_mode)
    # Positions in the plane, and -1 in the padding.
    plane = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:])
    positions = taps(padded(plane, padding, -1, beyond), kernel, stride, dilation, size)
    values = taps(padded(x, padding, 0, beyond), kernel, stride, dilation, size)
    best, at = np.zeros((*x.shape[:2], *size), x.dtype), np.full((*x.shape[:2], *size), -1)
    for value, position in zip(values, positions):
        # The first of equals, and the last NaN.
        better = (position >= 0) & ((at < 0) | (value > best) | np.isnan(value))
        best, at = np.where(better, value, best), np.where(better, position, at)
    return best, at


def max_pool2d_backward(g: Array, at: Array, *, input: Pair) -> Array:
    planes = math.prod(g.shape[:2])
    x = np.zeros((planes, math.prod(input)), g.dtype)
    index = checked(at, x.shape[1]).reshape(planes, math.prod(g.shape[2:]))
    np.add.at(x, (np.arange(planes)[:, None], index), g.reshape(index.shape))
    return x.reshape(*g.shape[:2], *input)


def counts(input: Pair, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool, count_include_pad: bool) -> Array:
    """The number of elements that each window's mean counts: `[H', W']`."""
    size, beyond = pool(input, kernel, stride, padding, (1, 1), ceil_mode)
    counted = padded(padded(np.ones(input), padding, float(count_include_pad)), (0, 0), 0, beyond)
    return sum(taps(counted, kernel, stride, (1, 1), size))


def avg_pool2d(x: Array, **pooling: Any) -> Array:
    kernel, stride, padding = pooling["kernel"], pooling["stride"], pooling["padding"]
    size, beyond = pool(x.shape[2:], kernel, stride, padding, (1, 1), pooling["ceil_mode"])
    total = sum(taps(padded(x, padding, 0, beyond), kernel, stride, (1, 1), size))
    return (total / counts(x.shape[2:], **pooling)).astype(x.dtype)


def avg_pool2d_backward(g: Array, *, pool: Attributes, input: Pair) -> Array:
    share = (g / counts(input, **pool)).astype(g.dtype)
    (h, w), (p, q), stride, kernel = input, pool["padding"], pool["stride"], pool["kernel"]
    # Wide enough for windows that reach beyond the padded operand.
    x = np.zeros((*g.shape[:2], *(n + 2 * r + s for n, r, s in zip(input, pool["padding"], stride))), g.dtype)
    for tap in taps(x, kernel, stride, (1, 1), g.shape[2:]):
        tap += share
    return x[:, :, p : p + h, q : q + w]


def regions(output: Pair, input: Pair) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """The elements of an adaptive pool's result, each with the region of the operand that it is the mean of."""
    for i, j in np.ndindex(*output):
        sides = [slice(at * d // n, -(-(at + 1) * d // n)) for at, n, d in zip((i, j), output, input)]
        yield (..., i, j), (..., *sides)


def adaptive_avg_pool2d(x: Array, *, output: Pair) -> Array:
    y = np.empty((*x.shape[:2], *output), x.dtype)
    for at, region in regions(output, x.shape[2:]):
        y[at] = x[region].mean(axis=(-2, -1))
    return y


def adaptive_avg_pool2d_backward(g: Array, *, input: Pair) -> Array:
    x = np.zeros((*g.shape[:2], *input), g.dtype)
    for at, region in regions(g.shape[2:], input):
        tap = x[region]
        tap += g[at][..., None, None] / math.prod(tap.shape[-2:])
    return x


# Training


def philox(counter: Array, stream: int, key: int) -> Array:
    """Philox-4x32 with 10 rounds: four 32-bit numbers for each of `n` counters, `[n, 4]`."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counter & low, counter >> half, np.uint64(stream) & low, np.uint64(stream) >> half]
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [q >> half ^ c[1] ^ np.uint64(k0), q & low, p >> half ^ c[3] ^ np.uint64(k1), p & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(*c), axis=1)


def dropout(x: Array, key: Array, *, p: float, stream: int) -> tuple[Array, Array]:
    blocks = philox(np.arange(-(-x.size // 4), dtype=np.uint64), stream, int(key))
    uniform = (blocks.reshape(-1)[: x.size] >> np.uint64(8)) / 2.0**24
    kept = (uniform >= p).reshape(x.shape)
    return np.where(kept, x * number(1 / (1 - p), x.dtype), number(0, x.dtype)), kept


def cross_entropy_backward(g: Array, logits: Array, target: Array, lse: Array, *, ignore_index: int) -> Array:
    # A decomposition would not check the targets.
    counts = target != ignore_index
    rows, columns = np.flatnonzero(counts), checked(target[counts], logits.shape[1])
    d = np.where(counts[:, None], np.exp(logits - lse[:, None]), 0)
    d[rows, columns] -= 1
    return d * (g / g.dtype.type(max(len(rows), 1)))


NAMED = (
    binary, binary_scalar, clamp, reduce, slice_backward, split, constant_pad, arange, embedding_dense_backward,
    sort, top_k, conv2d, conv2d_input_grad, conv2d_weight_grad, max_pool2d, max_pool2d_backward, avg_pool2d,
    avg_pool2d_backward, adaptive_avg_pool2d, adaptive_avg_pool2d_backward, dropout, cross_entropy_backward,
)  # fmt: skip

OPERATORS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in NAMED},
    "unary": lambda x, op: np.asarray(UNARY[op](x), x.dtype),
    "compare": lambda a, b, op: getattr(operator, op)(a, b),
    "compare_scalar": lambda x, op, scalar: getattr(operator, op)(x, number(scalar, x.dtype)),
    "logical": lambda a, b, op: getattr(np, f"logical_{op}")(a, b),
    "where": np.where,
    "cast": lambda x, dtype: convert(x, DTYPES[dtype]),
    "arg_reduce": lambda x, largest, dim, keepdim: (np.argmax if largest else np.argmin)(x, dim, keepdims=keepdim),
    "cum_sum": lambda x, dim: np.cumsum(x, axis=dim, dtype=x.dtype),
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, dims: x.transpose(dims),
    "expand": lambda x, shape: np.broadcast_to(x, shape),
    "detach": lambda x: x,
    "slice": part,
    "cat": lambda *xs, dim: np.concatenate(xs, axis=dim),
    "flip": lambda x, dims: np.flip(x, axis=tuple(dims)),
    "triangle": lambda x, upper, diagonal: (np.triu if upper else np.tril)(x, diagonal),
    "full": lambda ty, value: np.full(ty["shape"], number(value, DTYPES[ty["dtype"]])),
    "embedding": lambda weight, ids, padding_idx: weight[checked(ids, len(weight))],
    "index_select": lambda x, index, dim: x[slices(x, index, dim)],
    "index_add": lambda x, index, source, dim: put(x, slices(x, index, dim), source, True),
    "gather": lambda x, index, dim: x[elements(x, index, dim)],
    "scatter_add": lambda x, index, source, dim: put(x, elements(x, index, dim), source, True),
    "scatter": lambda x, index, source, dim: put(x, elements(x, index, dim), source, False),
    "index": lambda x, *index, indexed: x[advanced(x, index, indexed)],
    "index_put": lambda x, values, *at, indexed, accumulate: put(x, advanced(x, at, indexed), values, accumulate),
    "matmul": np.matmul,
}


class NumPy(Framework):
    """NumPy on the processor. Nothing is computed in place, so tensors may share memory."""

    name = "numpy"
    version = np.__version__
    device = platform.processor() or platform.machine()
    dtypes = list(DTYPES)
    operators = list(OPERATORS)

    def __init__(self) -> None:
        np.seterr(all="ignore")  # A division by zero gives infinity, as the operators define it, and no warning.

    def upload(self, type: TensorType, data: memoryview) -> Array:
        return np.ndarray(type.shape, DTYPES[type.dtype], data).copy()

    def download(self, tensor: Array, into: memoryview) -> None:
        np.ndarray(tensor.shape, tensor.dtype, into)[...] = tensor

    def prepare(self, segment: Segment) -> Runner:
        plan = Plan(segment, [partial(OPERATORS[node.name], **node.attributes) for node in segment.nodes])
        # Row-major outputs, so that no later sum depends on how its operands lie in memory.
        return lambda inputs, freed: [np.asarray(output, order="C") for output in plan(inputs)]
