"""Layouts that the compiled kernels read: tiles of 16 outputs, within a tile step by step of the inputs.

See linear.h. Outputs are padded to whole tiles, inputs to 128, with weights of zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.cpu.library import BF16, PackedWeight, Weight, address
from sametoken.kernels.cpu.memory import settled

TILE, WIDTH = 16, 128


def pairs(weight: Tensor) -> Tensor:
    """[tiles, in / 2, 16, 2] of a weight [out, in] in bfloat16 or int8."""
    whole = padded(weight)
    return settled(whole.view(-1, TILE, whole.shape[1] // 2, 2).transpose(1, 2))


def unpaired(packed: Tensor, rows: Tensor, size: int) -> Tensor:
    """[R, size] rows of the weight that `pairs` packed."""
    return packed[rows // TILE, :, rows % TILE].flatten(1)[:, :size]


def quads(values: Tensor) -> Tensor:
    """[tiles, in / 4, 16, 4] bytes, each value + 128, of int8 values [out, in]."""
    whole = (padded(values).to(torch.int16) + 128).to(torch.uint8)
    return settled(whole.view(-1, TILE, whole.shape[1] // 4, 4).transpose(1, 2))


def nibbles(values: Tensor) -> Tensor:
    """[tiles, in / 8, 16, 4] bytes of values -8 .. 7 [out, in]: byte b holds value b in its low half, 4 + b above."""
    whole = (padded(values).to(torch.int16) + 8).to(torch.uint8)
    low, high = whole.view(-1, TILE, whole.shape[1] // 8, 2, 4).unbind(3)
    return settled((low | (high << 4)).transpose(1, 2))


def padded_outputs(x: Tensor) -> Tensor:
    """[out, ...] with zeros up to whole tiles."""
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
    """A weight of `shape` [out, in] as the kernels take it; `bias` [out] bfloat16."""
    whole = None if bias is None else padded_outputs(bias)
    outputs, inputs = shape
    weight = Weight(kind, inputs, outputs, group, address(data), address(scale), address(whole))
    return PackedWeight(weight, tuple(tensor for tensor in (data, scale, whole) if tensor is not None))


def pack_bfloat16(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """An unquantised weight [out, in] in bfloat16."""
    return packed_weight(BF16, (weight.shape[0], weight.shape[1]), pairs(weight), bias=bias)


def padded(weight: Tensor) -> Tensor:
    """A weight [out, in] with zeros up to whole tiles and steps."""
    missing = -weight.shape[0] % TILE, -weight.shape[1] % WIDTH
    return F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else weight
