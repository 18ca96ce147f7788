"""Inputs of linear layers during calibration: mean squares, greatest magnitude, and some rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sametoken.model.block import Block
from sametoken.model.formats.coded import Coded
from sametoken.model.linear import Linear

ROWS = 512  # most recorded rows of a layer, for the measurement of its error
PER_CALL = 64  # most recorded rows of one call


class Inputs:
    """Inputs of one linear layer over several calls.

    Attributes:
        peak: greatest magnitude of an input.
    """

    def __init__(self) -> None:
        self._squares: Tensor | None = None
        self._count = 0
        self._rows: list[Tensor] = []
        self.peak = 0.0

    def see(self, x: Tensor) -> None:
        """Add input rows `x` [M, in]."""
        wide = x.to(torch.float32)
        squares = wide.square().sum(0)
        self._squares = squares if self._squares is None else self._squares + squares
        self._count += len(x)
        self.peak = max(self.peak, float(wide.abs().amax()))
        if (left := ROWS - sum(map(len, self._rows))) > 0:
            self._rows.append(x[:: -(-len(x) // PER_CALL)][:left].clone())

    @property
    def importance(self) -> Tensor | None:
        """Mean squares of the inputs, [in], at least a thousandth of their mean; None without inputs."""
        if self._squares is None:
            return None
        mean = self._squares / self._count
        return mean.clamp(min=float(mean.mean()) / 1000 or 1.0)

    def error(self, weight: Tensor, rounded: Coded) -> Tensor | None:
        """Sums of squares over the recorded rows, of the error of each output and of the output, [out, 2].

        None without rows.

        Args:
            weight: original weight [out, in].
            rounded: quantised weight.
        """
        if not self._rows:
            return None
        rows = torch.cat(self._rows).to(torch.float32)
        meant = rows @ weight.to(torch.float32).t()
        found = rounded.linear(rows).to(torch.float32)
        return torch.stack([(found - meant).square().sum(0), meant.square().sum(0)], 1)


def linears(block: Block) -> dict[str, Linear]:
    """Linear layers of a block that can be quantised, by name: all except routers of experts."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, Linear) and not name.endswith("router")
    }


@contextmanager
def watching(modules: dict[str, Linear]) -> Iterator[dict[str, Inputs]]:
    """Record the inputs of modules inside the `with` statement."""
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
