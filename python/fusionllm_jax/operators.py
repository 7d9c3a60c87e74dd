"""Every operator in JAX.

Each operator is a function of its operands. Its attributes are keyword arguments of the same names. The functions are
traced, so an index out of range cannot raise: :func:`checked` notes what to look at after the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fusionllm_worker.windows import Pair, pool

Array = jax.Array
Attributes = dict[str, Any]

DTYPES = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(jnp.bfloat16),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
}

HALVES = (DTYPES["f16"], DTYPES["bf16"])

#: What the segment being traced must check: for each, whether some element is bad, and what to say of it.
#: The text may name the element, whose value follows.
checks: list[tuple[Array, Array, str]] = []


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Computes half precision in single, and rounds the results. XLA fuses the conversions with the rest."""

    @wraps(function)
    def wide(*operands: Array, **attributes: Any) -> Any:
        half = next((x.dtype for x in operands if x.dtype in HALVES), None)
        if half is None:
            return function(*operands, **attributes)
        results = function(*(x.astype(jnp.float32) if x.dtype == half else x for x in operands), **attributes)
        return jax.tree.map(lambda y: y.astype(half) if y.dtype == jnp.float32 else y, results)

    return wide


# Element by element


def convert(x: Array, dtype: np.dtype) -> Array:
    """Floats become integers by truncation, limited to the range, and NaN becomes 0."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.issubdtype(dtype, jnp.integer):
        return x != 0 if dtype == np.bool_ else x.astype(dtype)
    # The bound is a float, but the largest integer of 64 bits is none: so it is filled in afterwards.
    bound, limits = 2.0 ** (8 * dtype.itemsize - 1), jnp.iinfo(dtype)
    x = x.astype(jnp.float32) if x.dtype in HALVES else x
    inside = jnp.where(jnp.abs(x) < bound, x, 0).astype(dtype)
    return jnp.where(x >= bound, limits.max, jnp.where(x <= -bound, limits.min, inside)).astype(dtype)


def number(value: float, dtype: np.dtype) -> Array:
    """A scalar of an element type."""
    return convert(jnp.asarray(value, jnp.float64), dtype)


UNARY: dict[str, Callable[[Array], Array]] = {
    **{name: getattr(jnp, name) for name in ("abs", "exp", "log", "log1p", "expm1", "sqrt", "sin", "cos", "tanh")},
    **{name: getattr(jnp, name) for name in ("floor", "ceil", "trunc", "logical_not")},
    "neg": jnp.negative,
    "sign": lambda x: (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype),
    "rsqrt": lambda x: 1 / jnp.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sigmoid": jax.nn.sigmoid,
    "erf": lax.erf,
    "round": jnp.rint,
    "relu": lambda x: jnp.where(x < 0, 0, x),
    "silu": jax.nn.silu,
    "softplus": lambda x: jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x))),
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    **{name: getattr(jnp, name) for name in ("maximum", "minimum", "fmod", "remainder", "floor_divide")},
    **{"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "pow": jnp.power},
}
COMPARE = {
    **{"eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less},
    **{"le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal},
}
LOGICAL = {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}


@widened
def unary(x: Array, *, op: str) -> Array:
    return UNARY[op](x)


@widened
def binary(a: Array, b: Array, *, op: str) -> Array:
    if op in ("fmod", "remainder", "floor_divide") and jnp.issubdtype(a.dtype, jnp.integer):
        zero = jnp.any(b == 0)
        checks.append((zero, jnp.int64(0), "an integer is divided by zero"))
        b = jnp.where(b == 0, 1, b)
    return BINARY[op](a, b)


def binary_scalar(x: Array, *, op: str, scalar: float, reverse: bool) -> Array:
    other = number(scalar, x.dtype)
    return binary(other, x, op=op) if reverse else binary(x, other, op=op)


def clamp(x: Array, *, min: float | None = None, max: float | None = None, open: bool = False) -> Array:
    # `open` concerns the gradient alone.
    if min is not None:
        x = jnp.maximum(x, number(min, x.dtype))
    return x if max is None else jnp.minimum(x, number(max, x.dtype))


CUBIC = 0.044715
TANH_SCALE = math.sqrt(2 / math.pi)


@widened
def gelu(x: Array, *, approximate: str) -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(TANH_SCALE * x * (1 + CUBIC * x * x)))
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@widened
def gelu_backward(g: Array, x: Array, *, approximate: str) -> Array:
    if approximate == "tanh":
        t = jnp.tanh(TANH_SCALE * x * (1 + CUBIC * x * x))
        return g * 0.5 * (1 + t + x * (1 - t * t) * TANH_SCALE * (1 + 3 * CUBIC * x * x))
    return g * (0.5 * (1 + lax.erf(x * math.sqrt(0.5))) + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def threshold_backward(g: Array, x: Array, *, threshold: float) -> Array:
    return jnp.where(x > number(threshold, x.dtype), g, 0)


# Reductions


REDUCE = {"sum": jnp.sum, "mean": jnp.mean, "prod": jnp.prod, "any": jnp.any, "all": jnp.all, "amax": jnp.max}
REDUCE["amin"] = jnp.min


def reduce(x: Array, *, kind: str, dims: Sequence[int], keepdim: bool) -> Array:
    # Sums of i32 stay i32, which NumPy's rules would widen. Half precision is summed in single all the same.
    dtype = {"dtype": x.dtype} if kind in ("sum", "prod") else {}
    return REDUCE[kind](x, axis=tuple(dims), keepdims=keepdim, **dtype)


def arg_reduce(x: Array, *, largest: bool, dim: int, keepdim: bool) -> Array:
    return (jnp.argmax if largest else jnp.argmin)(x, axis=dim, keepdims=keepdim).astype(jnp.int64)


# Views and moves


def along(dim: int, index: Any) -> tuple[Any, ...]:
    """Addresses one dimension, and all of each dimension before it."""
    return (slice(None),) * dim + (index,)


def range_of(size: int, *, dim: int, start: int, end: int, step: int) -> tuple[Any, ...]:
    """Addresses a slice of a dimension of this size. The step may be larger than any index that JAX knows."""
    return along(dim, slice(start, end, min(step, max(size, 1))))


def part(x: Array, **attributes: int) -> Array:
    return x[range_of(x.shape[attributes["dim"]], **attributes)]


def slice_backward(g: Array, *, slice: Attributes, size: int) -> Array:
    dim = slice["dim"]
    return jnp.zeros((*g.shape[:dim], size, *g.shape[dim + 1 :]), g.dtype).at[range_of(size, **slice)].set(g)


def split(x: Array, *, dim: int, sizes: Sequence[int]) -> tuple[Array, ...]:
    return tuple(jnp.split(x, np.cumsum(sizes)[:-1], axis=dim))


def constant_pad(x: Array, *, pads: Sequence[Pair], value: float) -> Array:
    return lax.pad(x, number(value, x.dtype), [(before, after, 0) for before, after in pads])


def full(*, ty: Attributes, value: float) -> Array:
    return jnp.full(ty["shape"], number(value, DTYPES[ty["dtype"]]))


def arange(*, dtype: str, start: float, step: float, len: int) -> Array:
    return convert(start + step * jnp.arange(len, dtype=jnp.float64), DTYPES[dtype])


# Addresses given by integer tensors


def checked(index: Array, size: int, allowed: int | None = None) -> Array:
    """The index. After the run, its elements are checked to lie in `0 .. size` or to be the one that is allowed."""
    flat = index.reshape(-1)
    if flat.size and size == 0:
        raise IndexError("an index is out of range for size 0")
    if flat.size:
        bad = (flat < 0) | (flat >= size)
        if allowed is not None:
            bad &= flat != allowed
        checks.append((jnp.any(bad), flat[jnp.argmax(bad)], f"index {{}} is out of range for size {size}"))
    return index


@widened
def embedding_dense_backward(g: Array, ids: Array, *, num_weights: int, padding_idx: int | None) -> Array:
    checked(ids, num_weights)
    if padding_idx is not None:
        g = jnp.where((ids == padding_idx)[..., None], 0, g)
    return jnp.zeros((num_weights, g.shape[-1]), g.dtype).at[ids].add(g, mode="drop")


def slices(x: Array, index: Array, dim: int) -> tuple[Any, ...]:
    """Addresses the slices of one dimension that the index names."""
    return along(dim, checked(index, x.shape[dim]))


def elements(x: Array, index: Array, dim: int) -> tuple[Any, ...]:
    """Addresses, for each element of the index, the element of `x` in that place, but in `dim` the one it names."""
    at: list[Any] = list(np.indices(index.shape, sparse=True))
    at[dim] = checked(index, x.shape[dim])
    return tuple(at)


def advanced(x: Array, index: Sequence[Array], indexed: Sequence[bool]) -> tuple[Any, ...]:
    """Addresses what advanced indexing reads."""
    given = iter(index)
    return tuple(checked(next(given), n) if marked else slice(None) for n, marked in zip(x.shape, indexed))


def take(x: Array, at: tuple[Any, ...]) -> Array:
    return x.at[at].get(mode="clip")


def add(x: Array, at: tuple[Any, ...], values: Array) -> Array:
    return widened(lambda x, values: x.at[at].add(values, mode="drop"))(x, values)


def write(x: Array, at: tuple[Any, ...], values: Array) -> Array:
    """Writes values in row-major order, so that the last of those to one place stays.

    XLA leaves open which one does. So every place first learns the number of its last write.
    """
    order = jnp.arange(values.size).reshape(values.shape)
    last = jnp.full(x.shape, -1).at[at].max(order, mode="drop")
    if not values.size:
        return x
    return jnp.where(last < 0, x, values.reshape(-1)[jnp.maximum(last, 0)])


def index_put(x: Array, values: Array, *index: Array, indexed: Sequence[bool], accumulate: bool) -> Array:
    return (add if accumulate else write)(x, advanced(x, index, indexed), values)


def sort(x: Array, *, dim: int, descending: bool) -> tuple[Array, Array]:
    at = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, at, axis=dim), at.astype(jnp.int64)


def top_k(x: Array, *, k: int, dim: int, largest: bool) -> tuple[Array, Array]:
    values, at = sort(x, dim=dim, descending=largest)
    return values[along(dim, slice(k))], at[along(dim, slice(k))]


# Products and convolutions


@widened
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def convolution(x: Array, weight: Array, conv: Attributes) -> Array:
    return lax.conv_general_dilated(
        x,
        weight,
        conv["stride"],
        [(p, p) for p in conv["padding"]],
        rhs_dilation=conv["dilation"],
        feature_group_count=conv["groups"],
    )


@widened
def conv2d(x: Array, weight: Array, bias: Array | None = None, **conv: Any) -> Array:
    y = convolution(x, weight, conv)
    return y if bias is None else y + bias[:, None, None]


@widened
def conv2d_input_grad(g: Array, weight: Array, *, conv: Attributes, input: Pair) -> Array:
    x = jax.ShapeDtypeStruct((g.shape[0], weight.shape[1] * conv["groups"], *input), g.dtype)
    return jax.linear_transpose(lambda x: convolution(x, weight, conv), x)(g)[0]


@widened
def conv2d_weight_grad(g: Array, x: Array, *, conv: Attributes, kernel: Pair) -> Array:
    weight = jax.ShapeDtypeStruct((g.shape[1], x.shape[1] // conv["groups"], *kernel), g.dtype)
    return jax.linear_transpose(lambda weight: convolution(x, weight, conv), weight)(g)[0]


# Pools


def padded(x: Any, padding: Pair, value: float = 0, beyond: Pair = (0, 0)) -> Any:
    """`x [.., H, W]` with padding on both sides, and more at its ends. NumPy's arrays stay such: they are constants."""
    sides = [(p, p + more) for p, more in zip(padding, beyond)]
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    return pad(x, [(0, 0)] * (x.ndim - 2) + sides, constant_values=value)


