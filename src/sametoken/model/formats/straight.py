"""Weights and rows rounded to a format in training, with gradients as if nothing were rounded.

This is the straight-through estimator: the forward computes with the numbers that will be served, the backward changes
the float32 weights from which they are rounded.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.model.formats.base import signed_bytes
from sametoken.model.formats.rounding import Rounding


class TrainedForm(Protocol):
    """Replacement of the weight and rows of a linear layer in training."""

    def matrix(self, weight: Tensor) -> Tensor:
        """Matrix used in place of the weight [out, in]."""
        ...

    def rows(self, x: Tensor) -> Tensor:
        """Rows used in place of [..., in]."""
        ...


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def straight(plain: Tensor, rounded: Tensor) -> Tensor:
    """Numbers of `rounded`, bit for bit, whose gradient goes unchanged to `plain`; equal shape and dtype."""
    found: Tensor = _Straight.apply(plain, rounded)  # type: ignore[no-untyped-call]
    return found


class FakeRounding:
    """Weight of a linear layer rounded to a format, and its rows if the format's products round them."""

    def __init__(self, rounding: Rounding) -> None:
        self._rounding, self._dynamic = rounding, False
        self._rounded: Tensor | None = None

    def renew(self, weight: Tensor) -> None:
        """Round the current weight; call before each forward that follows a change.

        Raises:
            UnsupportedModelError: its number of inputs is not a multiple of the group size.
        """
        coded = self._rounding(weight.detach())
        self._dynamic, self._rounded = coded.dynamic, straight(weight, coded.dequantize())

    def matrix(self, weight: Tensor) -> Tensor:
        assert self._rounded is not None, "a weight is rounded before the forward"
        return self._rounded

    def rows(self, x: Tensor) -> Tensor:
        if not self._dynamic:
            return x
        codes, scale = signed_bytes(x.detach().flatten(0, -2))
        return straight(x, (codes * scale).view_as(x).to(x.dtype))
