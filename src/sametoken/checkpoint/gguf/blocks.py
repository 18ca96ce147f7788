"""Conversion of llama.cpp's blocks of each type to plain tensors or `Coded` weights, without rounding.

Sources: ggml's ggml-quants.c, and the library gguf, with whose `dequantize` the tests compare bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.gguf import codebooks
from sametoken.checkpoint.gguf.container import Container
from sametoken.kernels.cpu.library import BLOCK_KINDS
from sametoken.kernels.cpu.variant import library
from sametoken.model.formats.bits import join_bits
from sametoken.model.formats.coded import BITS, Code, Coded

UNQUANTISED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Parts = tuple[Tensor, ...]


class BlockLayout(NamedTuple):
    """Layout of a type of blocks.

    Attributes:
        code: code of the values.
        group: consecutive inputs that share a scale.
        sizes: bytes of a block's codes, scales, offsets, steps and offset steps.
        scale: dtype of the scales.
        in_torch: conversion of uint8 [out, blocks, bytes] to these parts, [out, blocks * size] each, without compiled
            code.
    """

    code: Code
    group: int
    sizes: tuple[int, int, int, int, int]
    scale: torch.dtype
    in_torch: Callable[[Tensor], Parts]


def read_tensor(container: Container, name: str) -> Tensor | Coded:
    """Read a tensor of a file in its stored type."""
    entry, data = container.entries[name], container.read(name)
    kind = entry.type.name
    if kind in UNQUANTISED_TYPES:
        return data.view(UNQUANTISED_TYPES[kind]).view(entry.shape)
    blocks = data.view(data.shape[0], -1, entry.type.bytes)
    return coded_blocks(kind, blocks, entry.shape[-1])


def coded_blocks(kind: str, blocks: Tensor, inputs: int) -> Coded:
    """Weight [out, inputs] from uint8 [out, blocks, bytes of a block], with compiled code if available."""
    found, compiled = KINDS[kind], library() if kind in BLOCK_KINDS and not blocks.is_meta else None
    if blocks.is_meta:  # torch would take seconds to compute shapes of the file's header
        parts: Parts = tuple(blocks.new_empty(blocks.shape[0], blocks.shape[1] * size) for size in found.sizes)
    elif compiled is None:
        parts = found.in_torch(blocks)
    else:
        parts = tuple(compiled.read_blocks(kind, blocks, found.sizes))
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
    """Codes, scales and further parts [out, blocks * size] from [out, blocks, size]; absent parts are empty."""
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


# Types without codes of their own use wider codes, with equal values.

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _constant(like: Tensor, value: int) -> Tensor:
    """[out, blocks, 1] filled with a byte."""
    return torch.full_like(like[:, :, :1], value % 256)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Joined codes [out, blocks, 20] from upper bits, uint8 [out, blocks, 4], and lower four [out, blocks, 16]."""
    upper = high.unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1
    return join_bits(_nibbles(low) | upper.flatten(2) << 4, 5)


def _q5_0(blocks: Tensor) -> Parts:
    return _parts(blocks, _five_bits(blocks[:, :, 2:6], blocks[:, :, 6:]), blocks[:, :, :2])


def _q4_1(blocks: Tensor) -> Parts:
    """d q + m as d q - (-1) m."""
    codes = _four_bits(_nibbles(blocks[:, :, 4:]))
    return _parts(blocks, codes, blocks[:, :, :2], _constant(blocks, -1), None, blocks[:, :, 2:4])


def _q5_1(blocks: Tensor) -> Parts:
    codes = _five_bits(blocks[:, :, 4:8], blocks[:, :, 8:])
    return _parts(blocks, codes, blocks[:, :, :2], _constant(blocks, -1), None, blocks[:, :, 2:4])


def _iq4(numbers: Tensor) -> Tensor:
    """Values of codes 0 .. 15 as bytes."""
    return torch.tensor(IQ4_VALUES, dtype=torch.int8).view(torch.uint8)[numbers.int()]


def _iq4_nl(blocks: Tensor) -> Parts:
    return _parts(blocks, _iq4(_nibbles(blocks[:, :, 2:])), blocks[:, :, :2])


