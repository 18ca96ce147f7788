"""Codes of other tools in the compiled kernels' layout: tiles of 16 outputs, see codes.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.kernels.cpu.library import FP8, GROUPED_INT8, PackedWeight
from sametoken.kernels.cpu.structures import FINITE_FP8, NIBBLES, address
from sametoken.model.formats.packing import WIDTH, Tiles, packed_weight, padded_outputs, pairs, wide

SCALES = {dtype: i for i, dtype in enumerate(
    (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8)
)}  # fmt: skip


def pack_codes(
    kind: int,
    shape: tuple[int, int],
    codes: Sequence[Tensor],
    scale: Tensor,
    group: int,
    bias: Tensor | None,
    *,
    factor: Tensor | None,
    zero: Tensor | None,
    order: Tensor | None,
    step: Tensor | None = None,
    offset: Tensor | None = None,
    offset_step: Tensor | None = None,
) -> PackedWeight:
    """A weight as `coded.Coded` describes it.

    Args:
        kind: of the kernel.
        shape: [out, in].
        codes: of the outputs one below the other.
        bias: [out] bfloat16.
    """  # fmt: skip
    data = quads(*codes) if kind == FP8 else pairs(*codes) if kind == GROUPED_INT8 else words(*codes)
    parts = (
        by_group(scale),
        None if factor is None else padded_outputs(factor),
        None if zero is None else by_group(zero),
        None if order is None else padded_order(order),
        *(None if part is None else by_group(part) for part in (offset, step, offset_step)),
    )
    pointers = [address(part) or 0 for part in parts]
    per_step = 1 if step is None else scale.shape[1] // step.shape[1]
    numbers = [*pointers[:4], SCALES[scale.dtype], *pointers[4:], per_step]
    table = torch.tensor(numbers, dtype=torch.int64)  # Codes
    packed = packed_weight(kind, shape, data, scale=table, bias=bias, group=group)
    return PackedWeight(packed.weight, (*packed.kept, *(part for part in parts if part is not None)))


def words(*parts: Tensor) -> Tensor:
    """[tiles, in / 8, 16, 4] bytes of codes [out, in / 2]: a word has 8 inputs, the even ones in its low 16 bits."""
    tiles = Tiles(sum(map(len, parts)), wide(2 * parts[0].shape[1]) // 8, (4,), torch.uint8)
    return tiles.filled(parts, NIBBLES)


def quads(*parts: Tensor) -> Tensor:
    """[tiles, in / 4, 16, 4] bytes of float8_e4m3fn codes [out, in]: of four inputs the even ones come first."""
    tiles = Tiles(sum(map(len, parts)), wide(parts[0].shape[1]) // 4, (4,), torch.int8)
    return tiles.filled([part.view(torch.int8) for part in parts], FINITE_FP8)


def by_group(x: Tensor) -> Tensor:
    """[tiles, groups, 16] of [out, groups]."""
    return Tiles(len(x), x.shape[1], (), x.dtype).filled([x])


def padded_order(order: Tensor) -> Tensor:
    """[in padded] int32: what follows the inputs stands where it is."""
    inputs = order.shape[0]
    return torch.cat([order, torch.arange(inputs, inputs + -inputs % WIDTH, dtype=torch.int32)])