def taps(x: Any, kernel: Pair, stride: Pair, dilation: Pair, size: Pair) -> Iterator[Any]:
    """For each element of the kernel in turn, the elements of `x [.., H, W]` under it: `[.., *size]`."""
    for i, j in np.ndindex(*kernel):
        starts = i * dilation[0], j * dilation[1]
        yield x[(..., *(slice(at, at + n * s, s) for at, n, s in zip(starts, size, stride)))]


def max_pool2d(
    x: Array, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Array, Array]:
    size, beyond = pool(x.shape[2:], kernel, stride, padding, dilation, ceil_mode)
    # Positions in the plane, and -1 in the padding.
    plane = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:])
    positions = taps(padded(plane, padding, -1, beyond), kernel, stride, dilation, size)
    values = taps(padded(x, padding, 0, beyond), kernel, stride, dilation, size)
    best, at = jnp.zeros((*x.shape[:2], *size), x.dtype), jnp.full((*x.shape[:2], *size), -1)
    for value, position in zip(values, positions):
        # The first of equals, and the last NaN.
        better = (position >= 0) & ((at < 0) | (value > best) | jnp.isnan(value))
        best, at = jnp.where(better, value, best), jnp.where(better, position, at)
    return best, at


@widened
def max_pool2d_backward(g: Array, at: Array, *, input: Pair) -> Array:
    planes, n = math.prod(g.shape[:2]), math.prod(input)
    index = checked(at, n).reshape(planes, math.prod(g.shape[2:]))
    x = jnp.zeros((planes, n), g.dtype).at[np.arange(planes)[:, None], index].add(g.reshape(index.shape), mode="drop")
    return x.reshape(*g.shape[:2], *input)


