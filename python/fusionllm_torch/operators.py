"""Every operator as PyTorch's kernels of the same name.

A function here takes a :class:`Call`, all that is known of a node before it runs, and returns the function of its
operands. So what can be decided once is, and no more than a call of PyTorch is left for each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionllm_torch.device import DTYPES, Device
from fusionllm_worker import TensorType
from fusionllm_worker.segment import Function

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """A node whose function is wanted."""

    attributes: dict[str, Any]
    operands: list[TensorType]
    results: list[TensorType]
    #: The operands, by position, that may be overwritten.
    writable: frozenset[int]
    device: Device

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes[attribute]

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the first operand."""
        return DTYPES[self.operands[0].dtype]


OPERATORS: dict[str, Callable[[Call], Function]] = {}


def operator(build: Callable[[Call], Function]) -> Callable[[Call], Function]:
    """Adds an operator. A trailing underscore keeps its name apart from a builtin."""
    OPERATORS[build.__name__.rstrip("_")] = build
    return build


def simple(**functions: Callable[..., Any]) -> None:
    """Adds operators whose functions take the attributes as keyword arguments."""
    for name, function in functions.items():
        OPERATORS[name] = lambda call, function=function: partial(function, **call.attributes)


# Element by element


def scalar(value: float, dtype: torch.dtype) -> float | int | bool:
    """A number as an element type has it: floats become integers by truncation, limited to the range."""
    if dtype == torch.bool:
        return value != 0
    if dtype.is_floating_point:
        return value
    limits = torch.iinfo(dtype)
    return 0 if math.isnan(value) else int(min(max(value, limits.min), limits.max))


UNARY = {
    **{name: getattr(torch, name) for name in ("neg", "abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "sin")},
    **{name: getattr(torch, name) for name in ("reciprocal", "cos", "tanh", "sigmoid", "erf", "floor", "ceil")},
    **{name: getattr(torch, name) for name in ("sign", "round", "trunc", "relu", "logical_not")},
    "silu": F.silu,
    # Beyond 40, ln(1 + exp(x)) is x in f64, too.
    "softplus": partial(F.softplus, threshold=40.0),
}


@operator
def unary(call: Call) -> Function:
    name = call["op"]
    if call.writable:
        in_place = getattr(torch, f"{name}_", None) or getattr(Tensor, f"{name}_", None)
        return in_place or UNARY[name]
    return UNARY[name]


BINARY = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "fmod")},
    **{name: getattr(torch, name) for name in ("remainder", "floor_divide")},
}
IN_PLACE = {"add": Tensor.add_, "sub": Tensor.sub_, "mul": Tensor.mul_, "div": Tensor.div_}


@operator
def binary(call: Call) -> Function:
    name = call["op"]
    if name in ("fmod", "remainder", "floor_divide") and not call.dtype.is_floating_point:
        divide, nonzero = BINARY[name], call.device.nonzero
        return lambda a, b: divide(a, nonzero(b))
    if in_place := IN_PLACE.get(name):
        fits = [i for i in sorted(call.writable) if call.operands[i] == call.results[0]]
        if 0 in fits:
            return in_place
        if 1 in fits and name in ("add", "mul"):
            return lambda a, b: in_place(b, a)
    return BINARY[name]


@operator
def binary_scalar(call: Call) -> Function:
    name, reverse = call["op"], call["reverse"]
    value = scalar(call["scalar"], call.dtype)
    if name in IN_PLACE and not reverse:
        function = IN_PLACE[name] if call.writable else BINARY[name]
        return lambda x: function(x, value)
    if name in ("add", "mul"):
        return lambda x: BINARY[name](x, value)
    if name == "maximum":
        return lambda x: torch.clamp_min(x, value)
    if name == "minimum":
        return lambda x: torch.clamp_max(x, value)
    function = BINARY[name]
    if not reverse:
        return lambda x: function(x, value)
    left = torch.full((), value, dtype=call.dtype, device=call.device.place(call.dtype))
    if name in ("fmod", "remainder", "floor_divide") and not call.dtype.is_floating_point:
        nonzero = call.device.nonzero
        return lambda x: function(left, nonzero(x))
    return lambda x: function(left, x)


