"""Blocks of llama.cpp as weights: what each type's bytes mean, as a plain tensor or as `Coded`, nothing rounded.

Sources: ggml's ggml-quants.c, and the library gguf, whose `dequantize` the tests compare bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sametoken.checkpoint.gguf.container import Container
from sametoken.kernels.cpu.library import library
from sametoken.model.formats.coded import Code, Coded

UNQUANTISED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUPER = 256  # numbers of a block of the K types


def read_tensor(container: Container, name: str) -> Tensor | Coded:
    """A tensor of a file in its own type."""
    entry, data = container.entries[name], container.read(name)
    kind = entry.type.name
    if kind in UNQUANTISED_TYPES:
        return data.view(UNQUANTISED_TYPES[kind]).view(entry.shape)
    blocks = data.view(data.shape[0], -1, entry.type.bytes)
    return READERS[kind](blocks, entry.shape[-1])


def _floats(data: Tensor) -> Tensor:
    """[out, blocks] float16 of uint8 [out, blocks, 2]."""
    return data.contiguous().view(torch.float16).squeeze(2)


def _four_bits(nibbles: Tensor) -> Tensor:
    """[out, inputs / 2] of uint8 [out, inputs], an even input in the low four bits."""
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def _nibbles(data: Tensor) -> Tensor:
    """[out, blocks * 32] of uint8 [out, blocks, 16]: the low four bits of all bytes, then the high ones."""
    return torch.cat([data & 15, data >> 4], 2).flatten(1)


def _codes(kind: str, blocks: Tensor, numbers: int, in_torch: Callable[[Tensor], Tensor]) -> Tensor:
    """[out, inputs] int8 or, of four bits, [out, inputs / 2] uint8: compiled where there are kernels, else in torch.

    Args:
        numbers: bytes of the codes of a block.
    """
    found = None if blocks.is_meta else library()
    return in_torch(blocks) if found is None else found.block_codes(kind, blocks, numbers)


def _q8_0(blocks: Tensor, inputs: int) -> Coded:
    codes = _codes("Q8_0", blocks, 32, lambda x: x[:, :, 2:].flatten(1)).view(torch.int8)
    return Coded(Code.INT8, codes, _floats(blocks[:, :, :2]), inputs, 32)


def _q4_0(blocks: Tensor, inputs: int) -> Coded:
    codes = _codes("Q4_0", blocks, 16, lambda x: _four_bits(_nibbles(x[:, :, 2:])))
    return Coded(Code.INT4, codes, _floats(blocks[:, :, :2]), inputs, 32)


def _mxfp4(blocks: Tensor, inputs: int) -> Coded:
    def in_torch(x: Tensor) -> Tensor:
        nibbles = _nibbles(x[:, :, 1:])
        return _four_bits(torch.where(nibbles == 8, 0, nibbles))  # ggml has no negative zero

    scale = blocks[:, :, 0].contiguous().view(torch.float8_e8m0fnu)
    return Coded(Code.FP4, _codes("MXFP4", blocks, 16, in_torch), scale, inputs, 32)


def _scales_and_offsets(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Two [out, blocks * 8] int8 tensors of six-bit numbers, from uint8 [out, blocks, 12]."""
    first, second, both = torch.split_with_sizes(packed, [4, 4, 4], 2)
    scale = torch.cat([first & 63, (both & 15) | (first >> 2 & 48)], 2)
    offset = torch.cat([second & 63, (both >> 4) | (second >> 2 & 48)], 2)
    return scale.flatten(1).to(torch.int8), offset.flatten(1).to(torch.int8)


def _pairs_of_32(data: Tensor) -> Tensor:
    """[out, blocks, 8, 32] of uint8 [out, blocks, 128]: each 32 bytes hold 32 numbers low, then 32 high."""
    split = data.reshape(*data.shape[:2], 4, 1, 32)
    return torch.cat([split & 15, split >> 4], 3).flatten(2, 3)


def _k_coded(blocks: Tensor, code: Code, codes: Tensor, inputs: int) -> Coded:
    scale, offset = _scales_and_offsets(blocks[:, :, 4:16])
    step, offset_step = _floats(blocks[:, :, :2]), _floats(blocks[:, :, 2:4])
    return Coded(code, codes, scale, inputs, 32, step=step, offset=offset, offset_step=offset_step)


def _q4_k(blocks: Tensor, inputs: int) -> Coded:
    codes = _codes("Q4_K", blocks, 128, lambda x: _four_bits(_pairs_of_32(x[:, :, 16:]).flatten(1)))
    return _k_coded(blocks, Code.INT4, codes, inputs)


def _q5_k(blocks: Tensor, inputs: int) -> Coded:
    def in_torch(x: Tensor) -> Tensor:
        high = x[:, :, 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
        return (_pairs_of_32(x[:, :, 48:]) | high << 4).flatten(1)

    return _k_coded(blocks, Code.INT8, _codes("Q5_K", blocks, 256, in_torch).view(torch.int8), inputs)


def _q6_k(blocks: Tensor, inputs: int) -> Coded:
    def in_torch(x: Tensor) -> Tensor:
        shape = x.shape[:2]
        low = x[:, :, :128].reshape(*shape, 2, 1, 64)
        low = torch.cat([low & 15, low >> 4], 3).reshape(*shape, 8, 32)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
        high = (x[:, :, 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3).flatten(2, 3)
        return ((low | high << 4).to(torch.int8) - 32).flatten(1)

    codes = _codes("Q6_K", blocks, 256, in_torch).view(torch.int8)
    scale = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    return Coded(Code.INT8, codes, scale, inputs, 16, step=_floats(blocks[:, :, 208:]))


READERS: dict[str, Callable[[Tensor, int], Coded]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4,
}  # fmt: skip
