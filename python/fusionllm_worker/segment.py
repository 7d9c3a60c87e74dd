"""Segments: lists of operators that run without a message in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

#: The size of one element in bytes.
SIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "bool": 1}

#: Numbers that JSON has no literal for.
FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, message: dict[str, Any]) -> TensorType:
        if message["dtype"] not in SIZES:
            raise ValueError(f"there is no element type {message['dtype']}")
        return cls(message["dtype"], tuple(message["shape"]))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Node:
    """One operator of a segment."""

    #: The operator's name.
    name: str
    #: Its attributes by name. For `unary`, `binary`, `compare` and `logical`, `op` is the name of the function.
    attributes: dict[str, Any]
    #: The numbers of its operands.
    inputs: tuple[int, ...]
    #: The numbers of its results.
    results: range


@dataclass(frozen=True)
class Segment:
    """A list of operators. Its values are numbered: first the inputs, then the results of each node in turn."""

    inputs: tuple[TensorType, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    #: The types of all values.
    types: tuple[TensorType, ...]

    @classmethod
    def parse(cls, message: dict[str, Any]) -> Segment:
        types = [TensorType.parse(t) for t in message["inputs"]]
        inputs = tuple(types)
        nodes = []
        for node in message["nodes"]:
            [(name, attributes)] = node["op"].items()
            if isinstance(attributes, str):
                attributes = {"op": attributes}
            attributes = {key: _number(value) for key, value in (attributes or {}).items()}
            first = len(types)
            if not all(0 <= i < first for i in node["inputs"]):
                raise ValueError(f"an operand of {name} is not computed yet")
            types.extend(TensorType.parse(t) for t in node["outputs"])
            nodes.append(Node(name, attributes, tuple(node["inputs"]), range(first, len(types))))
        if not all(0 <= i < len(types) for i in message["outputs"]):
            raise ValueError("an output is not computed")
        return cls(inputs, tuple(nodes), tuple(message["outputs"]), tuple(types))

    @cached_property
    def last_uses(self) -> list[int]:
        """For each value the last node that reads it, or else computes it. For outputs the number of nodes."""
        last = [-1] * len(self.types)
        for number, node in enumerate(self.nodes):
            for value in (*node.inputs, *node.results):
                last[value] = number
        for value in self.outputs:
            last[value] = len(self.nodes)
        return last


def _number(value: Any) -> Any:
    return FLOATS.get(value, value) if isinstance(value, str) else value


class NodeError(Exception):
    """A node of a segment failed."""

    def __init__(self, node: int, reason: Exception) -> None:
        super().__init__(node, reason)
        self.node = node
        self.reason = reason


#: Computes a node's results from its operands: one result, or a tuple of several.
Function = Callable[..., Any]


class Plan:
    """Runs the nodes of a segment one by one, and drops every value after its last use.

    All that can be decided once is decided here, so that little happens per node in :meth:`__call__`.
    """

    def __init__(self, segment: Segment, functions: list[Function]) -> None:
        self.room = [None] * (len(segment.types) - len(segment.inputs))
        self.outputs = segment.outputs
        self.steps: list[tuple[Callable[[list[Any]], None], tuple[int, ...]]] = []
        dead: list[list[int]] = [[] for _ in segment.nodes]
        for value, last in enumerate(segment.last_uses):
            if 0 <= last < len(segment.nodes):
                dead[last].append(value)
        for number, (node, function) in enumerate(zip(segment.nodes, functions)):
            self.steps.append((_step(node, function), tuple(dead[number])))

    def __call__(self, values: list[Any]) -> list[Any]:
        """The outputs of the segment. `values` are its inputs; the list is used up."""
        values.extend(self.room)
        number = 0
        try:
            for step, dead in self.steps:
                step(values)
                for value in dead:
                    values[value] = None
                number += 1
        except Exception as e:
            raise NodeError(number, e) from e
        return [values[value] for value in self.outputs]


def _step(node: Node, function: Function) -> Callable[[list[Any]], None]:
    """Computes a node's results in the list of values."""
    operands, first, end = node.inputs, node.results.start, node.results.stop
    if end != first + 1:

        def step(values: list[Any]) -> None:
            values[first:end] = function(*[values[i] for i in operands])

    elif len(operands) == 1:
        [a] = operands

        def step(values: list[Any]) -> None:
            values[first] = function(values[a])

    elif len(operands) == 2:
        a, b = operands

        def step(values: list[Any]) -> None:
            values[first] = function(values[a], values[b])

    else:

        def step(values: list[Any]) -> None:
            values[first] = function(*[values[i] for i in operands])

    return step
