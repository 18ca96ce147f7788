"""Codes of 5 and 6 bits in bytes: of each 32 codes the low four bits, then the bits above, as blocks.h reads them.

Code 4 j + b lies in byte 4 (j / 2) + b, the low half where j is even. Of six bits, its upper two lie in byte
16 + 4 (j / 4) + b from bit 2 (j % 4) on; of five, its upper one in byte 16 + b at bit j.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits, uint8 [..., n], into uint8 [..., n * bits / 8]; n is a multiple of 32."""
    fields = 8 // (bits - 4)
    split = codes.view(*codes.shape[:-1], -1, 8, 4)
    low = split[..., 0::2, :] & 15 | split[..., 1::2, :] << 4
    shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=codes.device).repeat(8 // fields).view(-1, 1)
    high = (split >> 4 << shifts).view(*split.shape[:-2], -1, fields, 4).sum(-2, dtype=torch.uint8)
    return torch.cat([low, high], -2).flatten(-3)


def split_bits(packed: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., n] from the result of `join_bits`."""
    units = packed.view(*packed.shape[:-1], -1, bits, 4)
    shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=packed.device).view(-1, 1)
    low = torch.stack([units[..., :4, :] & 15, units[..., :4, :] >> 4], -2).flatten(-3, -2)
    high = (units[..., 4:, :].unsqueeze(-2) >> shifts & (1 << bits - 4) - 1).flatten(-3, -2)
    found: Tensor = low | high << 4
    return found.flatten(-3)