simple(
    compare=lambda a, b, op: getattr(torch, op)(a, b),
    logical=lambda a, b, op: getattr(torch, f"logical_{op}")(a, b),
    where=torch.where,
    gelu=aten.gelu.default,
    gelu_backward=aten.gelu_backward.default,
    threshold_backward=aten.threshold_backward.default,
)


@operator
def compare_scalar(call: Call) -> Function:
    function, value = getattr(torch, call["op"]), scalar(call["scalar"], call.dtype)
    return lambda x: function(x, value)


@operator
def clamp(call: Call) -> Function:
    low, high = (
        None if (bound := call.attributes.get(side)) is None else scalar(bound, call.dtype) for side in ("min", "max")
    )
    return lambda x: torch.clamp(x, low, high)


@operator
def cast(call: Call) -> Function:
    dtype = DTYPES[call["dtype"]]
    device = call.device.place(dtype)
    if call.dtype.is_floating_point and dtype in (torch.int64, torch.int32):
        # PyTorch leaves open what becomes of NaN and of numbers beyond the range. The bound is a float of every type
        # but f16, whose numbers are all below; the largest integer is none, so it is filled in.
        bound, limits = 2.0 ** (8 * dtype.itemsize - 1), torch.iinfo(dtype)

        def to_integer(x: Tensor) -> Tensor:
            inside = torch.where(x.abs() < bound, x, 0).to(device, dtype)
            return inside.masked_fill_(x >= bound, limits.max).masked_fill_(x <= -bound, limits.min)

        return to_integer
    return lambda x: x.to(device, dtype)


# Reductions


@operator
def reduce(call: Call) -> Function:
    kind, dims, keepdim = call["kind"], call["dims"], call["keepdim"]
    if not dims:
        # For PyTorch, no dimensions are all.
        return lambda x: x
    if kind == "prod":

        def product(x: Tensor) -> Tensor:
            for dim in reversed(dims):
                x = torch.prod(x, dim, keepdim, dtype=x.dtype)
            return x

        return product
    function = getattr(torch, kind)
    if kind == "sum":
        function = partial(function, dtype=call.dtype)
    return lambda x: function(x, dims, keepdim)


simple(
    arg_reduce=lambda x, largest, dim, keepdim: (torch.argmax if largest else torch.argmin)(x, dim, keepdim),
    cum_sum=lambda x, dim: torch.cumsum(x, dim, dtype=x.dtype),
)


# Views and moves


simple(
    reshape=torch.reshape,
    permute=torch.permute,
    expand=lambda x, shape: x.expand(shape),
    detach=lambda x: x,
    cat=lambda *xs, dim: torch.cat(xs, dim),
    flip=torch.flip,
    triangle=lambda x, upper, diagonal: (torch.triu if upper else torch.tril)(x, diagonal),
)


def bounds(slice: dict[str, int], size: int) -> tuple[int, int, int, int]:
    """Dimension, start, end and step of a slice. A step larger than all indices does not fit PyTorch's integers."""
    return slice["dim"], slice["start"], slice["end"], min(slice["step"], max(size, 1))


@operator
def slice_(call: Call) -> Function:
    dim, start, end, step = bounds(call.attributes, call.operands[0].shape[call["dim"]])
    return lambda x: aten.slice.Tensor(x, dim, start, end, step)


@operator
def slice_backward(call: Call) -> Function:
    shape, slice = call.results[0].shape, bounds(call["slice"], call["size"])
    return lambda g: aten.slice_backward(g, shape, *slice)


@operator
def split(call: Call) -> Function:
    dim, sizes = call["dim"], call["sizes"]
    if len(sizes) == 1:
        return lambda x: x
    return lambda x: torch.split(x, sizes, dim)


@operator
def constant_pad(call: Call) -> Function:
    value = scalar(call["value"], call.dtype)
    # PyTorch begins with the last dimension.
    sides = [side for pair in reversed(call["pads"]) for side in pair]
    if not sides:
        return torch.clone
    return lambda x: torch.constant_pad_nd(x, sides, value)


@operator
def full(call: Call) -> Function:
    dtype = DTYPES[call["ty"]["dtype"]]
    shape, value, device = call["ty"]["shape"], scalar(call["value"], dtype), call.device.place(dtype)
    return lambda: torch.full(shape, value, dtype=dtype, device=device)