def counts(input: Pair, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool, count_include_pad: bool) -> Any:
    """The number of elements that each window's mean counts: `[H', W']`, a constant."""
    size, beyond = pool(input, kernel, stride, padding, (1, 1), ceil_mode)
    counted = padded(padded(np.ones(input), padding, float(count_include_pad)), (0, 0), 0, beyond)
    return sum(taps(counted, kernel, stride, (1, 1), size))


@widened
def avg_pool2d(x: Array, **pooling: Any) -> Array:
    kernel, stride, padding = pooling["kernel"], pooling["stride"], pooling["padding"]
    size, beyond = pool(x.shape[2:], kernel, stride, padding, (1, 1), pooling["ceil_mode"])
    total = sum(taps(padded(x, padding, 0, beyond), kernel, stride, (1, 1), size))
    return total / counts(x.shape[2:], **pooling).astype(x.dtype)


@widened
def avg_pool2d_backward(g: Array, *, pool: Attributes, input: Pair) -> Array:
    x = jax.ShapeDtypeStruct((*g.shape[:2], *input), g.dtype)
    return jax.linear_transpose(lambda x: avg_pool2d(x, **pool), x)(g)[0]


def shares(output: int, input: int, dtype: np.dtype) -> np.ndarray:
    """What each element of one side contributes to the means of an adaptive pool: `[output, input]`."""
    weights = np.zeros((output, input), dtype)
    for i in range(output):
        start, end = i * input // output, -(-(i + 1) * input // output)
        weights[i, start:end] = 1 / (end - start)
    return weights