def _iq4_xs(blocks: Tensor) -> Parts:
    shape = blocks.shape[:2]
    low = torch.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], 3).flatten(2)
    high = (blocks[:, :, 2:4].unsqueeze(3) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(2)
    codes = _iq4(_nibbles(blocks[:, :, 8:].reshape(shape[0], -1, 16))).view(*shape, 256)
    return _parts(blocks, codes, (low | high << 4) - 32, None, blocks[:, :, :2])


def _two_bits(data: Tensor) -> Tensor:
    """[out, blocks, 256] of uint8 [out, blocks, 64]: 32 bytes hold four times 32 numbers, the lowest bits first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    return (data.reshape(*data.shape[:2], 2, 1, 32) >> shifts & 3).flatten(2)


def _q3_k(blocks: Tensor) -> Parts:
    """Bytes of a block: a bit above each number (32), the numbers (64), scales of six bits (12), the step."""
    upper = (blocks[:, :, :32].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1).flatten(2)
    packed = blocks[:, :, 96:108]
    low = torch.cat([packed[:, :, :8] & 15, packed[:, :, :8] >> 4], 2)
    high = packed[:, :, 8:].unsqueeze(2) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3
    codes = join_bits((_two_bits(blocks[:, :, 32:96]) | upper << 2) + 28, 6)  # 0 .. 7 for -4 .. 3, whose zero is 32
    return _parts(blocks, codes, (low | high.flatten(2) << 4) - 32, None, blocks[:, :, 108:])


def _q2_k(blocks: Tensor) -> Parts:
    codes = join_bits(_two_bits(blocks[:, :, 16:80]) + 32, 6)
    packed = blocks[:, :, :16]
    return _parts(blocks, codes, packed & 15, packed >> 4, blocks[:, :, 80:82], blocks[:, :, 82:])


def _nvfp4(blocks: Tensor) -> Parts:
    """Bytes of a block: scales of 16 numbers (4), the numbers (32). A scale of 127 is zero."""
    numbers = _nibbles(blocks[:, :, 4:].reshape(blocks.shape[0], -1, 8)).view(*blocks.shape[:2], 64)
    scale = torch.where(blocks[:, :, :4] == 127, 0, blocks[:, :, :4] & 127)
    return _parts(blocks, _four_bits(torch.where(numbers == 8, 0, numbers)), scale)


def _of_numbers(read: Callable[[Tensor], codebooks.Numbers], code: Code) -> Callable[[Tensor], Parts]:
    """Conversion of blocks to parts, with the integers that `read` returns stored as `code`."""

    def parts(blocks: Tensor) -> Parts:
        found = read(blocks)
        codes = (found.values + WIDE_ZEROS[code]).view(torch.uint8)
        if code is Code.INT4:
            codes = _four_bits(codes)
        elif code is not Code.INT8:
            compiled = None if blocks.is_meta else library()
            bits, codes = BITS[code], codes.flatten(1)
            joined = join_bits(codes, bits) if compiled is None else compiled.join_bits(codes, bits)
            codes = joined.view(*blocks.shape[:2], -1)
        return _parts(blocks, codes, found.scale.contiguous().view(torch.uint8), None, found.step)

    return parts


WIDE_ZEROS = {Code.INT4: 8, Code.INT5: 16, Code.INT6: 32, Code.INT8: 0}
KINDS = {
    "Q8_0": BlockLayout(Code.INT8, 32, (32, 2, 0, 0, 0), torch.float16, _q8_0),
    "Q4_0": BlockLayout(Code.INT4, 32, (16, 2, 0, 0, 0), torch.float16, _q4_0),
    "MXFP4": BlockLayout(Code.FP4, 32, (16, 1, 0, 0, 0), torch.float8_e8m0fnu, _mxfp4),
    "Q4_K": BlockLayout(Code.INT4, 32, (128, 8, 8, 2, 2), torch.int8, _q4_k),
    "Q5_K": BlockLayout(Code.INT5, 32, (160, 8, 8, 2, 2), torch.int8, _q5_k),
    "Q6_K": BlockLayout(Code.INT6, 16, (192, 16, 0, 2, 0), torch.int8, _q6_k),
    "Q5_0": BlockLayout(Code.INT5, 32, (20, 2, 0, 0, 0), torch.float16, _q5_0),
    "Q4_1": BlockLayout(Code.INT4, 32, (16, 2, 1, 0, 2), torch.float16, _q4_1),
    "Q5_1": BlockLayout(Code.INT5, 32, (20, 2, 1, 0, 2), torch.float16, _q5_1),
    "IQ4_NL": BlockLayout(Code.INT8, 32, (32, 2, 0, 0, 0), torch.float16, _iq4_nl),
    "IQ4_XS": BlockLayout(Code.INT8, 32, (256, 8, 0, 2, 0), torch.int8, _iq4_xs),
    "Q3_K": BlockLayout(Code.INT6, 16, (192, 16, 0, 2, 0), torch.int8, _q3_k),
    "Q2_K": BlockLayout(Code.INT6, 16, (192, 16, 16, 2, 2), torch.int8, _q2_k),
    "NVFP4": BlockLayout(Code.FP4, 16, (32, 4, 0, 0, 0), torch.float8_e4m3fn, _nvfp4),
    "IQ1_S": BlockLayout(Code.INT5, 32, (160, 32, 0, 0, 0), torch.float32, _of_numbers(codebooks.iq1_s, Code.INT5)),
    "IQ1_M": BlockLayout(Code.INT6, 16, (192, 64, 0, 0, 0), torch.float32, _of_numbers(codebooks.iq1_m, Code.INT6)),
    "IQ2_XXS": BlockLayout(Code.INT8, 32, (256, 32, 0, 0, 0), torch.float32, _of_numbers(codebooks.iq2_xxs, Code.INT8)),
    "IQ2_XS": BlockLayout(Code.INT8, 16, (256, 64, 0, 0, 0), torch.float32, _of_numbers(codebooks.iq2_xs, Code.INT8)),
    "IQ2_S": BlockLayout(Code.INT8, 16, (256, 64, 0, 0, 0), torch.float32, _of_numbers(codebooks.iq2_s, Code.INT8)),
    "IQ3_XXS": BlockLayout(Code.INT8, 32, (256, 32, 0, 0, 0), torch.float32, _of_numbers(codebooks.iq3_xxs, Code.INT8)),
    "IQ3_S": BlockLayout(Code.INT5, 32, (160, 8, 0, 2, 0), torch.int8, _of_numbers(codebooks.iq3_s, Code.INT5)),
    "TQ1_0": BlockLayout(Code.INT4, 32, (128, 8, 0, 2, 0), torch.int8, _of_numbers(codebooks.tq1_0, Code.INT4)),
    "TQ2_0": BlockLayout(Code.INT4, 32, (128, 8, 0, 2, 0), torch.int8, _of_numbers(codebooks.tq2_0, Code.INT4)),
}