@operator
def arange(call: Call) -> Function:
    dtype = DTYPES[call["dtype"]]
    numbers = (call["start"] + call["step"] * torch.arange(call["len"], dtype=torch.float64)).to(dtype)
    numbers = numbers.to(call.device.place(dtype))
    return lambda: numbers.clone()


# Addresses given by integer tensors


@operator
def embedding(call: Call) -> Function:
    size, checked = call.operands[0].shape[0], call.device.checked
    return lambda weight, ids: torch.embedding(weight, checked(ids, size))


@operator
def embedding_dense_backward(call: Call) -> Function:
    size, padding, checked = call["num_weights"], call["padding_idx"], call.device.checked
    padding = -1 if padding is None else padding
    return lambda g, ids: aten.embedding_dense_backward(g, checked(ids, size), size, padding, False)


@operator
def index_select(call: Call) -> Function:
    dim, checked = call["dim"], call.device.checked
    size = call.operands[0].shape[dim]
    return lambda x, index: torch.index_select(x, dim, checked(index, size))


@operator
def index_add(call: Call) -> Function:
    dim, checked = call["dim"], call.device.checked
    size, function = call.operands[0].shape[dim], Tensor.index_add_ if 0 in call.writable else torch.index_add
    return lambda x, index, source: function(x, dim, checked(index, size), source)


@operator
def gather(call: Call) -> Function:
    dim, checked = call["dim"], call.device.checked
    size = call.operands[0].shape[dim]
    return lambda x, index: torch.gather(x, dim, checked(index, size))


@operator
def scatter_add(call: Call) -> Function:
    dim, checked = call["dim"], call.device.checked
    size, function = call.operands[0].shape[dim], Tensor.scatter_add_ if 0 in call.writable else torch.scatter_add
    return lambda x, index, source: function(x, dim, checked(index, size), source)