@widened
def adaptive_avg_pool2d(x: Array, *, output: Pair) -> Array:
    h, w = (shares(n, d, x.dtype) for n, d in zip(output, x.shape[2:]))
    return jnp.einsum("ih,nchw,jw->ncij", h, x, w)


@widened
def adaptive_avg_pool2d_backward(g: Array, *, input: Pair) -> Array:
    h, w = (shares(n, d, g.dtype) for n, d in zip(g.shape[2:], input))
    return jnp.einsum("ih,ncij,jw->nchw", h, g, w)


# Normalisation and softmax


def normalised(x: Array, dims: tuple[int, ...], eps: float) -> tuple[Array, Array, Array, Array]:
    """`x` with mean 0 and variance 1 over dimensions, with its mean, its variance and `1 / √(var + eps)`."""
    mean = jnp.mean(x, dims, keepdims=True)
    centred = x - mean
    var = jnp.mean(centred * centred, dims, keepdims=True)
    rstd = 1 / jnp.sqrt(var + eps)
    return centred * rstd, mean, var, rstd


def norm_input_grad(h: Array, xhat: Array, rstd: Array, dims: tuple[int, ...]) -> Array:
    """From the gradient `h` of the normalised operand `xhat`: `rstd (h - mean(h) - xhat mean(h xhat))`."""
    return rstd * (h - jnp.mean(h, dims, keepdims=True) - xhat * jnp.mean(h * xhat, dims, keepdims=True))


