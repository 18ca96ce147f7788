"""Layouts that the compiled kernels read: tiles of 16 outputs, within a tile step by step of the inputs.

See linear.h. Outputs are padded to whole tiles, inputs to 128, with weights of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.cpu.library import BF16, PackedWeight
from sametoken.kernels.cpu.memory import new_memory
from sametoken.kernels.cpu.structures import AS_IS, FINITE_BF16, FLIPPED, Weight, address
from sametoken.kernels.cpu.variant import library

TILE, WIDTH = 16, 128


class Tiles:
    """A tensor [tiles, units, 16, ...] that is filled with rows of a weight, output by output.

    Args:
        outputs: of the weight; the padding of its last tile is zero.
        units: of each output.
        unit: shape of a unit.
    """

    def __init__(self, outputs: int, units: int, unit: Sequence[int], dtype: torch.dtype) -> None:
        self._outputs = outputs
        self.data = new_memory((-(-outputs // TILE), units, TILE, *unit), dtype)

    def put(self, first: int, rows: Tensor, turn: int = AS_IS) -> bool:
        """Put rows [R, n] at the outputs from `first` on; False if a number is not finite, for turns that check it."""
        found = library()
        if self.data.is_meta:
            return True
        assert found is not None  # only used with the kernels
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return found.pack(rows, self.data, first, self._outputs, turn)

    def filled(self, parts: Sequence[Tensor], turn: int = AS_IS) -> Tensor:
        """Tensor with the rows of all parts, stacked by outputs."""
        first = 0
        for rows in parts:
            self.put(first, rows, turn)
            first += rows.shape[0]
        return self.data


def wide(inputs: int) -> int:
    """Number of inputs, padded to whole steps."""
    return -(-inputs // WIDTH) * WIDTH


def pair_tiles(outputs: int, inputs: int, dtype: torch.dtype) -> Tiles:
    """Tiles [tiles, in / 2, 16, 2] in bfloat16 or int8."""
    return Tiles(outputs, wide(inputs) // 2, (2,), dtype)


def pairs(*parts: Tensor) -> Tensor:
    """Tiles [tiles, in / 2, 16, 2] of a weight in bfloat16 or int8; parts [out, in] are stacked by outputs."""
    first, turn = parts[0], FINITE_BF16 if parts[0].dtype == torch.bfloat16 else AS_IS
    return pair_tiles(sum(map(len, parts)), first.shape[1], first.dtype).filled(parts, turn)


def quads(*parts: Tensor) -> Tensor:
    """Bytes [tiles, in / 4, 16, 4], each value + 128, of int8 values; parts [out, in] are stacked by outputs."""
    return Tiles(sum(map(len, parts)), wide(parts[0].shape[1]) // 4, (4,), torch.uint8).filled(parts, FLIPPED)


def padded_outputs(x: Tensor) -> Tensor:
    """Tensor [out, ...] padded with zeros to whole tiles."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, -x.shape[0] % TILE)).contiguous()


def packed_weight(
    kind: int,
    shape: tuple[int, int],
    data: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    group: int = 0,
) -> PackedWeight:
    """Build the kernels' structure of a weight of `shape` [out, in].

    Args:
        bias: [out] bfloat16, padded by `padded_outputs` or not.
    """
    whole = None if bias is None else padded_outputs(bias)
    outputs, inputs = shape
    kernels = library()
    matrix = kernels is not None and kernels.matrix
    weight = Weight(kind, inputs, outputs, group, matrix, address(data), address(scale), address(whole))
    parts = {"data": data, "scale": scale, "bias": whole}
    return PackedWeight(weight, {name: part for name, part in parts.items() if part is not None})


def pack_bfloat16(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """Pack an unquantised weight [out, in] in bfloat16."""
    return packed_weight(BF16, (weight.shape[0], weight.shape[1]), pairs(weight), bias=bias)
