"""Integers between host and device without waiting: up through pinned memory, down through copies read a step later."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """[n] int64 on `device`; the host does not wait for what the device is doing."""
    found = torch.tensor(values, dtype=torch.int64)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


class Readback:
    """Copies of a device tensor in the order they were asked for, read when the device has come to them.

    Args:
        like: shape and device of what is copied, int64.
        depth: most copies that are under way.
    """

    def __init__(self, like: Tensor, depth: int) -> None:
        on_device = like.device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        for _ in range(depth):
            landed = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]
            self._free.append((torch.empty(like.shape, dtype=like.dtype, pin_memory=on_device), landed))
        self._flying: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._flying)

    def push(self, source: Tensor) -> None:
        """Start a copy of `source`, taken when the device reaches this point."""
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
