"""Weights stored by other tools: codes of 4 to 8 bits, scaled by groups of inputs, and their meaning.

`Coded.dequantize` in plain torch is the reference of every format; `coded_packing` has the compiled kernels' layout of
the codes. `checkpoint.quantised` decides which tensors of a file make a `Coded`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.cpu.library import (
    BLOCK_INT4,
    BLOCK_INT5,
    BLOCK_INT6,
    BLOCK_INT8,
    FP4,
    FP8,
    GROUPED_INT4,
    GROUPED_INT8,
    PackedWeight,
)
from sametoken.kernels.cpu.structures import CodedRows, struct_of
from sametoken.kernels.cpu.variant import library
from sametoken.model.formats.base import ROW_BLOCK, UnpackedWeight, block_product
from sametoken.model.formats.bits import join_bits, split_bits
from sametoken.model.formats.coded_packing import indexable, pack_codes
from sametoken.model.formats.int8 import Int8
from sametoken.model.formats.packing import padded_outputs, quads
from sametoken.model.product import linear

DYNAMIC = Int8("int8", dynamic=True)


class Code(Enum):
    """Storage of one number of a weight; the value is the compiled kernel that reads it."""

    FP8 = FP8  # float8_e4m3fn
    FP4 = FP4  # 4-bit floats E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives
    INT4 = GROUPED_INT4  # 0 .. 15, zero at 8 unless there are zero points
    INT5 = BLOCK_INT5  # 0 .. 31, zero at 16 unless there are offsets
    INT6 = BLOCK_INT6  # 0 .. 63, zero at 32
    INT8 = GROUPED_INT8  # -128 .. 127, zero at 0 unless there are zero points


BITS = {Code.FP8: 8, Code.FP4: 4, Code.INT4: 4, Code.INT5: 5, Code.INT6: 6, Code.INT8: 8}
ZEROS = {Code.INT4: 8, Code.INT5: 16}  # of integers without offsets
INTEGERS = (Code.INT4, Code.INT5, Code.INT6, Code.INT8)


@dataclass(frozen=True)
class Coded:
    """A weight [out, inputs]: values of codes, less zero points, times scales.

    Attributes:
        code: type of the codes.
        codes: [out, inputs] float8_e4m3fn or int8, [out, inputs / 2] uint8 with an even input in the low four bits, or
            [out, inputs * 5 / 8] or [out, inputs * 6 / 8] uint8 from `bits.join_bits`.
        scale: [out, groups], float32, float16, bfloat16, float8_e4m3fn or float8_e8m0fnu; int8 with `step`.
        inputs: numbers of a row.
        group: consecutive inputs that share a scale; the last group may have fewer.
        factor: [out] float32, by which scales are multiplied, or divided if `divided`; None for 1.
        zero: [out, groups] int8, the code of the value zero; None for the code's own.
        order: [inputs] int32, the input at each place of a row; None for the usual order.
        divided: see `factor`.
        dynamic: products round their rows to int8 (W8A8), each with one scale.
        block_rows: products of bfloat16 rows on a CPU round them to int8, each `ROW_BLOCK` inputs with one scale.
        step: [out, blocks] float16, by which the scales of a block's groups are multiplied; None for 1.
        offset: [out, groups] float32, or int8 with `offset_step`, which is subtracted from scaled values; None for 0.
            With it the zero of four-bit integers is 0 instead of 8, and of five-bit ones 0 instead of 16.
        offset_step: [out, blocks] float16, by which offsets are multiplied; None for 1.
    """

    code: Code
    codes: Tensor
    scale: Tensor
    inputs: int
    group: int
    factor: Tensor | None = None
    zero: Tensor | None = None
    order: Tensor | None = None
    divided: bool = False
    dynamic: bool = False
    block_rows: bool = False
    step: Tensor | None = None
    offset: Tensor | None = None
    offset_step: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.inputs

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Coded:
        """Copy on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def outputs(self, index: Tensor | slice) -> Coded:
        """Outputs at `index` [out] int64, in that order; a slice is not copied."""
        moved: dict[str, Any] = {name: value[index] for name, value in self._tensors().items() if name != "order"}
        return replace(self, **moved)

    def replace_outputs(self, places: Tensor, other: Coded) -> None:
        """Replace the outputs `places` [N] int64 by those of `other`, which has N in the same format."""
        given = other._tensors()
        for name, value in self._tensors().items():
            if name != "order":
                indexable(value)[places] = indexable(given[name])

    def part_of_inputs(self, share: range, count: int) -> Coded:
        """Inputs of `share`, one of `count` equal parts.

        Raises:
            ValueError: a group of inputs lies in two parts; the message lists possible counts.
        """
        if self.order is not None:
            raise ValueError("its inputs lie in an order of their own (g_idx), so that they cannot be cut; use 1")
        one_scale = self.group >= self.inputs
        blocks = 1 if self.step is None else self.scale.shape[1] // self.step.shape[1]
        unit = 2 if one_scale else math.lcm(self.group * blocks, 2)
        if share.start % unit or (share.stop % unit and share.stop != self.inputs):
            fits = [n for n in range(1, 65) if self.inputs % n == 0 and self.inputs // n % unit == 0] or [1]
            words = f"{self.inputs} inputs with {unit} in a group cannot be cut into {count} parts"
            raise ValueError(f"{words}; use one of {', '.join(map(str, fits))}")
        bits = BITS[self.code]
        codes = self.codes[:, share.start * bits // 8 : -(-share.stop * bits // 8)].contiguous()
        cut: dict[str, Any] = {"codes": codes}
        for name, width in (("scale", 1), ("zero", 1), ("offset", 1), ("step", blocks), ("offset_step", blocks)):
            found = getattr(self, name)
            if found is not None and not one_scale:
                cut[name] = _columns(found, share, self.group * width)
        return replace(self, inputs=len(share), group=min(self.group, len(share)), **cut)

    def values(self) -> Tensor:
        """Values of the codes, [out, inputs] float32, without zero points, scales and order."""
        if self.code in (Code.FP8, Code.INT8):
            return self.codes.to(torch.float32)
        if self.code is Code.FP4:
            return _fp4_values(self._nibbles())
        return self.integers().to(torch.float32)

    def integers(self) -> Tensor:
        """Values of integer codes, [out, inputs] int8."""
        if self.code is Code.INT8:
            return self.codes
        if self.code in (Code.INT5, Code.INT6):
            found = split_bits(self.codes, BITS[self.code]).view(torch.int8)
            zero = 32 if self.code is Code.INT6 else 16
            return found if self.code is Code.INT5 and self.offset is not None else found.sub_(zero)
        nibbles = self._nibbles().view(torch.int8)
        return nibbles if self.zero is not None or self.offset is not None else nibbles.sub_(8)

    def _nibbles(self) -> Tensor:
        return torch.stack([self.codes & 15, self.codes >> 4], 2).flatten(1)[:, : self.inputs]

    def scales(self) -> Tensor:
        """Scales [out, groups] in float32."""
        scale = stepped(self.scale, self.step)
        if self.factor is None:
            return scale
        return scale / self.factor.unsqueeze(1) if self.divided else scale * self.factor.unsqueeze(1)

    def dequantize(self) -> Tensor:
        """Weight [out, inputs] in float32, each number rounded as by the tool that wrote the format."""
        values, missing = self.values(), -self.inputs % self.group
        grouped = F.pad(values, (0, missing)).view(*self.scale.shape, self.group)
        if self.zero is not None:
            grouped = grouped - self.zero.to(torch.float32).unsqueeze(2)
        found = grouped * self.scales().unsqueeze(2)
        if self.offset is not None:
            found = found - stepped(self.offset, self.offset_step).unsqueeze(2)
        found = found.flatten(1)[:, : self.inputs]
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order.long(), found)

    def dequantize_to(self, target: Tensor) -> None:
        """Write `dequantize` in the dtype of `target` [out, inputs], with compiled code if there is some."""
        compiled = library() if target.dtype == torch.bfloat16 and target.device.type == "cpu" else None
        whole = not (self.inputs % 2 or self.group % 2) and self.codes.is_contiguous() and target.is_contiguous()
        if compiled is None or not whole or not (_is_blocks(self) or (self.code is Code.FP4 and self.factor is None)):
            target.copy_(self.dequantize())
            return
        scale = self.scales().contiguous()
        offset = None if self.offset is None else stepped(self.offset, self.offset_step).contiguous()
        rows = struct_of(
            CodedRows, codes=self.codes, rows=len(self.codes), row_bytes=self.codes.stride(0), format=self.code.value,
            inputs=self.inputs, group=self.group, zero=ZEROS.get(self.code, 0) if offset is None else 0,
            scale=scale, offset=offset, numbers=target,
        )  # fmt: skip
        compiled.numbers(rows)

    def linear(self, x: Tensor, deterministic: bool = True) -> Tensor:
        """Product x W^T [M, out] of rows x [M, inputs] without the compiled kernels.

        The result is float32 if rows are rounded, otherwise it has x's dtype. The weight is dequantised in each call,
        so that at most one dequantised weight is in memory.
        """
        if self.dynamic and x.device.type == "cpu":
            return DYNAMIC.linear(x, self.rounded())
        if self.rounds_blocks and x.device.type == "cpu" and x.dtype == torch.bfloat16:
            offset = None if self.offset is None else stepped(self.offset, self.offset_step)
            return block_product(x, self.integers(), self.scales(), offset)
        return linear(x, self.dequantize().to(x.dtype), None, False, deterministic)

    @property
    def rounds_blocks(self) -> bool:
        """True if `block_rows` is set, and inputs and groups are whole blocks."""
        return self.block_rows and self.inputs % ROW_BLOCK == 0 and self.group in (16, ROW_BLOCK)

    def pack(self, bias: Tensor | None) -> PackedWeight:
        """Weight in the compiled kernels' layout; `bias` [out] bfloat16."""
        return packed([self], bias)

    def _pack(self, codes: Sequence[Tensor], bias: Tensor | None) -> PackedWeight:
        """Weight in the compiled kernels' layout with the given parts of codes, stacked by outputs, in place of its
        own.
        """
        if self.dynamic:
            return DYNAMIC.packed(self.shape, quads(*codes), padded_outputs(self.rounded().scale), bias)
        kind = {Code.INT4: BLOCK_INT4, Code.INT8: BLOCK_INT8}.get(self.code, self.code.value)
        return pack_codes(
            kind if self.rounds_blocks else self.code.value, self.shape, codes, self.scale, self.group, bias,
            factor=self._factor(), zero=self.zero, order=self.order, step=self.step, offset=self.offset,
            offset_step=self.offset_step,
        )  # fmt: skip

    def factors(self) -> Tensor:
        """Vector `factor`, ones if there is none."""
        return torch.ones(self.shape[0], device=self.codes.device) if self.factor is None else self.factor

    def zeros(self) -> Tensor:
        """Matrix `zero`, the code's own zero if there is none."""
        own = 8 if self.code is Code.INT4 else 0
        return torch.full(self.scale.shape, own, dtype=torch.int8) if self.zero is None else self.zero

    def rounded(self) -> UnpackedWeight:
        """Weight in our own int8 format; only if `dynamic`."""
        return UnpackedWeight(self.codes, self.scales()[:, 0].contiguous())

    def _factor(self) -> Tensor | None:
        return 1 / self.factor if self.factor is not None and self.divided else self.factor


def _columns(x: Tensor, share: range, width: int) -> Tensor:
    """Copy of the columns [out, ...] of `share` inputs, where an element spans `width` inputs."""
    return x[:, share.start // width : -(-share.stop // width)].contiguous()


def _fp4_values(codes: Tensor) -> Tensor:
    """Values in float32 of codes 0 .. 15, without a table, which a captured step would have to copy to its device."""
    size = codes & 7
    twice = torch.where(size < 2, size, ((size & 1) + 2) << ((size >> 1).clamp(min=1) - 1))
    value = twice.to(torch.float32) / 2
    return torch.where(codes > 7, -value, value)


def stepped(x: Tensor, step: Tensor | None) -> Tensor:
    """Scales or offsets [out, groups] in float32, each times the step of its block."""
    wide = x.to(torch.float32)
    if step is None:
        return wide
    return wide * step.to(torch.float32).repeat_interleave(x.shape[1] // step.shape[1], 1)


def alike(parts: Sequence[Coded]) -> list[Coded]:
    """Recode blocks of different types with equal inputs as codes of 6 or 8 bits with the smallest group,
    without loss.
    """
    if not any(differs(parts[0], part) for part in parts) or not all(map(_is_blocks, parts)):
        return list(parts)
    group, stepped_all = math.gcd(*(part.group for part in parts)), all(part.step is not None for part in parts)
    shifted, in_blocks = any(part.offset is not None for part in parts), all(part.rounds_blocks for part in parts)
    code = Code.INT8 if any(part.code is Code.INT8 for part in parts) or not in_blocks else Code.INT6
    group = 16 if code is Code.INT6 else group  # the groups of the compiled kernel

    def spread(part: Coded) -> Coded:
        times, numbers = part.group // group, part.integers()
        scale, offset, offset_step = (part.scale, part.offset, part.offset_step)
        if offset is None:
            offset, offset_step = torch.zeros_like(scale), part.step
        if not stepped_all:
            scale, offset, offset_step = part.scales(), stepped(offset, offset_step), None
        return Coded(
            code, numbers if code is Code.INT8 else _six_bits(numbers),
            scale.repeat_interleave(times, 1), part.inputs, group, step=part.step if stepped_all else None,
            offset=offset.repeat_interleave(times, 1) if shifted else None,
            offset_step=offset_step if shifted else None, block_rows=in_blocks,
        )  # fmt: skip

    return list(map(spread, parts))


def _six_bits(numbers: Tensor) -> Tensor:
    """Codes of 6 bits with zero at 32, joined, from int8 [out, inputs]."""
    codes, compiled = (numbers + 32).view(torch.uint8), None if numbers.is_meta else library()
    return join_bits(codes, 6) if compiled is None else compiled.join_bits(codes, 6)


def _is_blocks(part: Coded) -> bool:
    """True if a weight has integers without zero points, order, factors or rounded rows."""
    bare = part.factor is None and part.zero is None and part.order is None and not part.dynamic
    return bare and part.code in INTEGERS


def joined(parts: Sequence[Coded]) -> Coded:
    """Stack weights of equal inputs by outputs, without rounding again.

    Raises:
        ValueError: they cannot be one weight; the message states the difference.
    """
    parts = alike(parts)
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if reason := differs(first, part):
            raise ValueError(reason)
    whole: dict[str, Any] = {"codes": torch.cat([part.codes for part in parts])}
    dtypes = {part.scale.dtype for part in parts}
    scales = [part.scale if len(dtypes) == 1 else part.scale.to(torch.float32) for part in parts]
    whole["scale"] = torch.cat(scales)
    if any(part.factor is not None for part in parts):
        whole["factor"] = torch.cat([part.factors() for part in parts])
    if any(part.zero is not None for part in parts):
        whole["zero"] = torch.cat([part.zeros() for part in parts])
    for name in ("step", "offset", "offset_step"):
        if getattr(first, name) is not None:
            whole[name] = torch.cat([getattr(part, name) for part in parts])
    return replace(first, **whole)


def packed(parts: Sequence[Coded], bias: Tensor | None) -> PackedWeight:
    """Stack weights of equal inputs by outputs in the compiled kernels' layout; raises as `joined`."""
    parts = alike(parts)
    if parts[0].code in (Code.INT5, Code.INT6) and not parts[0].rounds_blocks:
        parts = [replace(part, code=Code.INT8, codes=part.integers()) for part in parts]
    facts = joined([replace(part, codes=part.codes[:, :0]) for part in parts])  # each code is copied once
    return facts._pack([part.codes for part in parts], bias)


def differs(one: Coded, other: Coded) -> str | None:
    """Reason why two weights of equal inputs cannot be one, None if they can."""
    for name in ("step", "offset", "offset_step"):
        if (getattr(one, name) is None) != (getattr(other, name) is None):
            return f"weights with and without {name}"
    for name in ("code", "inputs", "group", "divided", "dynamic", "block_rows"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            return f"{name} {getattr(mine, 'name', mine)} and {getattr(theirs, 'name', theirs)}"
    if (one.order is None) != (other.order is None):
        return "inputs in their own order and in another one (g_idx)"
    if one.order is not None and other.order is not None and not torch.equal(one.order, other.order):
        return "inputs in different orders (g_idx)"
    return None
