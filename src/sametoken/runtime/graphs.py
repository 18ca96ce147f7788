"""CUDA graphs, captured once and replayed by key; on a device without graphs, the work is executed directly.

A graph has fixed addresses, shapes and branches: the key lists them all, and the inputs are tensors at fixed addresses
that are filled before a replay.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
WARM_UPS = 2  # first calls of libraries allocate and compile, which a capture does not allow


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Facts that are fixed in a captured decoding step.

    Attributes:
        method: method of the drafter.
        depth: longest path of a draft.
        batch: number of rows, padding rows included.
        keys: upper bound of a row's key length.
        sampling: fields of `Sampling` that the batch uses, and their shapes.
        dtype, deterministic: settings of the target.
    """

    method: str
    depth: int
    batch: int
    keys: int
    sampling: tuple[object, ...]
    dtype: torch.dtype
    deterministic: bool


class Graphs:
    """Captured graphs of one device, which share one memory pool for intermediate results.

    Attributes:
        captures: true if work is captured. A failed capture sets it to False permanently; work then runs eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        self.captures = device.type == "cuda"
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: GraphKey, work: Callable[[], None], state: Sequence[Tensor]) -> None:
        """Run `work` once, asynchronously on the current stream.

        Args:
            key: key of the work; equal keys mean the same work on the same tensors.
            work: function that only launches kernels: it may change tensors in place but never read values on the host.
            state: tensors that `work` changes, restored after a warm-up call.
        """
        if not self.captures:
            work()
            return
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = self._graphs[key] = self._capture(work, state)
            except RuntimeError as error:  # torch.OutOfMemoryError and torch.AcceleratorError are such errors
                self.captures = False
                logger.warning("CUDA graphs are off: a step of %d rows was not captured: %s", key.batch, error)
                work()
                return
        graph.replay()

    def _capture(self, work: Callable[[], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        kept = [tensor.clone() for tensor in state]
        # torch.cuda.graph has one stream for all devices; this one belongs to the current device.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                try:
                    work()
                finally:
                    for tensor, before in zip(state, kept, strict=True):
                        tensor.copy_(before)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a graph of an old engine must not be destroyed during a capture
        try:
            # Other threads of the process may use the device during a capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                work()
        finally:
            if collects:
                gc.enable()
        return graph
