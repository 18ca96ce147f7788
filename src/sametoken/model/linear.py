"""Linear layers with prepacked weights, whose rows do not depend on the number of rows in the call.

On CPU a bfloat16 or quantised weight is packed for the compiled kernels, which read it at the speed of memory for any
number of rows. Without the kernels, and in float32, it is reordered for oneDNN and multiplied as in `product`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.kernels.cpu.library import BF16, Library, PackedWeight
from sametoken.kernels.cpu.structures import FINITE_BF16
from sametoken.kernels.cpu.variant import library
from sametoken.kernels.devices import device_type
from sametoken.model.formats.base import UnpackedWeight, WeightFormat
from sametoken.model.formats.coded import Coded, alike, differs, joined, packed
from sametoken.model.formats.coded_packing import move_outputs, selected
from sametoken.model.formats.packing import Tiles, pack_bfloat16, packed_weight, pair_tiles
from sametoken.model.formats.straight import TrainedForm
from sametoken.model.product import can_pack, linear


def kernels_for(weight: Tensor) -> Library | None:
    """Compiled kernels, None if they cannot hold this weight."""
    return library() if device_type(weight) == "cpu" and weight.dtype == torch.bfloat16 else None


class Linear(nn.Module):
    """Layer y = x W^T + b. Built plain; `pack()` replaces the filled weight by its fast form.

    Attributes:
        wide: results are float32 for rows of any dtype.
        format: format to which `pack` quantises the weight, None for no quantisation.
        packed: true if `weight` was reordered for oneDNN.
        native: the weight in the compiled kernels' layout, None if they are not used.
        stored: the quantised weight, if they are not used.
        coded: a weight that another tool quantised, if they are not used.
        trained: in training, replacement of the weight and the rows; None for none.
    """

    weight: Tensor
    bias: Tensor | None
    deterministic = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        format: WeightFormat | None = None,
        *,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format, self.wide = in_features, out_features, format, wide
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.packed = False
        self.native: PackedWeight | None = None
        self.stored: UnpackedWeight | None = None
        self.coded: Coded | None = None
        self.trained: TrainedForm | None = None
        self._parts: dict[int, Coded] = {}
        self._tiles: Tiles | None = None
        self._library: Library | None = None

    def adopt(self, row: int, part: Coded) -> None:
        """Set the outputs from `row` on of a weight that another tool quantised; `pack` joins the parts.

        Raises:
            ValueError: it does not fit the earlier parts; the message states the difference.
        """
        for other in self._parts.values():
            if reason := differs(*alike([other, part])):
                raise ValueError(reason)
        self._parts[row] = part

    def packs_plain(self, device: torch.device) -> bool:
        """True if `place` can take the parts of a weight on a device."""
        compiled = device.type == "cpu" and self.weight.dtype == torch.bfloat16 and library() is not None
        return compiled and self.format is None

    def place(self, row: int, part: Tensor) -> bool:
        """Pack the outputs from `row` on of a plain weight, `part` [R, in]; False if a number is not finite."""
        if self._tiles is None:
            self._tiles = pair_tiles(self.out_features, self.in_features, torch.bfloat16)
        return self._tiles.put(row, part.to(torch.bfloat16), FINITE_BF16)

    def _pack_parts(self) -> None:
        parts = [self._parts[row] for row in sorted(self._parts)]
        self._parts.clear()
        on_cpu = device_type(parts[0].codes) == "cpu" and self.weight.dtype == torch.bfloat16
        self._library = library() if on_cpu else None
        if self._library is None:
            self.coded = joined(parts)
        else:
            self.native = packed(parts, None if self.bias is None else self.bias.detach())

    def pack(self) -> None:
        """Pack the weight and free the plain one; a second call changes nothing."""
        if self.packed or self.native is not None or self.stored is not None or self.coded is not None:
            return
        if self._parts:
            self._pack_parts()
            del self.weight
            return
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self._library = kernels_for(weight)
        if self._tiles is not None:
            shape, self._library = (self.out_features, self.in_features), library()
            self.native, self._tiles = packed_weight(BF16, shape, self._tiles.data, bias=bias), None
        elif self.format is not None:
            if self._library is None:
                self.stored = self.format.quantise(weight)
            else:
                self.native = self.format.pack(weight, bias)
        elif self._library is not None:
            self.native = pack_bfloat16(weight, bias)
        elif can_pack(weight := self._widened(weight)):
            del self.weight
            meta = weight.is_meta
            self.weight = torch.empty_like(weight) if meta else torch.ops.mkldnn._reorder_linear_weight(weight)
            self.packed = True
            return
        else:
            return
        del self.weight

    def restore(self, packed: PackedWeight) -> None:
        """Set a packed weight; the bias stays plain.

        Raises:
            ValueError: it has another shape.
        """
        if (packed.weight.outputs, packed.weight.inputs) != (self.out_features, self.in_features):
            raise ValueError(f"weight of {packed.weight.outputs} outputs and {packed.weight.inputs} inputs")
        self.native, self._library = packed, library()
        del self.weight

    def selected(self, ids: Tensor) -> Linear:
        """Layer with the outputs `ids` [N] int64 alone, in that order; packed weights are not rounded again."""
        with torch.device("meta"):
            found = Linear(self.in_features, len(ids), False, torch.float32, self.format, wide=self.wide)
        found.deterministic, found._library = self.deterministic, self._library
        found.bias = None if self.bias is None else nn.Parameter(self.bias[ids], requires_grad=False)
        if self.native is not None:
            found.native = selected(self.native, ids)
        elif self.stored is not None:
            found.stored = UnpackedWeight(self.stored.values[ids], self.stored.scale[ids])
        elif self.coded is not None:
            found.coded = self.coded.outputs(ids)
        else:
            found.weight = nn.Parameter(self._plain()[ids], requires_grad=False)
            return found
        del found.weight
        return found

    def replace_outputs(self, places: Tensor, source: Linear, ids: Tensor) -> None:
        """Replace the outputs `places` [N] int64 of a layer from `source.selected` by the outputs `ids` of `source`."""
        if self.bias is not None and source.bias is not None:
            self.bias[places] = source.bias[ids]
        if self.native is not None and source.native is not None:
            move_outputs(source.native, ids, self.native, places)
        elif self.stored is not None and source.stored is not None:
            for own, other in zip(self.stored, source.stored, strict=True):
                own[places] = other[ids]
        elif self.coded is not None and source.coded is not None:
            self.coded.replace_outputs(places, source.coded.outputs(ids))
        else:
            self.weight[places] = source._plain()[ids]

    def _plain(self) -> Tensor:
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight

    @property
    def matrix(self) -> Tensor:
        """Matrix [out, in] of a training forward."""
        return self.weight if self.trained is None else self.trained.matrix(self.weight)

    def rows(self, x: Tensor) -> Tensor:  # [..., in] -> [..., in]
        """Rows of a training forward, multiplied by `matrix`."""
        return x if self.trained is None else self.trained.rows(x)

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        dtype = torch.float32 if self.wide else x.dtype
        if self.native is not None and self._library is not None:
            return self._library.linear(self.native, x, dtype)
        x = x.to(dtype)
        if self.stored is not None and self.format is not None:
            y = self.format.linear(x, self.stored)
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        if self.coded is not None:
            y = self.coded.linear(x, self.deterministic)
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        if self.weight.requires_grad:  # in training
            return F.linear(self.rows(x), self._widened(self.matrix), self.bias)
        return linear(x, self._widened(self.weight), self.bias, self.packed, self.deterministic)

    def _widened(self, weight: Tensor) -> Tensor:
        return weight.float() if self.wide else weight


class Embedding(nn.Module):
    """Token embedding, which a tied model also reads as its output head.

    Args:
        tied: true if `project` is used. The compiled kernels read one packed table for both. Without them a small table
            gets a second, prepacked copy, since repacking it in every call costs more than reading it; a large one is
            read at memory speed without a copy, which would take too much memory. Quantised by `format`, the head is a
            copy.
        scored: tokens whose logits such a copy computes, None for all.

    Attributes:
        weight: [count, size] the vectors; absent where another tool quantised them, tiles where `table` is bfloat16.
        table: the vectors in the compiled kernels' layout, None where they lie in `weight`.
    """

    COPY_BYTES = 32 * 2**20
    weight: Tensor
    deterministic = True

    def __init__(
        self,
        count: int,
        size: int,
        dtype: torch.dtype,
        *,
        tied: bool,
        format: WeightFormat | None = None,
        scored: range | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size, dtype=dtype), requires_grad=False)
        self.count, self.size, self.tied, self.format = count, size, tied, format
        self.scored = range(count) if scored is None or format is None else scored
        self.dtype = dtype
        self.head: Linear | None = None
        self.table: PackedWeight | None = None
        self._coded: dict[int, Coded] = {}

    @property
    def device(self) -> torch.device:
        return self.weight.device if self.table is None else self.table.parts["data"].device

    def adopts(self, part: Coded) -> bool:
        """True if `adopt` can take embeddings that another tool quantised."""
        compiled = device_type(part.codes) == "cpu" and self.dtype == torch.bfloat16 and library() is not None
        return compiled and part.rounds_blocks and len(self.scored) == self.count

    def adopt(self, row: int, part: Coded) -> None:
        """Set the embeddings from `row` on that another tool quantised; `pack` joins the parts.

        Raises:
            ValueError: see `Linear.adopt`.
        """
        self._coded[row] = part

    def pack(self) -> None:
        """Pack the embeddings and the output head; a second call changes nothing."""
        if self._coded:
            head = self._new_head()
            for row, part in self._coded.items():
                head.adopt(row, part)
            head.pack()
            self._coded.clear()
            del self.weight
            self.table, self.head = head.native, head if self.tied else None
        if self.table is not None:
            return
        weight = self.weight.detach()
        copied = weight.nbytes <= self.COPY_BYTES and can_pack(weight)
        if not self.tied or self.head is not None or not (self.format or kernels_for(weight) or copied):
            return
        head = self._new_head()
        head.weight = nn.Parameter(weight[self.scored.start : self.scored.stop], requires_grad=False)
        head.pack()
        if self.format is None and head.native is not None:
            del self.weight
            self.weight, self.table = head.native.parts["data"], head.native
        self.head = head

    def restore(self, packed: PackedWeight, *, table: bool) -> None:
        """Set packed embeddings (`table`), which a tied model also reads as its head, or the head alone.

        Raises:
            ValueError: see `Linear.restore`.
        """
        head = self._new_head()
        head.restore(packed)
        if table:
            del self.weight
            self.table = packed
            if packed.weight.format == BF16:
                self.weight = packed.parts["data"]
        if self.tied:
            self.head = head

    @property
    def whole_head(self) -> Linear:
        """Output head of a tied model, whose weight is shared where it has no copy."""
        if self.head is not None:
            return self.head
        found = self._new_head()
        found.weight, found.deterministic = self.weight, self.deterministic
        return found

    def _new_head(self) -> Linear:
        return Linear(self.size, len(self.scored), False, self.dtype, self.format)

    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [T, size]
        compiled = library()
        if self.table is None or compiled is None:
            return F.embedding(tokens, self.weight)
        return compiled.rows(self.table, tokens)

    def project(self, x: Tensor) -> Tensor:  # [R, size] -> [R, count]
        if self.head is None:
            return linear(x, self.weight, None, False, self.deterministic)
        projected: Tensor = self.head(x)
        return projected
