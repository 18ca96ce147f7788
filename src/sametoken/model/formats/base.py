"""Interface of a weight format, and the eight-bit rows of formats with integer products.

`dequantize` defines the meaning of a stored weight. `linear` is the format's own arithmetic in plain torch: slow, runs
everywhere, and where products are integers the compiled kernel gives the same bits. `block_product` has the operations
of blocks.h in the same order.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.cpu.library import PackedWeight

ROW_BLOCK = 32  # inputs of a row that are rounded to bytes with one scale


class UnpackedWeight(NamedTuple):
    """A quantised weight, unpacked.

    Attributes:
        values: [out, in padded] int8.
        scale: [out] float32, or [out, in / group] bfloat16.
    """

    values: Tensor
    scale: Tensor


class WeightFormat(Protocol):
    """A way to store a weight [out, in]."""

    @property
    def name(self) -> str:
        """Name of the format for users."""
        ...

    def quantise(self, weight: Tensor) -> UnpackedWeight:
        """Quantise `weight` [out, in] to the nearest values of the format."""
        ...

    def dequantize(self, stored: UnpackedWeight, inputs: int) -> Tensor:
        """Stored weight as [out, inputs] float32."""
        ...

    def linear(self, x: Tensor, stored: UnpackedWeight) -> Tensor:
        """Product x W^T in float32, [M, out], from x [M, in] bfloat16; a row's bits do not depend on M >= 2."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        """Quantise `weight` [out, in] bfloat16, and return it with its bias [out] in the compiled kernels' layout."""
        ...


def signed_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows rounded to eight bits: q [M, in] int8 and scale [M, 1] float32 with x = q * scale, rounded as in the
    kernels.
    """
    wide = x.to(torch.float32)
    peak = wide.abs().amax(1, keepdim=True)
    limit = torch.full_like(peak, 127.0)  # a tensor: a number divided by a tensor is rounded twice
    inverse = limit / peak
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    return (wide * inverse).round().clamp(-127, 127).to(torch.int8), peak / limit


def integer_product(x: Tensor, values: Tensor) -> Tensor:
    """Exact product x V^T of int8 rows [M, in] and [out, in], rounded once to [M, out] float32."""
    return torch._int_mm(x, values.t().contiguous()).to(torch.float32)


def block_product(x: Tensor, values: Tensor, scales: Tensor, offset: Tensor | None) -> Tensor:
    """Product x W^T, [M, out] float32, with the rows of x rounded and W = values * scales - offset by groups of inputs.

    Args:
        x: [M, in] bfloat16, of whole blocks.
        values: [out, in] int8.
        scales, offset: [out, groups] float32; groups have 16 or 32 inputs.
    """
    groups = scales.shape[1]
    q, scale = signed_bytes(x.reshape(-1, ROW_BLOCK))
    rows, weights = q.to(torch.float32).view(len(x), groups, -1), values.to(torch.float32).view(len(values), groups, -1)
    row_scale = scale.view(len(x), -1).repeat_interleave(ROW_BLOCK // rows.shape[2], 1)
    total = torch.zeros(len(x), len(values))
    for group in range(groups):  # integers are exact in float32
        one = row_scale[:, group : group + 1]
        total = total + F.linear(rows[:, group], weights[:, group]) * scales[:, group] * one
        if offset is not None:
            total = total - offset[:, group] * (one * rows[:, group].sum(1, keepdim=True))
    return total