@operator
def scatter(call: Call) -> Function:
    dim, checked = call["dim"], call.device.checked
    size = call.operands[0].shape[dim]
    if call.device.is_cpu:
        return lambda x, index, source: torch.scatter(x, dim, checked(index, size), source)
    if not math.prod(call.operands[1].shape):
        # CUDA's kernel refuses an empty index.
        return lambda x, index, source: x.clone()

    def last_write(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        # Of several writes to one place, a parallel device keeps any. So each place first learns which is the last.
        index = checked(index, size)
        order = torch.arange(source.numel(), device=source.device).view(source.shape)
        last = torch.full(x.shape, -1, device=x.device).scatter_reduce_(dim, index, order, "amax")
        return torch.where(last < 0, x, source.reshape(-1)[last.clamp_(0)])

    return last_write


def advanced(call: Call) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
    """From index operands to the argument of PyTorch's advanced indexing."""
    sizes = [n if marked else None for n, marked in zip(call.operands[0].shape, call["indexed"])]
    checked = call.device.checked

    def places(index: Sequence[Tensor]) -> list[Tensor | None]:
        given = iter(index)
        return [None if n is None else checked(next(given), n) for n in sizes]

    return places


@operator
def index(call: Call) -> Function:
    places = advanced(call)
    return lambda x, *index: aten.index.Tensor(x, places(index))


@operator
def index_put(call: Call) -> Function:
    places, accumulate = advanced(call), call["accumulate"]
    return lambda x, values, *index: aten.index_put(x, places(index), values, accumulate)


@operator
def sort(call: Call) -> Function:
    dim, descending = call["dim"], call["descending"]
    return lambda x: torch.sort(x, dim=dim, descending=descending, stable=True)


@operator
def top_k(call: Call) -> Function:
    k, dim, largest = call["k"], call["dim"], call["largest"]

    def best(x: Tensor) -> tuple[Tensor, Tensor]:
        # PyTorch's own does not keep the order of equal elements.
        values, at = torch.sort(x, dim=dim, descending=largest, stable=True)
        return values.narrow(dim, 0, k).contiguous(), at.narrow(dim, 0, k).contiguous()

    return best


# Products, convolutions and pools


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """A product whose bits do not depend on how its operands lie in memory."""

    def plain(x: Tensor) -> Tensor:
        # The stride of a dimension of one element means nothing, but PyTorch chooses its kernel by it.
        return x.clone(memory_format=torch.contiguous_format) if 1 in x.shape[-2:] else x

    return torch.matmul(plain(a), plain(b))


simple(matmul=matmul, linear=F.linear)


def convolution(conv: dict[str, Any]) -> tuple[Any, ...]:
    """The attributes of a convolution as ATen takes them."""
    return conv["stride"], conv["padding"], conv["dilation"], False, [0, 0], conv["groups"]


def padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    return F.pad(x, [padding[1], padding[1], padding[0], padding[0]])


@operator
def conv2d(call: Call) -> Function:
    attributes = convolution(call.attributes)
    if 0 in call.operands[0].shape[2:]:
        # ATen takes no empty planes, even if padding fills them.
        padding = call["padding"]
        attributes = convolution({**call.attributes, "padding": [0, 0]})
        return lambda x, weight, bias=None: aten.convolution(padded(x, padding), weight, bias, *attributes)
    return lambda x, weight, bias=None: aten.convolution(x, weight, bias, *attributes)


@operator
def conv2d_input_grad(call: Call) -> Function:
    shape, attributes = call.results[0].shape, convolution(call["conv"])

    def gradient(g: Tensor, weight: Tensor) -> Tensor:
        # Of the operand, only the shape matters.
        return aten.convolution_backward(g, g.new_empty(shape), weight, None, *attributes, [True, False, False])[0]

    return gradient


@operator
def conv2d_weight_grad(call: Call) -> Function:
    shape, attributes = call.results[0].shape, convolution(call["conv"])
    if 0 in call.operands[1].shape[2:]:
        return lambda g, x: g.new_zeros(shape)

    def gradient(g: Tensor, x: Tensor) -> Tensor:
        return aten.convolution_backward(g, x, g.new_empty(shape), None, *attributes, [False, True, False])[1]

    return gradient


simple(
    max_pool2d=lambda x, kernel, stride, padding, dilation, ceil_mode: aten.max_pool2d_with_indices(
        x, kernel, stride, padding, dilation, ceil_mode
    ),
    avg_pool2d=lambda x, kernel, **pool: aten.avg_pool2d(x, kernel, **pool),
    adaptive_avg_pool2d=lambda x, output: aten._adaptive_avg_pool2d(x, output),
)


@operator
def max_pool2d_backward(call: Call) -> Function:
    shape, checked = call.results[0].shape, call.device.checked
    n = math.prod(shape[2:])

    def gradient(g: Tensor, at: Tensor) -> Tensor:
        planes = g.new_zeros(shape[0] * shape[1], n)
        planes.scatter_add_(1, checked(at, n).flatten(2).flatten(0, 1), g.flatten(2).flatten(0, 1))
        return planes.view(shape)

    return gradient


@operator
def avg_pool2d_backward(call: Call) -> Function:
    shape, pool = call.results[0].shape, call["pool"]
    attributes = [pool[key] for key in ("kernel", "stride", "padding", "ceil_mode", "count_include_pad")]
    return lambda g: aten.avg_pool2d_backward(g, g.new_empty(shape), *attributes, None)


@operator
def adaptive_avg_pool2d_backward(call: Call) -> Function:
    shape = call.results[0].shape
    if not math.prod(call.operands[0].shape):
        return lambda g: g.new_zeros(shape)
    if call.device.is_cpu:
        return lambda g: aten._adaptive_avg_pool2d_backward(g, g.new_empty(shape))
    # Where windows overlap, CUDA's kernel adds in any order. Products with the windows' weights have one order.
    dtype = DTYPES[call.operands[0].dtype]
    wide = torch.promote_types(dtype, torch.float32)
    rows, columns = (
        window_weights(n, size).to(call.device.torch, wide) for n, size in zip(shape[2:], call.operands[0].shape[2:])
    )
    return lambda g: (rows @ g.to(wide) @ columns.T).to(dtype)


def window_weights(n: int, size: int) -> Tensor:
    """The weight of each of `n` elements in each of `size` windows of an adaptive average, as `[n, size]`."""
    weights = torch.zeros(n, size, dtype=torch.float64)
    for window in range(size):
        first, end = window * n // size, -(-(window + 1) * n // size)
        weights[first:end, window] = 1 / (end - first)
    return weights


# Normalisation and softmax


@operator
def layer_norm(call: Call) -> Function:
    x = call.operands[0]
    shape, eps, dtype = x.shape[len(x.shape) - call["dims"] :], call["eps"], call.dtype

    def normalise(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        return y, mean.to(dtype), rstd.to(dtype)

    return normalise


def statistics(t: Tensor) -> Tensor:
    """Statistics as backward kernels want them: those of half precision in single."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) and not t.is_cpu else t


@operator
def layer_norm_input_grad(call: Call) -> Function:
    x = call.operands[1]
    shape = x.shape[len(x.shape) - call["dims"] :]

    def gradient(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None) -> Tensor:
        mean, rstd = statistics(mean), statistics(rstd)
        return aten.native_layer_norm_backward(g, x, shape, mean, rstd, weight, None, [True, False, False])[0]

    return gradient


@operator
def layer_norm_weight_grad(call: Call) -> Function:
    shape = call.results[0].shape

    def gradient(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        # Of weight and bias, only the shape matters.
        any, mean, rstd = x.new_empty(shape), statistics(mean), statistics(rstd)
        return aten.native_layer_norm_backward(g, x, shape, mean, rstd, any, any, [False, True, True])[1:]

    return gradient


@operator
def batch_norm(call: Call) -> Function:
    momentum, eps, dtype = call["momentum"], call["eps"], call.dtype

    def normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        results = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, momentum, eps)
        return tuple(t.to(dtype) for t in results)

    return normalise


@operator
def batch_norm_input_grad(call: Call) -> Function:
    def gradient(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
        mean, rstd, wanted = statistics(mean), statistics(rstd), [True, False, False]
        return aten.native_batch_norm_backward(g, x, weight, None, None, mean, rstd, True, 0.0, wanted)[0]

    return gradient


@operator
def batch_norm_weight_grad(call: Call) -> Function:
    dtype = call.dtype

    def gradient(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        any, wanted = torch.empty_like(mean), [False, True, True]
        mean, rstd = statistics(mean), statistics(rstd)
        _, dw, db = aten.native_batch_norm_backward(g, x, any, None, None, mean, rstd, True, 0.0, wanted)
        return dw.to(dtype), db.to(dtype)

    return gradient


simple(
    softmax=lambda x, dim: torch._softmax(x, dim, False),
    log_softmax=lambda x, dim: torch._log_softmax(x, dim, False),
    softmax_backward=lambda g, y, dim: torch._softmax_backward_data(g, y, dim, y.dtype),
    log_softmax_backward=lambda g, y, dim: torch._log_softmax_backward_data(g, y, dim, y.dtype),
)


# Training


MASK = 0xFFFFFFFF


def philox(counter: Tensor, stream: int, key: Tensor) -> Tensor:
    """Philox-4x32 with 10 rounds: four 32-bit numbers for each of `n` counters, `[n, 4]`, as i64.

    Products wrap around at 64 bits, signed or not, and masks clear what a signed shift leaves.
    """
    c: list[Any] = [counter & MASK, counter >> 32, stream & MASK, stream >> 32]
    k0, k1 = key & MASK, key >> 32 & MASK
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [c[1] ^ k0 ^ (q >> 32 & MASK), q & MASK, c[3] ^ k1 ^ (p >> 32 & MASK), p & MASK]
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return torch.stack(torch.broadcast_tensors(*c), 1)


@operator
def dropout(call: Call) -> Function:
    shape, p, stream = call.operands[0].shape, call["p"], call["stream"]
    n, device = math.prod(shape), call.device.torch
    # An element is kept if its 24 random bits, as a number in [0, 1), are at least p.
    threshold = math.ceil(p * 2**24)

    def drop(x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        # The processor takes a few counters at a time, so that the intermediate numbers stay in its cache. Compiled,
        # there are none.
        part = 1 << 15 if call.device.reads else max(n, 1)
        counters = torch.arange(-(-n // 4), device=device).split(part)
        kept = [philox(counter, stream, key).view(-1) >> 8 >= threshold for counter in counters]
        mask = torch.cat(kept)[:n].view(shape)
        return aten.native_dropout_backward(x, mask, 1 / (1 - p)), mask

    return drop


simple(dropout_backward=lambda g, mask, scale: torch.where(mask, g * scale, 0))


def wide(x: Tensor) -> Tensor:
    """Half precision in single."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def targets(call: Call, logits: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """From targets to: which count, the targets with 0 for the others, and the number that count."""
    ignore, checked, size = call["ignore_index"], call.device.checked, call.operands[logits].shape[1]

    def counted(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = target != ignore
        return counts, checked(torch.where(counts, target, 0), size), counts.sum()

    return counted


@operator
def cross_entropy(call: Call) -> Function:
    counted, dtype = targets(call, 0), call.dtype

    def loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = wide(logits)
        counts, index, total = counted(target)
        lse = torch.logsumexp(logits, 1)
        each = lse - logits.gather(1, index.unsqueeze(1)).squeeze(1)
        return (torch.where(counts, each, 0).sum() / total).to(dtype), lse.to(dtype)

    return loss


@operator
def cross_entropy_backward(call: Call) -> Function:
    counted, dtype, reuse = targets(call, 1), call.dtype, 1 in call.writable

    def gradient(g: Tensor, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
        counts, index, total = counted(target)
        weight = torch.where(counts, wide(g) / total, 0).unsqueeze(1)
        logits, lse = wide(logits), wide(lse).unsqueeze(1)
        p = (logits.sub_(lse) if reuse else logits - lse).exp_()
        return p.mul_(weight).scatter_add_(1, index.unsqueeze(1), -weight).to(dtype)

    return gradient


def own(call: Call, position: int, x: Tensor) -> Tensor:
    """An operand to overwrite: itself, if that is allowed, or a copy."""
    return x.contiguous() if position in call.writable else x.clone(memory_format=torch.contiguous_format)


def columns(call: Call, count: int, operands: Sequence[Tensor]) -> list[list[Tensor]]:
    """The operands of several optimiser steps as lists: parameters, gradients, and so on.

    All but the gradients may be overwritten.
    """
    lists = [[*operands[i::count]] for i in range(count - 1)]
    for i, tensors in enumerate(lists):
        take = (lambda at, x: x.contiguous()) if i == 1 else partial(own, call)
        lists[i] = [take(j * count + i, x) for j, x in enumerate(tensors)]
    return lists


def scaled(gradients: list[Tensor], factor: float) -> list[Tensor]:
    return gradients if factor == 1 else list(torch._foreach_mul(gradients, factor))


def interleaved(*lists: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x for step in zip(*lists) for x in step)


@operator
def adamw_step(call: Call) -> Function:
    beta1, beta2, eps, decay = (call[name] for name in ("beta1", "beta2", "eps", "weight_decay"))
    # PyTorch's kernel corrects for the number of steps. After infinitely many there is nothing to correct, so that the
    # corrections of `hyper` can be part of the learning rate and of eps.
    done = torch.full((), math.inf, device=call.device.torch)

    def step(*operands: Tensor) -> tuple[Tensor, ...]:
        lr, c1, c2, factor = call.device.numbers(operands[-1])
        p, g, m, v = columns(call, 5, operands)
        root = math.sqrt(c2)
        torch._fused_adamw_(
            p,
            scaled(g, factor),
            m,
            v,
            [],
            [done] * len(p),
            lr=lr * root / c1,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay * c1 / root,
            eps=eps * root,
            amsgrad=False,
            maximize=False,
        )
        return interleaved(p, m, v)

    return step


@operator
def sgd_step(call: Call) -> Function:
    momentum, decay, nesterov = (call[name] for name in ("momentum", "weight_decay", "nesterov"))

    def step(*operands: Tensor) -> tuple[Tensor, ...]:
        lr, factor = call.device.numbers(operands[-1])
        p, g, m = columns(call, 4, operands)
        g = scaled(g, factor)
        if decay:
            g = list(torch._foreach_add(g, p, alpha=decay))
        torch._foreach_mul_(m, momentum)
        torch._foreach_add_(m, g)
        torch._foreach_add_(p, torch._foreach_add(g, m, alpha=momentum) if nesterov else m, alpha=-lr)
        return interleaved(p, m)

    return step


@operator
def squared_norm(call: Call) -> Function:
    if call.device.place(torch.float64) != call.device.torch:
        return lambda x: torch.linalg.vector_norm(x).to("cpu", torch.float64).square()
    return lambda x: torch.linalg.vector_norm(x, dtype=torch.float64).square()
