"""Inputs of linear layers while a model is calibrated: mean squares, the greatest size, and some rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sametoken.model.block import Block
from sametoken.model.formats.coded import Coded
from sametoken.model.linear import Linear

ROWS = 512  # rows kept of a layer, to measure its error with
PER_CALL = 64  # of them from one call at most


class Inputs:
    """The inputs of one linear layer, call by call."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None
        self._count = 0
        self._rows: list[Tensor] = []
        self.peak = 0.0

    def see(self, x: Tensor) -> None:
        """Count rows x [M, in]."""
        wide = x.to(torch.float32)
        squares = wide.square().sum(0)
        self._squares = squares if self._squares is None else self._squares + squares
        self._count += len(x)
        self.peak = max(self.peak, float(wide.abs().amax()))
        if (left := ROWS - sum(map(len, self._rows))) > 0:
            self._rows.append(x[:: -(-len(x) // PER_CALL)][:left].clone())

    @property
    def importance(self) -> Tensor | None:
        """[in] mean squares, not below a thousandth of their mean; None where nothing was read."""
        if self._squares is None:
            return None
        mean = self._squares / self._count
        return mean.clamp(min=float(mean.mean()) / 1000 or 1.0)

    def error(self, weight: Tensor, rounded: Coded) -> Tensor | None:
        """[out, 2] squares of the error of each output on the kept rows, and of the output itself; None without rows.

        Args:
            weight: [out, in] that was rounded.
        """
        if not self._rows:
            return None
        rows = torch.cat(self._rows).to(torch.float32)
        meant = rows @ weight.to(torch.float32).t()
        found = rounded.linear(rows).to(torch.float32)
        return torch.stack([(found - meant).square().sum(0), meant.square().sum(0)], 1)


def linears(block: Block) -> dict[str, Linear]:
    """The layers of a block that can be quantised, by name: all but the routers of experts."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, Linear) and not name.endswith("router")
    }


@contextmanager
def watching(modules: dict[str, Linear]) -> Iterator[dict[str, Inputs]]:
    """Record the inputs of the modules within the block."""
    seen = {name: Inputs() for name in modules}

    def hook(name: str) -> Any:
        def see(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[name].see(given[0])

        return see

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
