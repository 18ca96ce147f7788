"""Codes of other tools in the compiled kernels' layout: tiles of 16 outputs, see codes.h."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.cpu.library import FP8, GROUPED_INT8, PackedWeight, address
from sametoken.kernels.cpu.memory import settled
from sametoken.model.formats.packing import TILE, WIDTH, packed_weight, padded, padded_outputs, pairs

SCALES = {dtype: i for i, dtype in enumerate(
    (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8)
)}  # fmt: skip


def pack_codes(
    kind: int,
    shape: tuple[int, int],
    codes: Tensor,
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
        bias: [out] bfloat16.
    """  # fmt: skip
    data = quads(codes) if kind == FP8 else pairs(codes) if kind == GROUPED_INT8 else words(codes)
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


def words(codes: Tensor) -> Tensor:
    """[tiles, in / 8, 16, 4] bytes of codes [out, in / 2]: a word has 8 inputs, the even ones in its low 16 bits."""
    missing = -codes.shape[0] % TILE, -codes.shape[1] % (WIDTH // 2)
    whole = F.pad(codes, (0, missing[1], 0, missing[0])) if any(missing) else codes
    first, second = whole.reshape(whole.shape[0], -1, 2, 2).unbind(3)
    found = torch.cat([(first & 15) | (second << 4), (first >> 4) | (second & 240)], 2)
    return settled(found.view(-1, TILE, found.shape[1], 4).transpose(1, 2))


def quads(codes: Tensor) -> Tensor:
    """[tiles, in / 4, 16, 4] bytes of codes [out, in] of a byte: of four inputs the even ones come first."""
    whole = padded(codes.view(torch.int8))
    return settled(whole.view(-1, TILE, whole.shape[1] // 4, 2, 2).permute(0, 2, 1, 4, 3))


def by_group(x: Tensor) -> Tensor:
    """[tiles, groups, 16] of [out, groups]."""
    narrow = x.dtype.itemsize == 1  # torch cannot pad eight-bit floats
    whole = padded_outputs(x.view(torch.int8) if narrow else x)
    return settled(whole.view(-1, TILE, whole.shape[1]).transpose(1, 2)).view(x.dtype)


def padded_order(order: Tensor) -> Tensor:
    """[in padded] int32: what follows the inputs stands where it is."""
    inputs = order.shape[0]
    return torch.cat([order, torch.arange(inputs, inputs + -inputs % WIDTH, dtype=torch.int32)])
