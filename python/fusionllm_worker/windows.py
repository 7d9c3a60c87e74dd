"""The windows of convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence

#: Vertical and horizontal.
Pair = Sequence[int]


def windows(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool = False) -> tuple[int, int]:
    """The number of windows along one side, and how far the last one reaches beyond the padded operand."""
    extent = dilation * (kernel - 1) + 1
    steps = n + 2 * padding - extent
    count = (-(-steps // stride) if ceil else steps // stride) + 1
    # A window must start inside the operand or its left padding.
    if ceil and (count - 1) * stride >= n + padding:
        count -= 1
    return count, max(0, (count - 1) * stride - steps)


def pool(input: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool) -> tuple[Pair, Pair]:
    """The size of a pool's result, and how far the last windows reach beyond the padded operand."""
    sides = zip(input, kernel, stride, padding, dilation)
    size, beyond = zip(*(windows(*side, ceil_mode) for side in sides))
    return size, beyond
