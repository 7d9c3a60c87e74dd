"""The worker protocol of FusionLLM, for any framework. `docs/worker.md` defines it.

A worker implements :class:`Framework` and calls :func:`serve`.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, BinaryIO

from fusionllm_worker.segment import NodeError, Plan, Segment, TensorType

__all__ = ["Found", "Framework", "NodeError", "Plan", "Runner", "Segment", "TensorType", "serve"]

PROTOCOL = 2

#: Seconds between two signs of life.
ALIVE_EVERY = 1.0

#: What frameworks say when the device has no room, if they raise no `MemoryError`.
NO_ROOM = ("out of memory", "RESOURCE_EXHAUSTED", "can't allocate memory")

#: Runs a segment. Takes its inputs and the positions of those that it may overwrite, and returns its outputs. The list
#: of inputs holds the only references to those, so that a runner which clears it early frees memory early.
Runner = Callable[[list[Any], Set[int]], list[Any]]


@dataclass(frozen=True)
class Found:
    """A device of this machine."""

    #: What the worker takes on its command line to use it.
    arguments: list[str]
    #: The maker's name.
    device: str
    #: Its memory, if it is known.
    memory_bytes: int | None
    #: Whether it is something else than the processor.
    accelerator: bool


class Framework(ABC):
    """What a worker computes with. Its tensors are of any type that has a `shape`."""

    #: What users see as the backend.
    name: str
    #: The framework's version.
    version: str
    #: The maker's name of the device.
    device: str
    #: The memory of the device, if it is known.
    memory_bytes: int | None = None
    #: The element types that the framework holds.
    dtypes: list[str]
    #: The operators that it runs.
    operators: list[str]

    @abstractmethod
    def upload(self, type: TensorType, data: memoryview) -> Any:
        """A tensor with a copy of the row-major elements in `data`."""

    @abstractmethod
    def download(self, tensor: Any, into: memoryview) -> None:
        """Writes a tensor's elements to `into` in row-major order."""

    @abstractmethod
    def prepare(self, segment: Segment) -> Runner:
        """Gets ready to run a segment.

        No output may share memory with another output, or with an input that stays in use.
        """

    def forget(self, runners: Sequence[Runner]) -> None:
        """Told of runners that no request uses any more. They go when nothing else holds them."""

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""

    @classmethod
    def found(cls) -> list[Found]:
        """The devices of this machine that the framework can use, those that are not the processor first."""
        framework = cls()
        return [Found([], framework.device, framework.memory_bytes, accelerator=False)]


class Exchange:
    """The file through which tensors pass."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            # The mapping keeps the file open. It goes when its last user does.
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0))

    def __getitem__(self, region: tuple[int, int]) -> memoryview:
        """The bytes from `region[0]` up to `region[1]`."""
        start, end = region
        if not 0 <= start <= end <= len(self.bytes):
            raise ValueError(f"bytes {start} to {end} are not in the exchange file")
        return self.bytes[start:end]


class Worker:
    """Carries out requests with a framework."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.exchange: Exchange | None = None
        self.tensors: dict[int, tuple[TensorType, Any]] = {}
        self.segments: dict[int, tuple[Segment, Runner]] = {}
        self.requests: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "exchange": self.open_exchange,
            "upload": self.upload,
            "download": self.download,
            "prepare": self.prepare,
            "run": self.run,
            "free": self.free,
            "synchronize": lambda _: framework.synchronize(),
        }

    def tensor(self, number: int) -> tuple[TensorType, Any]:
        """A tensor and its type."""
        try:
            return self.tensors[number]
        except KeyError:
            raise ValueError(f"there is no tensor {number}") from None

    def open_exchange(self, request: dict[str, Any]) -> None:
        self.exchange = Exchange(request["path"])

    def region(self, start: int, length: int) -> memoryview:
        """A part of the exchange file."""
        if length == 0:
            return memoryview(bytearray())
        if self.exchange is None:
            raise ValueError("there is no exchange file")
        return self.exchange[start, start + length]

    def upload(self, request: dict[str, Any]) -> None:
        type = TensorType.parse(request["type"])
        data = self.region(request["at"], type.nbytes)
        self.tensors[request["tensor"]] = type, self.framework.upload(type, data)

    def download(self, request: dict[str, Any]) -> dict[str, Any]:
        type, tensor = self.tensor(request["tensor"])
        shape = tuple(tensor.shape)
        # The peer complains of any other shape.
        if shape == type.shape:
            self.framework.download(tensor, self.region(request["at"], type.nbytes))
        return {"type": {"dtype": type.dtype, "shape": shape}}

    def prepare(self, request: dict[str, Any]) -> None:
        segment = Segment.parse(request)
        for number, node in enumerate(segment.nodes):
            if node.name not in self.framework.operators:
                raise NodeError(number, ValueError(f"this worker has no operator {node.name}"))
        self.segments[request["segment"]] = segment, self.framework.prepare(segment)

    def run(self, request: dict[str, Any]) -> None:
        try:
            if request["segment"] not in self.segments:
                raise ValueError(f"there is no segment {request['segment']}")
            segment, runner = self.segments[request["segment"]]
            numbers = request["inputs"]
            inputs = [self.tensor(number) for number in numbers]
            if tuple(type for type, _ in inputs) != segment.inputs:
                raise ValueError(f"the inputs are {[str(type) for type, _ in inputs]}")
        finally:
            # Before the run, so that the segment holds the last reference to each.
            self.free({"tensors": request["free"]})
        # A tensor that occurs twice is in use elsewhere while one of the two is overwritten.
        freed = {i for i, number in enumerate(numbers) if number in request["free"] and numbers.count(number) == 1}
        values = [tensor for _, tensor in inputs]
        del inputs
        outputs = runner(values, freed)
        types = (segment.types[value] for value in segment.outputs)
        self.tensors.update(zip(request["outputs"], zip(types, outputs)))

    def forget(self, request: dict[str, Any]) -> None:
        """Has no answer, so nothing is wrong with a segment that there is not: its `prepare` has failed."""
        found = (self.segments.pop(number, None) for number in request["segments"])
        self.framework.forget([runner for _, runner in filter(None, found)])

    def free(self, request: dict[str, Any]) -> None:
        for number in request["tensors"]:
            self.tensors.pop(number, None)


