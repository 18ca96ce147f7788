"""What a weight format must be able to do, and the eight-bit rows that formats with integer products read.

`dequantize` says what a stored weight means. `linear` is the format's own arithmetic in plain torch: slow, runs
everywhere, and where products are integers the compiled kernel gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.kernels.cpu.library import PackedWeight


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
        """What users call it."""
        ...

    def quantise(self, weight: Tensor) -> UnpackedWeight:
        """The nearest that the format can say to `weight` [out, in]."""
        ...

    def dequantize(self, stored: UnpackedWeight, inputs: int) -> Tensor:
        """What is stored, [out, inputs] float32."""
        ...

    def linear(self, x: Tensor, stored: UnpackedWeight) -> Tensor:
        """x W^T in float32, [M, out], from x [M, in] bfloat16; a row's bits do not depend on M >= 2."""
        ...

    def pack(self, stored: UnpackedWeight, inputs: int, bias: Tensor | None) -> PackedWeight:
        """The weight and its bias [out] in the compiled kernel's layout."""
        ...


def signed_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in eight bits: q [M, in] int8 and scale [M, 1] float32 with x = q * scale, as the kernels round them."""
    wide = x.to(torch.float32)
    peak = wide.abs().amax(1, keepdim=True)
    limit = torch.full_like(peak, 127.0)  # a tensor: a number divided by a tensor is rounded twice
    inverse = limit / peak
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    return (wide * inverse).round().clamp(-127, 127).to(torch.int8), peak / limit


def integer_product(x: Tensor, values: Tensor) -> Tensor:
    """[M, out] float32: the exact x V^T of int8 rows [M, in] and [out, in], rounded once."""
    return torch._int_mm(x, values.t().contiguous()).to(torch.float32)
