"""Linear layers with prepacked weights, whose rows do not depend on how many rows stand beside them.

On CPU a bfloat16 or quantised weight is packed for the compiled kernels, which read it at the speed of memory whatever
the number of rows. Where there are none, and in float32, it is reordered for oneDNN. The price of a fixed arithmetic
per row there: never one row alone (another kernel) and at most ROW_BLOCK rows a call (beyond, oneDNN blocks the
reduction differently by row count). Both limits were measured; `tests/test_row_invariance.py` holds them. On CUDA the
library chooses a kernel by row count, so there every product has the same number of rows, if that is asked for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.model.formats.base import Stored, WeightFormat
from sametoken.model.formats.packing import pack_bfloat16, unpaired
from sametoken.native.library import Library, PackedWeight, library

ROW_BLOCK = {torch.bfloat16: 32, torch.float16: 32, torch.float32: 1024}
CUDA_ROWS = 64
PACKABLE = (torch.bfloat16, torch.float32)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight prepacked on this machine."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or weight.dtype not in PACKABLE or not available:
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def kernels_for(weight: Tensor) -> Library | None:
    """The compiled kernels, if they can hold this weight."""
    return library() if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool, deterministic: bool = True) -> Tensor:
    """x W^T + b.

    Args:
        x: [M, in]; M >= 2 on CPU if `deterministic`.
        packed: whether `weight` [out, in] was reordered for oneDNN.
        deterministic: give a row the same bits whatever M is.
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
    """x W^T + b in products of exactly `rows` rows, the last one padded with zeros."""
    count = x.shape[0]
    if count <= rows:
        return F.linear(F.pad(x, (0, 0, 0, rows - count)), weight, bias)[:count]
    tiles = torch.split(F.pad(x, (0, 0, 0, -count % rows)), rows)
    return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:count]


def _whole(rows: int, block: int) -> int:
    """Rows that blocks of two or more cover."""
    return rows - 1 if rows % block == 1 else rows


def _block(x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
    # F.linear in float32 is not oneDNN's, and its reduction depends on the number of rows; in bfloat16 it is the same.
    if packed or (x.dtype == torch.float32 and can_pack(weight)):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


class Linear(nn.Module):
    """y = x W^T + b. Built plain; `pack()` replaces the weight by its fast form once it is filled.

    Attributes:
        format: what `pack` quantises the weight to, None for nothing.
        packed: whether `weight` was reordered for oneDNN.
        native: the weight in the compiled kernels' layout, where they are used.
        stored: the quantised weight where they are not.
    """

    weight: Tensor
    bias: Tensor | None
    deterministic = True

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, format: WeightFormat | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = in_features, out_features, format
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.packed = False
        self.native: PackedWeight | None = None
        self.stored: Stored | None = None
        self._library: Library | None = None

    def pack(self) -> None:
        """Packs the weight and frees the plain one; a second call changes nothing."""
        if self.packed or self.native is not None or self.stored is not None:
            return
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self._library = kernels_for(weight)
        if self.format is not None:
            stored = self.format.quantise(weight)
            if self._library is None:
                self.stored = stored
            else:
                self.native = self.format.pack(stored, self.in_features, bias)
        elif self._library is not None:
            self.native = pack_bfloat16(weight, bias)
        elif can_pack(weight):
            del self.weight
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            self.packed = True
            return
        else:
            return
        del self.weight

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        if self.native is not None and self._library is not None:
            return self._library.linear(self.native, x, x.dtype)
        if self.stored is not None and self.format is not None:
            y = self.format.linear(x, self.stored)
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        if self.weight.requires_grad:  # in training
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, self.packed, self.deterministic)


class Embedding(nn.Module):
    """Token vectors, which a tied model also reads as its output head.

    Args:
        tied: whether `project` is used. The compiled kernels read one packed table for both. Without them a small table
            gets a second, prepacked copy, since repacking it in every call costs more than reading it; a large one is
            read at memory speed as it is, and a copy would be felt. Quantised, the head is a copy of its own.
    """

    COPY_BYTES = 32 * 2**20
    weight: Tensor
    deterministic = True

    def __init__(
        self, count: int, size: int, dtype: torch.dtype, *, tied: bool, format: WeightFormat | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size, dtype=dtype), requires_grad=False)
        self.count, self.size, self.tied, self.format = count, size, tied, format
        self.head: Linear | None = None
        self.paired = False  # whether the table itself lies in the compiled kernels' layout

    def pack(self) -> None:
        """Packs what the head reads; a second call changes nothing."""
        weight = self.weight.detach()
        copied = weight.nbytes <= self.COPY_BYTES and can_pack(weight)
        if not self.tied or self.head is not None or not (self.format or kernels_for(weight) or copied):
            return
        head = Linear(self.size, self.count, False, weight.dtype, self.format)
        head.weight = nn.Parameter(weight, requires_grad=False)
        head.pack()
        if self.format is None and head.native is not None:
            del self.weight
            self.weight, self.paired = head.native.kept[0], True
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [T, size]
        return unpaired(self.weight, tokens, self.size) if self.paired else F.embedding(tokens, self.weight)

    def project(self, x: Tensor) -> Tensor:  # [R, size] -> [R, count]
        if self.head is None:
            return linear(x, self.weight, None, False, self.deterministic)
        projected: Tensor = self.head(x)
        return projected
