"""Work captured once as a CUDA graph and replayed by key; on a device without graphs it is simply done.

A graph has addresses, shapes and choices baked in: its key lists them all, and its inputs are tensors that stay where
they are and are filled before a replay.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
WARM_UPS = 2  # libraries allocate and kernels are compiled in their first calls, which a capture does not allow


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything that a captured decoding step has baked in.

    Attributes:
        method: who guesses; `depth` is how many tokens.
        batch: rows, padding rows included.
        keys: bound of a row's key length.
        sampling: which rules of `Sampling` the batch has, and their shapes.
        dtype, deterministic: of the target.
    """

    method: str
    depth: int
    batch: int
    keys: int
    sampling: tuple[object, ...]
    dtype: torch.dtype
    deterministic: bool


class Graphs:
    """Captured work of one device; all graphs share one pool of memory for what they compute on the way.

    Attributes:
        captures: whether work is captured. A failed capture sets it to False for good; work is then done eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        self.captures = device.type == "cuda"
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: GraphKey, work: Callable[[], None], state: Sequence[Tensor]) -> None:
        """Do `work` once, on the current stream and without waiting for it.

        Args:
            key: equal keys promise the same work on the same tensors.
            work: launches kernels only; it may read and write tensors in place, never look at their values.
            state: tensors that `work` changes and that a rehearsal must not change.
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
        gc.disable()  # a graph of an old engine must not be destroyed in the middle of a capture
        try:
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                work()
        finally:
            if collects:
                gc.enable()
        return graph
