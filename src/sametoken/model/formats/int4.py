"""Four-bit weights with a bfloat16 scale for each group of inputs, multiplied by eight-bit rows (W4A8).

A group's sum is an integer; groups are added in float32 in the order of the inputs, so every implementation agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.cpu.library import INT4, PackedWeight
from sametoken.kernels.cpu.memory import new_memory
from sametoken.kernels.cpu.variant import library
from sametoken.model.formats.base import UnpackedWeight, signed_bytes
from sametoken.model.formats.packing import TILE, WIDTH, packed_weight, wide
from sametoken.model.formats.search import best_scale, rounded_by_rows, scaled

# Scales that are tried for a group, relative to the one that maps its greatest weight to -8: clipping the greatest a
# little often costs less than rounding all other weights more coarsely.
TRIED = tuple(1.04 - step / 25 for step in range(7))


@dataclass(frozen=True)
class Int4:
    """Format with values -8 .. 7 times the scale of `group` inputs, 32 or 128."""

    name: str
    group: int

    def quantise(self, weight: Tensor) -> UnpackedWeight:
        return rounded_by_rows(self._rounded, weight)

    def _rounded(self, weight: Tensor) -> UnpackedWeight:
        padded = F.pad(weight.to(torch.float32), (0, -weight.shape[1] % WIDTH))
        values, scale = searched_int4(padded.view(weight.shape[0], -1, self.group), torch.bfloat16)
        return UnpackedWeight(values.to(torch.int8).flatten(1), scale)

    def dequantize(self, stored: UnpackedWeight, inputs: int) -> Tensor:
        grouped = stored.values.to(torch.float32).view(*stored.scale.shape, self.group)
        return (grouped * stored.scale.to(torch.float32).unsqueeze(2)).flatten(1)[:, :inputs]

    def linear(self, x: Tensor, stored: UnpackedWeight) -> Tensor:
        rows, scale = signed_bytes(x)
        # Sums of a group stay below 2^24: float32 products give the integers exactly, in any order.
        padded = F.pad(rows.to(torch.float32), (0, stored.values.shape[1] - rows.shape[1]))
        total = torch.zeros(x.shape[0], stored.values.shape[0])
        parts = zip(torch.split(padded, self.group, 1), torch.split(stored.values, self.group, 1), strict=True)
        for group, (part, values) in enumerate(parts):
            total = total + F.linear(part, values.to(torch.float32)) * stored.scale[:, group].to(torch.float32)
        return total * scale

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        outputs, inputs = weight.shape
        tiles, width = -(-outputs // TILE), wide(inputs)
        data = new_memory((tiles, width // 8, TILE, 4), torch.uint8)
        scale = torch.empty(tiles, width // self.group, TILE, dtype=torch.bfloat16)  # by tile, as the values lie
        kernels = library()
        if not data.is_meta:
            assert kernels is not None  # only used with the kernels
            weight = weight if weight.stride(1) == 1 else weight.contiguous()
            kernels.round_int4(weight, self.group, TRIED, data, scale)
        return self.packed((outputs, inputs), data, scale, bias)

    def packed(self, shape: tuple[int, int], data: Tensor, scale: Tensor, bias: Tensor | None) -> PackedWeight:
        return packed_weight(INT4, shape, data, scale=scale, bias=bias, group=self.group)


def searched_int4(grouped: Tensor, dtype: torch.dtype, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round to values -8 .. 7 [out, groups, size] in float32, and search scales [out, groups] of either sign.

    Args:
        grouped: the weight, float32.
        dtype: of the scales.
        importance: [groups, size] of squared errors, None for 1.
    """

    def tried(part: Tensor) -> Iterator[Tensor]:
        greatest = part.gather(2, part.abs().argmax(2, keepdim=True))
        return ((greatest / -8 * factor).to(dtype).to(torch.float32) for factor in TRIED)

    scale = best_scale(grouped, tried, nearest_int4, importance)
    return nearest_int4(scaled(grouped, scale)), scale.squeeze(2).to(dtype)


def nearest_int4(x: Tensor) -> Tensor:
    """Nearest integers -8 .. 7 of the numbers of `x`, which is overwritten."""
    return x.round_().clamp_(-8, 7)
