"""What a segment allows: which operands may be overwritten, which outputs need memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch import Tensor

from fusionllm_worker import Segment
from fusionllm_worker.segment import Node

#: Optimiser steps, which PyTorch runs for many parameters at once.
STEPS = ("adamw_step", "sgd_step")


def grouped(segment: Segment) -> tuple[Segment, list[int]]:
    """The segment with runs of equal optimiser steps as one node each, and the place of each node in the original.

    A joint node has the operands of all its steps, one step after another, and so their results.
    """
    nodes: list[Node] = []
    places: list[int] = []
    for place, node in enumerate(segment.nodes):
        if nodes and can_join(segment, nodes[-1], node):
            first = nodes[-1]
            results = range(first.results.start, node.results.stop)
            nodes[-1] = Node(node.name, node.attributes, first.inputs + node.inputs, results)
        else:
            nodes.append(node)
            places.append(place)
    return Segment(segment.inputs, tuple(nodes), segment.outputs, segment.types), places


def can_join(segment: Segment, a: Node, b: Node) -> bool:
    """Whether `b` is another step like `a`, with the same element type and `hyper` operand, and does not read `a`."""
    return (
        a.name == b.name
        and a.name in STEPS
        and a.attributes == b.attributes
        and a.inputs[-1] == b.inputs[-1]
        and segment.types[a.inputs[0]].dtype == segment.types[b.inputs[0]].dtype
        and not set(a.results) & set(b.inputs)
    )


class Memory:
    """Which values of a segment share memory. `freed` are the inputs that the segment may overwrite."""

    def __init__(self, segment: Segment, freed: Set[int]) -> None:
        self.segment = segment
        self.freed = freed
        #: For each value the one whose memory it uses, as far as it can be told in advance.
        self.owners = list(range(len(segment.types)))
        for node in segment.nodes:
            if is_view(segment, node):
                for result in node.results:
                    self.owners[result] = self.owners[node.inputs[0]]

    def own(self, value: int) -> bool:
        """Whether the value's memory is the segment's own: no tensor outside uses it."""
        owner = self.owners[value]
        return owner >= len(self.segment.inputs) or owner in self.freed

    def writable(self, number: int) -> frozenset[int]:
        """The operands of a node, by position, that it may overwrite: nothing reads them, or a view of them, later."""
        inputs, last = self.segment.nodes[number].inputs, self.segment.last_uses
        return frozenset(
            position
            for position, value in enumerate(inputs)
            if last[value] == number
            and self.own(value)
            and self.owners.count(self.owners[value]) == 1
            and inputs.count(value) == 1
        )

    def finish(self) -> list[Callable[[Tensor], Tensor]]:
        """For each output what makes it row-major, in memory of its own that is no larger than it."""
        finish: list[Callable[[Tensor], Tensor]] = []
        taken: set[int] = set()
        types = self.segment.types
        for value in self.segment.outputs:
            owner = self.owners[value]
            shared = not self.own(value) or owner in taken or types[value].nbytes < types[owner].nbytes
            finish.append(copy if shared else Tensor.contiguous)
            taken.add(owner)
        return finish


def copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def is_view(segment: Segment, node: Node) -> bool:
    """Whether the results of a node may use the memory of its first operand."""
    match node.name:
        case "reshape" | "permute" | "expand" | "detach" | "slice" | "split":
            return True
        case "cast":
            return segment.types[node.inputs[0]].dtype == node.attributes["dtype"]
        case "reduce":
            return not node.attributes["dims"]
        case _:
            return False
