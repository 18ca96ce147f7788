"""Products with rows in bytes of which 32 share a scale, in plain torch: llama.cpp's arithmetic for its own formats.

blocks.h does the same operations in the same order, with equal bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.model.formats.base import signed_bytes

ROW_BLOCK = 32  # inputs of a row that are rounded to bytes with one scale


def block_product(x: Tensor, values: Tensor, scales: Tensor, offset: Tensor | None) -> Tensor:
    """Product x W^T, [M, out] float32, with the rows of x rounded and W = values * scales - offset by groups of inputs.

    Args:
        x: [M, in] bfloat16, of whole blocks.
        values: [out, in] int8.
        scales, offset: [out, groups] float32; groups have 16 or 32 inputs.
    """
    groups = scales.shape[1]
    q, scale = signed_bytes(x.reshape(-1, ROW_BLOCK))
    rows, weights = q.to(torch.float32).view(len(x), groups, -1), values.to(torch.float32).view(len(values), groups, -1)
    row_scale = scale.view(len(x), -1).repeat_interleave(ROW_BLOCK // rows.shape[2], 1)
    total = torch.zeros(len(x), len(values))
    for group in range(groups):  # integers are exact in float32
        one = row_scale[:, group : group + 1]
        total = total + F.linear(rows[:, group], weights[:, group]) * scales[:, group] * one
        if offset is not None:
            total = total - offset[:, group] * (one * rows[:, group].sum(1, keepdim=True))
    return total
