"""Codes of other tools in the compiled kernels' layout: tiles of 16 outputs, see codes.h."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from sametoken.kernels.cpu.library import (
    BF16,
    BLOCK_INT4,
    BLOCK_INT5,
    BLOCK_INT6,
    BLOCK_INT8,
    FP8,
    GROUPED_INT8,
    INT4,
    INT8,
    INT8_WEIGHT_ONLY,
    PackedWeight,
)
from sametoken.kernels.cpu.memory import new_memory
from sametoken.kernels.cpu.structures import FINITE_FP8, NIBBLE_QUADS, NIBBLES, address
from sametoken.model.formats.packing import TILE, WIDTH, Tiles, packed_weight, padded_outputs, pairs, wide
from sametoken.model.formats.packing import quads as flipped_quads

SCALES = {dtype: i for i, dtype in enumerate(
    (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8)
)}  # fmt: skip
PARTS = ("scale", "factor", "zero", "order", "offset", "step", "offset_step")  # in the order of the table's pointers
TABLE = "table"


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
    """Pack a weight; the arguments are those of `coded.Coded`.

    Args:
        kind: of the kernel.
        shape: [out, in].
        codes: parts, stacked by outputs.
        bias: [out] bfloat16.
    """  # fmt: skip
    parts = {"scale": scale, "zero": zero, "offset": offset, "step": step, "offset_step": offset_step}
    return coded_weight(
        kind, shape, LAYOUTS.get(kind, words)(*codes), group, bias,
        factor=None if factor is None else padded_outputs(factor), order=None if order is None else padded_order(order),
        **{name: None if part is None else by_group(part) for name, part in parts.items()},
    )  # fmt: skip


def coded_weight(
    kind: int, shape: tuple[int, int], data: Tensor, group: int, bias: Tensor | None, **parts: Tensor | None
) -> PackedWeight:
    """Weight whose codes and numbers are already in tiles: "scale", and the others of `PARTS` that it has."""
    found = [parts.get(name) for name in PARTS]
    scale, step = parts["scale"], parts.get("step")
    assert scale is not None
    pointers = [address(part) or 0 for part in found]
    per_step = 1 if step is None else scale.shape[1] // step.shape[1]
    numbers = [*pointers[:4], SCALES[scale.dtype], *pointers[4:], per_step]
    table = torch.tensor(numbers, dtype=torch.int64)  # Codes
    packed = packed_weight(kind, shape, data, scale=table, bias=bias, group=group)
    kept = {name: part for name, part in zip(PARTS, found, strict=True) if part is not None}
    return PackedWeight(packed.weight, {**packed.parts, TABLE: table, **kept})


def stored_parts(packed: PackedWeight) -> dict[str, Tensor]:
    """Tensors from which `restored` rebuilds the weight: all but the table, which holds addresses."""
    return {name: part for name, part in packed.parts.items() if name != TABLE}


def restored(kind: int, shape: tuple[int, int], group: int, parts: Mapping[str, Tensor]) -> PackedWeight:
    """Build a weight from tensors that are already in the kernels' layout.

    Raises:
        KeyError: a tensor is missing.
    """
    data, bias = parts["data"], parts.get("bias")
    if kind in (BF16, INT8, INT8_WEIGHT_ONLY, INT4):
        return packed_weight(kind, shape, data, scale=parts.get("scale"), bias=bias, group=group)
    own = {name: part for name, part in parts.items() if name not in ("data", "bias")}
    return coded_weight(kind, shape, data, group, bias, **{"scale": parts["scale"], **own})


def selected(packed: PackedWeight, ids: Tensor) -> PackedWeight:
    """Weight with the outputs `ids` [N] int64 alone, in that order; its numbers are copied as they are."""
    weight, padded = packed.weight, torch.cat([ids, ids[-1:].expand(-len(ids) % TILE)])
    parts = stored_parts(packed)
    for name, part in parts.items():
        if name != "order":
            shape = (len(padded),) if part.dim() == 1 else (len(padded) // TILE, *part.shape[1:])
            parts[name] = new_memory(shape, part.dtype, part.device)
    found = restored(weight.format, (len(ids), weight.inputs), weight.group, parts)
    move_outputs(packed, padded, found, torch.arange(len(padded), device=ids.device))
    return found


def move_outputs(source: PackedWeight, ids: Tensor, target: PackedWeight, places: Tensor) -> None:
    """Copy the outputs `ids` [N] int64 of a weight to the outputs `places` [N] of one of equal format and inputs."""
    for name in stored_parts(source):
        part, found = (indexable(each.parts[name]) for each in (source, target))
        if name != "order" and part.dim() == 1:
            found[places] = part[ids]
        elif name != "order":
            found[places // TILE, :, places % TILE] = part[ids // TILE, :, ids % TILE]


def indexable(x: Tensor) -> Tensor:
    """View in a dtype that torch can assign by index: bytes in place of 8-bit floats."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def words(*parts: Tensor) -> Tensor:
    """Bytes [tiles, in / 8, 16, 4] of codes [out, in / 2]: a word has 8 inputs, the even ones in its low 16 bits."""
    tiles = Tiles(sum(map(len, parts)), wide(2 * parts[0].shape[1]) // 8, (4,), torch.uint8)
    return tiles.filled(parts, NIBBLES)


def quads(*parts: Tensor) -> Tensor:
    """Bytes [tiles, in / 4, 16, 4] of float8_e4m3fn codes [out, in]: of four inputs the even ones come first."""
    tiles = Tiles(sum(map(len, parts)), wide(parts[0].shape[1]) // 4, (4,), torch.int8)
    return tiles.filled([part.view(torch.int8) for part in parts], FINITE_FP8)


def nibble_quads(*parts: Tensor) -> Tensor:
    """Bytes [tiles, in / 8, 16, 4] of codes [out, in / 2]: byte b has code b in its low half, code 4 + b above it."""
    tiles = Tiles(sum(map(len, parts)), wide(2 * parts[0].shape[1]) // 8, (4,), torch.uint8)
    return tiles.filled(parts, NIBBLE_QUADS)


def joined_bits(bits: int, *parts: Tensor) -> Tensor:
    """Bytes [tiles, in * bits / 32, 16, 4] of codes [out, in * bits / 8] from `bits.join_bits`."""
    inputs = parts[0].shape[1] * 8 // bits
    return Tiles(sum(map(len, parts)), wide(inputs) * bits // 32, (4,), torch.uint8).filled(parts)


LAYOUTS: dict[int, Callable[..., Tensor]] = {
    FP8: quads, GROUPED_INT8: pairs, BLOCK_INT4: nibble_quads, BLOCK_INT5: partial(joined_bits, 5),
    BLOCK_INT6: partial(joined_bits, 6), BLOCK_INT8: flipped_quads,
}  # fmt: skip


def by_group(x: Tensor) -> Tensor:
    """Tiles [tiles, groups, 16] of a tensor [out, groups]."""
    return Tiles(len(x), x.shape[1], (), x.dtype).filled([x])


def padded_order(order: Tensor) -> Tensor:
    """Order [in padded] int32, in which the padding inputs keep their places."""
    inputs = order.shape[0]
    return torch.cat([order, torch.arange(inputs, inputs + -inputs % WIDTH, dtype=torch.int32)])