def answer(worker: Worker, kind: str, request: dict[str, Any]) -> dict[str, Any]:
    """Carries out a request, and returns the message that answers it."""
    try:
        return {"done": worker.requests[kind](request) or {}}
    except Exception as e:  # Whatever a framework raises is an answer to the peer.
        error: dict[str, Any] = {}
        if isinstance(e, NodeError):
            error["node"], e = e.node, e.reason
        reason = str(e) or type(e).__name__
        no_room = isinstance(e, MemoryError) or any(text in reason for text in NO_ROOM)
        return {"error": {"reason": reason, **error, "kind": "memory" if no_room else "operator"}}


def streams() -> tuple[BinaryIO, BinaryIO]:
    """Streams from and to the peer.

    From now on, what others print goes to standard error, and what they read is empty.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def serve(start: Callable[[], Framework]) -> None:
    """Serves a peer until standard input ends. `start` imports and returns the framework."""
    requests, answers = streams()
    try:
        framework = start()
    except ImportError as e:
        sys.exit(f"{e}: install it for {sys.executable}, or start the worker with another Python")
    except (RuntimeError, ValueError, AssertionError, AttributeError) as e:
        # What frameworks raise for a device that they do not have.
        sys.exit(f"the device cannot be used: {e}")
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with lock:
            answers.write(json.dumps(message).encode() + b"\n")
            answers.flush()

    keys = ("name", "version", "device", "memory_bytes", "dtypes", "operators")
    send({"hello": {"protocol": PROTOCOL, **{key: getattr(framework, key) for key in keys}}})

    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(ALIVE_EVERY):
            send({"alive": {}})

    threading.Thread(target=beat, daemon=True).start()
    try:
        worker: Worker | None = None
        for line in requests:
            kind, body = parse(line)
            if worker is None:
                if kind != "start":
                    sys.exit(f"the first message is {kind}, not start")
                if body["protocol"] != PROTOCOL:
                    sys.exit(f"the peer speaks protocol {body['protocol']}, this worker {PROTOCOL}")
                worker = Worker(framework)
            elif kind == "forget":
                worker.forget(body)
            elif kind in worker.requests:
                send(answer(worker, kind, body))
            else:
                sys.exit(f"this worker knows no request {kind}")
    except BrokenPipeError:
        pass  # The peer is gone.
    finally:
        stopped.set()


def parse(line: bytes) -> tuple[str, dict[str, Any]]:
    """The kind of a message, and the rest of it."""
    try:
        [(kind, body)] = json.loads(line).items()
    except (ValueError, AttributeError):
        sys.exit(f"this is no message: {line[:200]!r}")
    return kind, body
