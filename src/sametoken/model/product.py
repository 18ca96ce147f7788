"""Products x W^T of plain torch whose rows do not depend on the number of rows.

On CPU never one row alone (another kernel) and at most ROW_BLOCK rows a call (beyond, oneDNN blocks the reduction
differently by row count). Both limits were measured; `tests/kernels/test_row_invariance.py` holds them. On CUDA the
library chooses a kernel by row count, so there every product has a fixed number of rows, if `deterministic`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.devices import device_type

ROW_BLOCK = {torch.bfloat16: 32, torch.float16: 32, torch.float32: 1024}
CUDA_ROWS = 64
PACKABLE = (torch.bfloat16, torch.float32)


def can_pack(weight: Tensor) -> bool:
    """True if oneDNN supports a prepacked form of this weight on this machine."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device_type(weight) != "cpu" or weight.dtype not in PACKABLE or not available:
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool, deterministic: bool = True) -> Tensor:
    """Compute x W^T + b.

    Args:
        x: [M, in]; M >= 2 on CPU if `deterministic`.
        packed: true if `weight` [out, in] was reordered for oneDNN.
        deterministic: compute equal bits of a row for every M.
    """
    if not deterministic:
        return _block(x, weight, bias, packed)
    if x.device.type != "cpu":
        return in_tiles(x, CUDA_ROWS, weight, bias)
    block = ROW_BLOCK[x.dtype]
    if x.shape[0] <= block:
        return _block(x, weight, bias, packed)
    # The last block overlaps the one before it when it would be a single row.
    whole = torch.split(x[: _whole(x.shape[0], block)], block)
    pieces = [_block(piece, weight, bias, packed) for piece in whole]
    if len(pieces) * block < x.shape[0] and x.shape[0] % block == 1:
        pieces.append(_block(x[-2:], weight, bias, packed)[1:])
    return torch.cat(pieces)


def in_tiles(x: Tensor, rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b in products of exactly `rows` rows, the last one padded with zeros."""
    count = x.shape[0]
    if count <= rows:
        return F.linear(F.pad(x, (0, 0, 0, rows - count)), weight, bias)[:count]
    tiles = torch.split(F.pad(x, (0, 0, 0, -count % rows)), rows)
    return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:count]


def _whole(rows: int, block: int) -> int:
    """Number of leading rows that blocks of two or more cover."""
    return rows - 1 if rows % block == 1 else rows


def _block(x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    # F.linear in float32 is not oneDNN's, and its reduction depends on the number of rows; in bfloat16 it is oneDNN's.
    if packed or (x.dtype == torch.float32 and can_pack(weight)):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)
