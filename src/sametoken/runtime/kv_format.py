"""Storage formats of KV caches: plain numbers, or 8-bit codes with one scale for each vector of a token and head.

The codes of a vector depend on that vector alone, not on its batch, page, prompt chunk or draft tree. So equal tokens
have equal bits, as in a cache of plain numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BYTES = 4  # float32
LEAST_SCALE = 2.0**-100  # for a vector of zeros, to avoid division by 0


class KVFormat(NamedTuple):
    """Storage format of a vector.

    Attributes:
        stored: dtype of a number or code; None for the model's own.
        greatest: code of a vector's greatest number; None for plain numbers, which have no scale.
    """

    stored: torch.dtype | None = None
    greatest: float | None = None

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Dtype of the stored numbers or codes for a model of dtype `model`."""
        return self.stored or model

    def vector_bytes(self, parts: tuple[int, ...], model: torch.dtype) -> int:
        """Size in bytes of a stored vector of `parts` numbers, each part with a scale."""
        scales = 0 if self.greatest is None else SCALE_BYTES * len(parts)
        return sum(parts) * self.dtype(model).itemsize + scales

    def encode_parts(self, x: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Encode vectors [T, heads, D]: codes [T, heads, D] and scales [T, heads * parts], or numbers and None."""
        if self.greatest is None or len(parts) == 1:
            return self.encode(x)
        codes, scales = zip(*map(self.encode, torch.split_with_sizes(x, parts, -1)), strict=True)
        return torch.cat(codes, -1), torch.stack(scales, -1).flatten(1)

    def decode_parts(self, codes: Tensor, scales: Tensor | None, parts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode vectors [..., heads, D] from codes and scales [..., heads * parts]."""
        if scales is None or len(parts) == 1:
            return self.decode(codes, scales, dtype)
        own = scales.view(*scales.shape[:-1], -1, len(parts)).unbind(-1)
        pieces = zip(torch.split_with_sizes(codes, parts, -1), own, strict=True)
        return torch.cat([self.decode(piece, scale, dtype) for piece, scale in pieces], -1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encode vectors [..., D]: codes [..., D] and scales [...], or numbers and None."""
        if self.greatest is None:
            return (x if self.stored is None else x.to(self.stored)), None
        x = x.float()
        scale = (x.abs().amax(-1) / self.greatest).clamp(min=LEAST_SCALE)
        codes = x / scale.unsqueeze(-1)
        return (codes.round().to(torch.int8) if self is INT8 else codes.to(FLOAT8).view(torch.uint8)), scale

    def decode(self, codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode codes into vectors [..., D] in `dtype`."""
        if scale is None:
            return codes.to(dtype)
        numbers = codes if self is INT8 else codes.view(FLOAT8)
        return (numbers.float() * scale.unsqueeze(-1)).to(dtype)


FLOAT8 = torch.float8_e4m3fn  # stored as bytes, which every operation can move
INT8 = KVFormat(torch.int8, 127.0)
FP8 = KVFormat(torch.uint8, 448.0)
OWN = KVFormat()  # numbers in the model's dtype
FORMATS = {"auto": OWN, "bfloat16": KVFormat(torch.bfloat16), "int8": INT8, "fp8": FP8, "fp8_e4m3": FP8}