def last(x: Array, dims: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - dims, x.ndim))


@widened
def layer_norm(x: Array, weight: Any = None, bias: Any = None, *, dims: int, eps: float) -> tuple[Array, Array, Array]:
    y, mean, _, rstd = normalised(x, last(x, dims), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


@widened
def layer_norm_input_grad(g: Array, x: Array, mean: Array, rstd: Array, weight: Any = None, *, dims: int) -> Array:
    return norm_input_grad(g if weight is None else g * weight, (x - mean) * rstd, rstd, last(x, dims))


@widened
def layer_norm_weight_grad(g: Array, x: Array, mean: Array, rstd: Array, *, dims: int) -> tuple[Array, Array]:
    lead = tuple(range(x.ndim - dims))
    return jnp.sum(g * (x - mean) * rstd, lead), jnp.sum(g, lead)


def channels(x: Array) -> tuple[tuple[int, ...], Callable[[Array], Array]]:
    """All dimensions but that of the channels, and how a `[C]` tensor broadcasts along the channels."""
    return (0, *range(2, x.ndim)), lambda t: t.reshape(-1, *(1,) * (x.ndim - 2))


@widened
def batch_norm(
    x: Array, weight: Array, bias: Array, old_mean: Array, old_var: Array, *, momentum: float, eps: float
) -> tuple[Array, ...]:
    dims, spread = channels(x)
    y, mean, var, rstd = normalised(x, dims, eps)
    mean, var, rstd = (t.reshape(-1) for t in (mean, var, rstd))
    n = math.prod(x.shape[d] for d in dims)
    new_mean = (1 - momentum) * old_mean + momentum * mean
    new_var = (1 - momentum) * old_var + momentum * var * (n / max(n - 1, 1))
    return y * spread(weight) + spread(bias), mean, rstd, new_mean, new_var


@widened
def batch_norm_input_grad(g: Array, x: Array, mean: Array, rstd: Array, weight: Array) -> Array:
    dims, spread = channels(x)
    return norm_input_grad(g * spread(weight), (x - spread(mean)) * spread(rstd), spread(rstd), dims)


@widened
def batch_norm_weight_grad(g: Array, x: Array, mean: Array, rstd: Array) -> tuple[Array, Array]:
    dims, spread = channels(x)
    return jnp.sum(g * (x - spread(mean)) * spread(rstd), dims), jnp.sum(g, dims)


def exponentials(x: Array, dim: int) -> tuple[Array, Array, Array]:
    """`x - max x`, its exponentials and their sum. The maximum is subtracted so that none overflows."""
    shifted = x - jnp.max(x, axis=dim, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(shifted)
    return shifted, e, jnp.sum(e, axis=dim, keepdims=True)


@widened
def softmax(x: Array, *, dim: int) -> Array:
    _, e, total = exponentials(x, dim)
    return e / total


@widened
def log_softmax(x: Array, *, dim: int) -> Array:
    shifted, _, total = exponentials(x, dim)
    return shifted - jnp.log(total)


@widened
def softmax_backward(g: Array, y: Array, *, dim: int) -> Array:
    return y * (g - jnp.sum(g * y, axis=dim, keepdims=True))


@widened
def log_softmax_backward(g: Array, y: Array, *, dim: int) -> Array:
    return g - jnp.exp(y) * jnp.sum(g, axis=dim, keepdims=True)


# Attention


def repeated(x: Array, heads: int) -> Array:
    """`[B, G, S, E]` as `[B, H, S, E]`: each query head gets its key head."""
    return jnp.repeat(x, heads // x.shape[1], axis=1)


def gathered(x: Array, groups: int) -> Array:
    """Sums over the query heads that read the same key head: from `[B, H, S, E]` to `[B, G, S, E]`."""
    b, h, s, e = x.shape
    return jnp.sum(x.reshape(b, groups, h // groups, s, e), axis=2)


def scores(q: Array, k: Array, mask: Array | None, is_causal: bool, scale: float) -> Array:
    """`scale q kᵀ + mask`, with minus infinity for keys that take no part: `[B, H, L, S]`."""
    s = (scale * q) @ jnp.swapaxes(repeated(k, q.shape[1]), 2, 3)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf) if mask.dtype == bool else s + mask
    return jnp.where(np.tri(*s.shape[2:], dtype=bool), s, -jnp.inf) if is_causal else s


def attention(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, is_causal: bool, scale: float
) -> tuple[Array, Array]:
    dtype = q.dtype
    # The logarithm stays in single precision: rounded to half, backward's weights would not add to 1.
    q, k, v, mask = (None if x is None else x.astype(jnp.float32) if x.dtype in HALVES else x for x in (q, k, v, mask))
    s = scores(q, k, mask, is_causal, scale)
    top = jnp.max(s, axis=3, keepdims=True, initial=-jnp.inf)
    # A query without keys: its exponentials are 0 rather than NaN.
    top = jnp.where(top == -jnp.inf, 0, top)
    e = jnp.exp(s - top)
    total = jnp.sum(e, axis=3, keepdims=True)
    p = e / jnp.where(total == 0, 1, total)
    return (p @ repeated(v, q.shape[1])).astype(dtype), (jnp.log(total) + top)[..., 0]


@widened
def attention_backward(
    g: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, mask: Array | None = None, *, forward: Attributes
) -> tuple[Array, Array, Array]:
    heads, groups = q.shape[1], k.shape[1]
    lse = lse[..., None]
    p = jnp.exp(scores(q, k, mask, **forward) - jnp.where(lse == -jnp.inf, 0, lse))
    dp = g @ jnp.swapaxes(repeated(v, heads), 2, 3)
    ds = forward["scale"] * p * (dp - jnp.sum(g * out, axis=3, keepdims=True))
    dk, dv = (gathered(jnp.swapaxes(a, 2, 3) @ b, groups) for a, b in ((ds, q), (p, g)))
    return ds @ repeated(k, heads), dk, dv


# Training


def philox(counter: Array, stream: int, key: Array) -> Array:
    """Philox-4x32 with 10 rounds: four 32-bit numbers for each of `n` counters, `[n, 4]`."""
    low, half = jnp.uint64(0xFFFFFFFF), jnp.uint64(32)
    key = key.astype(jnp.uint64)
    c = [counter & low, counter >> half, jnp.uint64(stream & 0xFFFFFFFF), jnp.uint64(stream >> 32)]
    k = [key & low, key >> half]
    for _ in range(10):
        p, q = jnp.uint64(0xD2511F53) * c[0], jnp.uint64(0xCD9E8D57) * c[2]
        c = [q >> half ^ c[1] ^ k[0], q & low, p >> half ^ c[3] ^ k[1], p & low]
        k = [k[0] + jnp.uint64(0x9E3779B9) & low, k[1] + jnp.uint64(0xBB67AE85) & low]
    return jnp.stack(jnp.broadcast_arrays(*c), axis=1)


def dropout(x: Array, key: Array, *, p: float, stream: int) -> tuple[Array, Array]:
    blocks = philox(jnp.arange(-(-x.size // 4), dtype=jnp.uint64), stream, key)
    uniform = (blocks.reshape(-1)[: x.size] >> jnp.uint64(8)).astype(jnp.float64) / 2.0**24
    kept = (uniform >= p).reshape(x.shape)
    return dropout_backward(x, kept, scale=1 / (1 - p)), kept


@widened
def dropout_backward(g: Array, mask: Array, *, scale: float) -> Array:
    return jnp.where(mask, g * scale, 0)


def classes(target: Array, c: int, ignore_index: int) -> tuple[Array, Array, Array]:
    """Which targets count, the targets with 0 for the others, and the number that count."""
    counts = checked(target, c, allowed=ignore_index) != ignore_index
    return counts, jnp.where(counts, target, 0), jnp.sum(counts)


@widened
def cross_entropy(logits: Array, target: Array, *, ignore_index: int) -> tuple[Array, Array]:
    counts, index, total = classes(target, logits.shape[1], ignore_index)
    _, _, sums = exponentials(logits, 1)
    lse = jnp.log(sums[:, 0]) + jnp.max(logits, axis=1, initial=-jnp.inf)
    each = lse - jnp.take_along_axis(logits, index[:, None], axis=1, mode="clip")[:, 0]
    return jnp.sum(jnp.where(counts, each, 0)) / total.astype(logits.dtype), lse


@widened
def cross_entropy_backward(g: Array, logits: Array, target: Array, lse: Array, *, ignore_index: int) -> Array:
    counts, index, total = classes(target, logits.shape[1], ignore_index)
    weight = jnp.where(counts, g / total.astype(logits.dtype), 0)[:, None]
    return (jnp.exp(logits - lse[:, None]) - (jnp.arange(logits.shape[1]) == index[:, None])) * weight


@widened
def adamw_step(
    p: Array, g: Array, m: Array, v: Array, hyper: Array, *, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[Array, Array, Array]:
    lr, c1, c2, factor = hyper
    keep, size, root, factor = (t.astype(p.dtype) for t in (1 - lr * weight_decay, lr / c1, jnp.sqrt(c2), factor))
    g = g * factor
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return p * keep - size * (m / (jnp.sqrt(v) / root + eps)), m, v


@widened
def sgd_step(
    p: Array, g: Array, m: Array, hyper: Array, *, momentum: float, weight_decay: float, nesterov: bool
) -> tuple[Array, Array]:
    lr, factor = hyper.astype(p.dtype)
    g = g * factor + weight_decay * p
    m = momentum * m + g
    return p - lr * (g + momentum * m if nesterov else m), m


def squared_norm(x: Array) -> Array:
    return jnp.sum(jnp.square(x.astype(jnp.float64)))


NAMED = (
    unary, binary, binary_scalar, clamp, gelu, gelu_backward, threshold_backward, reduce, arg_reduce, slice_backward,
    split, constant_pad, full, arange, embedding_dense_backward, index_put, sort, top_k, linear, conv2d,
    conv2d_input_grad, conv2d_weight_grad, max_pool2d, max_pool2d_backward, avg_pool2d, avg_pool2d_backward,
    adaptive_avg_pool2d, adaptive_avg_pool2d_backward, layer_norm, layer_norm_input_grad, layer_norm_weight_grad,
    batch_norm, batch_norm_input_grad, batch_norm_weight_grad, softmax, softmax_backward, log_softmax,
    log_softmax_backward, dropout, dropout_backward, cross_entropy, cross_entropy_backward, adamw_step, sgd_step,
    squared_norm,
)  # fmt: skip

OPERATORS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in NAMED},
    "compare": lambda a, b, op: COMPARE[op](a, b),
    "compare_scalar": lambda x, op, scalar: COMPARE[op](x, number(scalar, x.dtype)),
    "logical": lambda a, b, op: LOGICAL[op](a, b),
    "where": jnp.where,
    "cast": lambda x, dtype: convert(x, DTYPES[dtype]),
    "cum_sum": lambda x, dim: jnp.cumsum(x, axis=dim, dtype=x.dtype),
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, dims: x.transpose(dims),
    "expand": lambda x, shape: jnp.broadcast_to(x, shape),
    "detach": lambda x: x,
    "slice": part,
    "cat": lambda *xs, dim: jnp.concatenate(xs, axis=dim),
    "flip": lambda x, dims: jnp.flip(x, axis=tuple(dims)),
    "triangle": lambda x, upper, diagonal: (jnp.triu if upper else jnp.tril)(x, diagonal),
    "embedding": lambda weight, ids, padding_idx: take(weight, slices(weight, ids, 0)),
    "index_select": lambda x, index, dim: take(x, slices(x, index, dim)),
    "index_add": lambda x, index, source, dim: add(x, slices(x, index, dim), source),
    "gather": lambda x, index, dim: take(x, elements(x, index, dim)),
    "scatter_add": lambda x, index, source, dim: add(x, elements(x, index, dim), source),
    "scatter": lambda x, index, source, dim: write(x, elements(x, index, dim), source),
    "index": lambda x, *index, indexed: take(x, advanced(x, index, indexed)),
    "matmul": widened(jnp.matmul),
    "scaled_dot_product_attention": attention,
    "scaled_dot_product_attention_backward": attention_backward,
}
