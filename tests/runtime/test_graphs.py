"""Capture and replay without a device: rehearsals leave no trace, a key is captured once, other keys are other graphs.

CUDA's part is played by stand-ins: a capture records work without doing it, a replay does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sametoken.runtime.graphs import WARM_UPS, GraphKey, Graphs
from sametoken.runtime.transfer import Readback, upload

KEY = GraphKey("none", 0, 1, 512, (), torch.float32, True)


class Stand:
    """A counter on the device and the work that raises it."""

    def __init__(self, state: Tensor, gain: int) -> None:
        self.state, self.gain, self.calls = state, gain, 0

    def work(self) -> None:
        self.calls += 1
        if Graph.recording is not None:
            Graph.recording.append(lambda: self.state.add_(self.gain))
        else:
            self.state.add_(self.gain)


class Graph:
    recording: list[Callable[[], Any]] | None = None

    def __init__(self) -> None:
        self.kernels: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for kernel in self.kernels:
            kernel()


class Stream:
    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


@contextmanager
def capture(graph: Graph, pool: object, capture_error_mode: str) -> Iterator[None]:
    assert (pool, capture_error_mode) == ("pool", "thread_local")
    Graph.recording = graph.kernels
    yield
    Graph.recording = None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    stands = {"CUDAGraph": Graph, "graph": capture, "Stream": Stream, "current_stream": Stream}
    stands |= {"graph_pool_handle": lambda: "pool", "stream": lambda stream: nullcontext()}
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    return Graphs(torch.device("cuda"))


def test_every_run_is_done_once(graphs: Graphs) -> None:
    state = torch.tensor([5])
    stand, other = Stand(state, 1), Stand(state, 100)
    for expected in (6, 7, 8):
        graphs.run(KEY, stand.work, [state])
        assert state.tolist() == [expected]
    assert stand.calls == WARM_UPS + 1  # rehearsals and the capture, however often it is replayed
    graphs.run(replace(KEY, keys=1024), other.work, [state])
    assert state.tolist() == [108]
    graphs.run(KEY, stand.work, [state])
    assert state.tolist() == [109]
    assert len(graphs) == 2


def test_without_a_device_work_is_done_at_once() -> None:
    state = torch.tensor([5])
    stand, graphs = Stand(state, 1), Graphs(torch.device("cpu"))
    for _ in range(3):
        graphs.run(KEY, stand.work, [state])
    assert (state.tolist(), stand.calls, len(graphs)) == ([8], 3, 0)


def test_copies_are_read_in_order_and_as_they_were() -> None:
    source = torch.tensor([[1, 2]])
    readback = Readback(source, 2)
    readback.push(source)
    source.add_(10)
    readback.push(source)
    source.zero_()
    assert len(readback) == 2
    assert (readback.pop(), readback.pop(), len(readback)) == ([[1, 2]], [[11, 12]], 0)


def test_numbers_go_up() -> None:
    assert upload([3, -1, 2**40], torch.device("cpu")).tolist() == [3, -1, 2**40]
