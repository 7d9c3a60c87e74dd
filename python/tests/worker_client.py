"""A peer for tests: starts a worker, and speaks the protocol with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: JSON objects of the protocol.
Op = dict[str, Any]
Node = dict[str, Any]
Type = dict[str, Any]

ROOT = Path(__file__).parents[1]

DTYPES = {"f64": "f8", "f32": "f4", "i64": "i8", "i32": "i4", "bool": "?"}
NAMES = {np.dtype(code): name for name, code in DTYPES.items()}


#: How long a worker may take to end, in seconds. Where it does not, the test fails instead of waiting for ever.
PATIENCE = 300


class WorkerError(Exception):
    """A worker's answer that it could not carry out a request."""


def type_of(array: np.ndarray) -> Type:
    return {"dtype": NAMES[array.dtype], "shape": list(array.shape)}


class Peer:
    """A worker process, and the types of its tensors by number."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        )
        self.bytes = np.zeros(0, np.uint8)
        self.numbers = 0
        self.types: dict[int, Type] = {}

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()
        self.process.stderr.close()

    def end(self) -> tuple[int, str]:
        """The exit status of a worker that ends by itself, and what it said."""
        return self.process.wait(PATIENCE), self.process.stderr.read().decode()

    def number(self) -> int:
        """A number not used before."""
        self.numbers += 1
        return self.numbers

    def write(self, line: bytes) -> None:
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next message that is more than a sign of life."""
        while (message := json.loads(self.process.stdout.readline())) == {"alive": {}}:
            pass
        return message

    def start(self, protocol: int = 2) -> dict[str, Any]:
        """Greets the worker, and returns its hello."""
        hello = self.read()["hello"]
        self.write(json.dumps({"start": {"protocol": protocol}}).encode())
        return hello

    def forget(self, *segments: int) -> None:
        """Tells the worker of segments that will not run any more. It does not answer."""
        self.write(json.dumps({"forget": {"segments": segments}}).encode())

    def request(self, kind: str, **body: Any) -> dict[str, Any]:
        """What the worker answers. Its errors are raised."""
        self.write(json.dumps({kind: body}).encode())
        message = self.read()
        if "error" in message:
            raise WorkerError(message["error"])
        return message["done"]

    def room(self, size: int) -> np.ndarray:
        """The first bytes of an exchange file that has at least so many."""
        if size > len(self.bytes):
            with tempfile.NamedTemporaryFile() as file:
                file.truncate(2 * size)
                self.bytes = np.memmap(file.name, np.uint8, "r+")
                self.request("exchange", path=file.name, bytes=2 * size)
        return self.bytes[:size]

    def upload(self, array: np.ndarray) -> int:
        number = self.number()
        self.room(array.nbytes)[:] = np.frombuffer(array.tobytes(), np.uint8)
        self.types[number] = type_of(array)
        self.request("upload", tensor=number, type=self.types[number], at=0)
        return number

    def download(self, number: int) -> np.ndarray:
        type = self.types[number]
        array = np.empty(type["shape"], DTYPES[type["dtype"]])
        data = self.room(array.nbytes)
        assert self.request("download", tensor=number, at=0) == {"type": type}
        return np.frombuffer(data.tobytes(), array.dtype).reshape(array.shape)

    def run(self, nodes: list[Node], inputs: list[int], outputs: list[int], free: Sequence[int] = ()) -> list[int]:
        """Prepares a segment and runs it once."""
        segment, types = self.number(), [self.types[i] for i in inputs]
        self.request("prepare", segment=segment, inputs=types, nodes=nodes, outputs=outputs)
        types += [type for node in nodes for type in node["outputs"]]
        results = [self.number() for _ in outputs]
        self.request("run", segment=segment, inputs=inputs, outputs=results, free=list(free))
        self.types.update(zip(results, (types[i] for i in outputs)))
        return results

    def apply(self, op: Op, operands: Sequence[np.ndarray], results: list[Type]) -> list[np.ndarray]:
        """The results of one operator. All tensors are freed."""
        inputs = [self.upload(x) for x in operands]
        first = len(inputs)
        outputs = self.run([node(op, range(first), results)], inputs, [*range(first, first + len(results))], inputs)
        arrays = [self.download(r) for r in outputs]
        self.request("free", tensors=outputs)
        return arrays


def node(op: Op, inputs: Sequence[int], outputs: list[Type]) -> Node:
    return {"op": op, "inputs": list(inputs), "outputs": outputs}
