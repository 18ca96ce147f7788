"""Blocks of llama.cpp as weights: what each type's bytes mean, as a plain tensor or as `Coded`, nothing rounded.

Sources: ggml's ggml-quants.c, and the library gguf, whose `dequantize` the tests compare bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.gguf.container import Container
from sametoken.kernels.cpu.variant import library
from sametoken.model.formats.bits import join_bits
from sametoken.model.formats.coded import Code, Coded

UNQUANTISED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Parts = tuple[Tensor, ...]


class BlockLayout(NamedTuple):
    """What a type of blocks holds.

    Attributes:
        code: what a number is stored as.
        group: consecutive inputs that share a scale.
        sizes: bytes of a block's codes, scales, offsets, steps and offset steps.
        scale: dtype of the scales.
        in_torch: these parts [out, blocks * size] of uint8 [out, blocks, bytes], as compiled code gives them.
    """

    code: Code
    group: int
    sizes: tuple[int, int, int, int, int]
    scale: torch.dtype
    in_torch: Callable[[Tensor], Parts]


def read_tensor(container: Container, name: str) -> Tensor | Coded:
    """A tensor of a file in its own type."""
    entry, data = container.entries[name], container.read(name)
    kind = entry.type.name
    if kind in UNQUANTISED_TYPES:
        return data.view(UNQUANTISED_TYPES[kind]).view(entry.shape)
    blocks = data.view(data.shape[0], -1, entry.type.bytes)
    return coded_blocks(kind, blocks, entry.shape[-1])


def coded_blocks(kind: str, blocks: Tensor, inputs: int) -> Coded:
    """The weight [out, inputs] of uint8 [out, blocks, bytes of a block], with compiled code where there is some."""
    found, compiled = KINDS[kind], None if blocks.is_meta else library()
    parts = found.in_torch(blocks) if compiled is None else compiled.read_blocks(kind, blocks, found.sizes)
    codes, scale, offset, step, offset_step = parts
    return Coded(
        found.code,
        codes.view(torch.int8) if found.code is Code.INT8 else codes,
        scale.view(found.scale),
        inputs,
        found.group,
        offset=offset.view(torch.int8) if found.sizes[2] else None,
        step=step.view(torch.float16) if found.sizes[3] else None,
        offset_step=offset_step.view(torch.float16) if found.sizes[4] else None,
        block_rows=found.code is not Code.FP4,
    )


def _parts(blocks: Tensor, codes: Tensor, *others: Tensor | None) -> Parts:
    """Codes, scales and what follows, from [out, blocks, size]; without bytes where a type has none."""
    listed = [codes, *others, *[None] * (4 - len(others))]
    return tuple(blocks[:, :, :0].flatten(1) if part is None else part.flatten(1).contiguous() for part in listed)


def _four_bits(numbers: Tensor) -> Tensor:
    """[out, blocks, n / 2] of uint8 [out, blocks, n], an even input in the low four bits."""
    return numbers[:, :, 0::2] | numbers[:, :, 1::2] << 4


def _nibbles(data: Tensor) -> Tensor:
    """[out, blocks, 32] of uint8 [out, blocks, 16]: the low four bits of all bytes, then the high ones."""
    return torch.cat([data & 15, data >> 4], 2)


def _q8_0(blocks: Tensor) -> Parts:
    return _parts(blocks, blocks[:, :, 2:], blocks[:, :, :2])


def _q4_0(blocks: Tensor) -> Parts:
    return _parts(blocks, _four_bits(_nibbles(blocks[:, :, 2:])), blocks[:, :, :2])


def _mxfp4(blocks: Tensor) -> Parts:
    numbers = _nibbles(blocks[:, :, 1:])
    return _parts(blocks, _four_bits(torch.where(numbers == 8, 0, numbers)), blocks[:, :, :1])  # ggml has no -0


def _scales_and_offsets(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Two [out, blocks, 8] tensors of six-bit numbers, from uint8 [out, blocks, 12]."""
    first, second, both = torch.split_with_sizes(packed, [4, 4, 4], 2)
    scale = torch.cat([first & 63, (both & 15) | (first >> 2 & 48)], 2)
    offset = torch.cat([second & 63, (both >> 4) | (second >> 2 & 48)], 2)
    return scale, offset


def _pairs_of_32(data: Tensor) -> Tensor:
    """[out, blocks, 8, 32] of uint8 [out, blocks, 128]: each 32 bytes hold 32 numbers low, then 32 high."""
    split = data.reshape(*data.shape[:2], 4, 1, 32)
    return torch.cat([split & 15, split >> 4], 3).flatten(2, 3)


def _q4_k(blocks: Tensor) -> Parts:
    codes = _four_bits(_pairs_of_32(blocks[:, :, 16:]).flatten(2))
    return _parts(blocks, codes, *_scales_and_offsets(blocks[:, :, 4:16]), blocks[:, :, :2], blocks[:, :, 2:4])


def _q5_k(blocks: Tensor) -> Parts:
    high = blocks[:, :, 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    codes = _pairs_of_32(blocks[:, :, 48:]) | high << 4
    codes = join_bits(codes.flatten(2), 5)
    return _parts(blocks, codes, *_scales_and_offsets(blocks[:, :, 4:16]), blocks[:, :, :2], blocks[:, :, 2:4])


def _q6_k(blocks: Tensor) -> Parts:
    shape = blocks.shape[:2]
    low = blocks[:, :, :128].reshape(*shape, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], 3).reshape(*shape, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (blocks[:, :, 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3).flatten(2, 3)
    codes = join_bits((low | high << 4).flatten(2), 6)
    return _parts(blocks, codes, blocks[:, :, 192:208], None, blocks[:, :, 208:])


KINDS = {
    "Q8_0": BlockLayout(Code.INT8, 32, (32, 2, 0, 0, 0), torch.float16, _q8_0),
    "Q4_0": BlockLayout(Code.INT4, 32, (16, 2, 0, 0, 0), torch.float16, _q4_0),
    "MXFP4": BlockLayout(Code.FP4, 32, (16, 1, 0, 0, 0), torch.float8_e8m0fnu, _mxfp4),
    "Q4_K": BlockLayout(Code.INT4, 32, (128, 8, 8, 2, 2), torch.int8, _q4_k),
    "Q5_K": BlockLayout(Code.INT5, 32, (160, 8, 8, 2, 2), torch.int8, _q5_k),
    "Q6_K": BlockLayout(Code.INT6, 16, (192, 16, 0, 2, 0), torch.int8, _q6_k),
}
