"""Attention: PyTorch's kernels where they fit, and otherwise matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionllm_torch.operators import Call, aten, operator, wide
from fusionllm_worker.segment import Function

HALF = ("f16", "bf16")


def kernel(call: Call, q: int, forward: dict[str, Any]) -> str:
    """The kernel for operands `q`, `k` and `v` that begin at position `q`: `cpu`, `flash`, `efficient` or `math`."""
    query, key, value = call.operands[q : q + 3]
    masked = len(call.operands) > (4 if q == 0 else 6)
    if query.shape[3] != value.shape[3] or 0 in (*query.shape, *key.shape):
        return "math"
    if call.device.is_cpu:
        return "cpu"
    # The kernels read 16 bytes at a time.
    if call.device.is_cuda and not masked and query.dtype in ("f32", *HALF) and query.shape[3] % 8 == 0:
        # In the former, the last query reads all keys, whatever their numbers.
        aligned = not forward["is_causal"] or query.shape[2] == key.shape[2]
        return "flash" if query.dtype in HALF and aligned and query.shape[3] <= 256 else "efficient"
    return "math"


def repeated(x: Tensor, heads: int) -> Tensor:
    """`[B, G, S, E]` as `[B, H, S, E]`: each query head gets its key head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def gathered(x: Tensor, groups: int) -> Tensor:
    """Sums over the query heads that read the same key head: from `[B, H, S, E]` to `[B, G, S, E]`."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, x.shape[1] // groups)).sum(2)


def bias_of(mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool) -> Tensor | None:
    """Mask and causality as numbers to add to the scores, `[.., L, S]`. None if there is no mask."""
    if mask is None:
        return None
    size = q.shape[2], k.shape[2]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    mask = mask.expand(*(1,) * (4 - max(mask.ndim, 2)), *mask.shape[:-2], *size)
    if is_causal:
        mask = mask.masked_fill(torch.ones(size, dtype=torch.bool, device=q.device).triu_(1), -math.inf)
    return mask.contiguous()


def scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """`scale q kᵀ + bias`, with minus infinity for keys that take no part: `[B, H, L, S]`."""
    s = (q * scale) @ k.transpose(2, 3)
    if bias is not None:
        return s + bias
    if is_causal:
        s = s.masked_fill_(torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu_(1), -math.inf)
    return s


@operator
def scaled_dot_product_attention(call: Call) -> Function:
    causal, scale, dtype = call["is_causal"], call["scale"], call.dtype
    chosen = kernel(call, 0, call.attributes)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k, v, bias = repeated(k, q.shape[1]), repeated(v, q.shape[1]), bias_of(mask, q, k, causal)
        match chosen:
            case "cpu":
                out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                    q, k, v, 0.0, causal and bias is None, attn_mask=bias, scale=scale
                )
                if bias is not None:
                    # The kernel does not tell which queries see no key.
                    blind = (bias == -math.inf).all(3)
                    out, lse = out.masked_fill(blind.unsqueeze(3), 0), lse.masked_fill(blind, -math.inf)
            case "flash":
                out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
            case "efficient":
                out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                    q, k, v, None, True, 0.0, causal, scale=scale
                )
                lse = lse[:, :, : q.shape[2]]
            case _:
                s = scores(wide(q), wide(k), bias, causal, scale)
                lse = s.logsumexp(3)
                out = s.sub_(finite(lse).unsqueeze(3)).exp_() @ wide(v)
        return out.to(dtype), lse

    return attend


def finite(lse: Tensor) -> Tensor:
    """0 for queries without keys, whose weights so are exp(-∞ - 0) = 0 instead of NaN."""
    return lse.masked_fill(lse == -math.inf, 0)


@operator
def scaled_dot_product_attention_backward(call: Call) -> Function:
    forward = call["forward"]
    causal, scale = forward["is_causal"], forward["scale"]
    groups, dtype, chosen = call.operands[2].shape[1], call.dtype, kernel(call, 1, forward)

    def gradients(
        g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        k, v, bias = repeated(k, q.shape[1]), repeated(v, q.shape[1]), bias_of(mask, q, k, causal)
        # What the kernels return beside the results is of no use without dropout.
        unused = torch.empty((), dtype=torch.int64, device=q.device) if chosen in ("flash", "efficient") else None
        match chosen:
            case "cpu":
                lse = wide(finite(lse))
                dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g, q, k, v, out, lse, 0.0, causal and bias is None, attn_mask=bias, scale=scale
                )
            case "flash":
                size = q.shape[2], k.shape[2]
                dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                    g, q, k, v, out, lse.float(), None, None, *size, 0.0, causal, unused, unused, scale=scale
                )
            case "efficient":
                lse = F.pad(lse.float(), [0, -q.shape[2] % 32], value=math.inf)
                dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
                    g, q, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
                )
            case _:
                g, q, k, v, out = (wide(t) for t in (g, q, k, v, out))
                p = scores(q, k, bias, causal, scale).sub_(finite(wide(lse)).unsqueeze(3)).exp_()
                dv = p.transpose(2, 3) @ g
                ds = (g @ v.transpose(2, 3)).sub_((g * out).sum(3, keepdim=True)).mul_(p).mul_(scale)
                dq, dk = ds @ k, ds.transpose(2, 3) @ q
        return tuple(t.to(dtype) for t in (dq, gathered(dk, groups), gathered(dv, groups)))

    return gradients
