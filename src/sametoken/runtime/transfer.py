"""Asynchronous transfer of integers: to the device through pinned memory, to the host through delayed reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy values to `device` as [n] int64 without synchronising."""
    found = torch.tensor(values, dtype=torch.int64)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


class Readback:
    """Queue of copies of a device tensor to the host, each read after the device has reached it.

    Args:
        like: int64 tensor with the shape and device of the sources.
        depth: most pending copies.
    """

    def __init__(self, like: Tensor, depth: int) -> None:
        on_device = like.device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        for _ in range(depth):
            landed = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]
            self._free.append((torch.empty(like.shape, dtype=like.dtype, pin_memory=on_device), landed))
        self._flying: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """Number of pending copies."""
        return len(self._flying)

    def push(self, source: Tensor) -> None:
        """Start a copy of `source`, executed when the device reaches this point."""
        copy, landed = self._free.pop()
        copy.copy_(source, non_blocking=True)
        if landed is not None:
            landed.record()
        self._flying.append((copy, landed))

    def pop(self) -> list[list[int]]:
        """Wait for the oldest copy and return its rows."""
        copy, landed = self._flying.popleft()
        if landed is not None:
            landed.synchronize()
        rows: list[list[int]] = copy.tolist()
        self._free.append((copy, landed))
        return rows
