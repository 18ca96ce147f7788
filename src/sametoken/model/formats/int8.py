"""Eight-bit weights with one scale an output: products with eight-bit rows (W8A8), or with bfloat16 rows.

W8A8 quantises each row as it comes (dynamic, per token). Its sums are integers, so every implementation agrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.cpu.library import INT8, INT8_WEIGHT_ONLY, PackedWeight
from sametoken.model.formats.base import UnpackedWeight, integer_product, signed_bytes
from sametoken.model.formats.packing import packed_weight, padded_outputs, pairs, quads
from sametoken.model.formats.search import rounded_by_rows
from sametoken.model.product import linear


@dataclass(frozen=True)
class Int8:
    """Symmetric format with a scale per output; `dynamic` is W8A8, otherwise rows stay bfloat16."""

    name: str
    dynamic: bool

    def quantise(self, weight: Tensor) -> UnpackedWeight:
        return rounded_by_rows(self._rounded, weight)

    def _rounded(self, weight: Tensor) -> UnpackedWeight:
        wide = weight.to(torch.float32)
        scale = wide.abs().amax(1) / 127
        divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
        return UnpackedWeight((wide / divisor).round().clamp(-127, 127).to(torch.int8), scale)

    def dequantize(self, stored: UnpackedWeight, inputs: int) -> Tensor:
        return stored.values[:, :inputs].to(torch.float32) * stored.scale.unsqueeze(1)

    def linear(self, x: Tensor, stored: UnpackedWeight) -> Tensor:
        if not self.dynamic:  # eight bits fit bfloat16 exactly
            return linear(x, stored.values.to(x.dtype), None, packed=False).to(torch.float32) * stored.scale
        rows, scale = signed_bytes(x)
        return integer_product(rows, stored.values) * scale * stored.scale

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        stored = self.quantise(weight)
        data = quads(stored.values) if self.dynamic else pairs(stored.values)
        return self.packed((weight.shape[0], weight.shape[1]), data, padded_outputs(stored.scale), bias)

    def packed(self, shape: tuple[int, int], data: Tensor, scale: Tensor, bias: Tensor | None) -> PackedWeight:
        return packed_weight(INT8 if self.dynamic else INT8_WEIGHT_ONLY, shape, data, scale=scale, bias=bias)
