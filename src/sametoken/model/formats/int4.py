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
from sametoken.model.formats.base import UnpackedWeight, signed_bytes
from sametoken.model.formats.packing import TILE, WIDTH, nibbles, packed_weight, padded_outputs
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
        wide = F.pad(weight.to(torch.float32), (0, -weight.shape[1] % WIDTH))
        values, scale = searched_int4(wide.view(weight.shape[0], -1, self.group), torch.bfloat16)
        return UnpackedWeight(values.to(torch.int8).flatten(1), scale)

    def dequantize(self, stored: UnpackedWeight, inputs: int) -> Tensor:
        grouped = stored.values.to(torch.float32).view(*stored.scale.shape, self.group)
        return (grouped * stored.scale.to(torch.float32).unsqueeze(2)).flatten(1)[:, :inputs]

    def linear(self, x: Tensor, stored: UnpackedWeight) -> Tensor:
        rows, scale = signed_bytes(x)
        # Sums of a group stay below 2^24: float32 products give the integers exactly, in any order.
        wide = F.pad(rows.to(torch.float32), (0, stored.values.shape[1] - rows.shape[1]))
        total = torch.zeros(x.shape[0], stored.values.shape[0])
        parts = zip(torch.split(wide, self.group, 1), torch.split(stored.values, self.group, 1), strict=True)
        for group, (part, values) in enumerate(parts):
            total = total + F.linear(part, values.to(torch.float32)) * stored.scale[:, group].to(torch.float32)
        return total * scale

    def pack(self, stored: UnpackedWeight, inputs: int, bias: Tensor | None) -> PackedWeight:
        scale = padded_outputs(stored.scale)  # by tile, as the values lie: a tile is one stream of each
        tiles = scale.view(-1, TILE, scale.shape[1]).transpose(1, 2).contiguous()
        return self.packed((stored.values.shape[0], inputs), nibbles(stored.values), tiles, bias)

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
