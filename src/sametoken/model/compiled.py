"""Blocks of a decoder as one call of the compiled kernels: configuration and weights in the kernels' structures.

The kernels compute `model.block.Block` in its order and with its roundings; heads use them too. The bits of a row do
not depend on other rows, without tiles of rows, padded keys or trees split into chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, addressof, c_float, c_int32, c_int64, c_void_p, cast, pointer
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.control.worth import Worth
from sametoken.kernels.cpu.library import Library
from sametoken.kernels.cpu.structures import (
    CSpan,
    Draw,
    Feed,
    Growth,
    Layer,
    Model,
    Output,
    Pages,
    address,
    struct_of,
)
from sametoken.kernels.cpu.variant import library
from sametoken.model.block import Block
from sametoken.model.compiled_guesses import Committed, Guesses, PricedGuesses, TreeBounds
from sametoken.model.compiled_layers import ACTIVATIONS, LANES, experts_of, layer_of, linears_of, packed
from sametoken.model.config import ModelConfig
from sametoken.model.layers import RMSNorm, capped
from sametoken.model.linear import Embedding, Linear
from sametoken.model.rope_config import RopeConfig
from sametoken.model.rotary import query_scales
from sametoken.runtime.cache import KVCache, Span, View
from sametoken.runtime.draw import draw_of
from sametoken.runtime.kv_format import FP8, INT8
from sametoken.runtime.ranks import Columns, NativeExchange, Ranks
from sametoken.speculation.rows import Sampling

KV_FORMS = {INT8: 1, FP8: 2}  # numbers in kv_codes.h; bfloat16 is 0
SUM = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
GATHER = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)


def not_compiled(config: ModelConfig) -> str | None:
    """Feature of this configuration that the kernels lack, so that torch runs the blocks; None if there is none."""
    lacking = {
        "latent attention": config.latent is not None,
        "experts between norms other than the usual, or with multipliers": config.experts is not None
        and (config.norms != ("before",) or config.residual_scale != 1),
    }
    return ", ".join(what for what, present in lacking.items() if present) or None


class Parts(NamedTuple):
    """Parts of a compiled model.

    Attributes:
        config: configuration of the blocks.
        blocks: blocks in order.
        rope: function from a device and a RoPE configuration to cos and sin [positions, 1, rotated size].
        embed: token embedding.
        norm: norm before the output head, None for none.
        head: output head, packed.
        ids: [outputs] int64 target's token id of each output of the head.
        scale, cap: scale and cap of the logits, see `ModelConfig`.
        ranks: processes that compute the blocks together, None for one process.
        columns: outputs that `head` computes if each rank has some of them; None if it has all.
    """

    config: ModelConfig
    blocks: list[Block]
    rope: Callable[[torch.device, RopeConfig], tuple[Tensor, Tensor]]
    embed: Embedding
    norm: RMSNorm | None
    head: Linear
    ids: Tensor
    scale: float = 1.0
    cap: float | None = None
    ranks: Ranks | None = None
    columns: Columns | None = None

    def fit(self, *others: Linear) -> bool:
        """True if the kernels support the parts and the linears `others`."""
        if not_compiled(self.config) is not None:
            return False
        config, linears = self.config, [*chain.from_iterable(map(linears_of, self.blocks)), self.head, *others]
        whole = all(linear.native is not None for linear in linears) and self.embed.dtype == torch.bfloat16
        sparse = (0, 0) if config.experts is None else (config.experts.width, config.experts.shared)
        widths = config.hidden_size, config.intermediate_size, config.head_dim, *sparse
        return library() is not None and whole and not any(width % LANES for width in widths)


class Compiled:
    """Base class of compiled decoders and heads: blocks and output head on the CPU.

    Args:
        recycled: true if a forward after a guess reads the state after the norm.
        join: input of a head's first block, None for a decoder.
    """

    ahead = 0  # offset from the index of a row's next token to the position of its first guess

    def __init__(self, parts: Parts, kernels: Library, recycled: bool = False, join: Any = None) -> None:
        config, embed, self._kernels = parts.config, parts.embed, kernels
        experts = [experts_of(block, config) for block in parts.blocks]
        tables = [None if block.rope is None else parts.rope(torch.device("cpu"), block.rope) for block in parts.blocks]
        scales = None if config.query_scale is None else query_scales(*config.query_scale, config.max_position)
        own_scales = [None if block.rope is not None else scales for block in parts.blocks]
        layers = (Layer * config.num_layers)(*map(layer_of, parts.blocks, experts, tables, own_scales))
        self._head, self._norm, self._parts = packed(parts.head), parts.norm, parts
        self._paged: tuple[KVCache, Pages] | None = None  # exceptions of the last call
        self._raised: list[BaseException] = []  # raised in `sum` and `gather`, which the kernels call
        exchange = None if parts.ranks is None else parts.ranks.native
        calls: tuple[Any, ...] = ()
        if parts.ranks is not None and exchange is None:
            calls = _sum(parts.ranks, self._raised), _gather(parts.ranks, parts.columns, self._raised)
            summed, gathered = (cast(call, c_void_p).value for call in calls)
            exchange = NativeExchange(summed, gathered, None)
        self._model = struct_of(
            Model, layers=config.num_layers, hidden=config.hidden_size, heads=config.num_heads,
            kv_heads=config.num_kv_heads, head_size=config.head_dim, rotated=config.rope.dim,
            intermediate=config.intermediate_size, activation=ACTIVATIONS[config.activation], eps=config.norm_eps,
            embed=None if embed.table else embed.weight.detach(), table=embed.table and pointer(embed.table.weight),
            vocabulary=embed.count,
            positions=config.max_position, layer=layers, join=join, whole_norms=config.whole_qk_norm,
            interleaved=config.rope.interleaved, norm_shift=config.norm_shift, residual_scale=config.residual_scale,
            embed_scale=torch.tensor(config.embed_scale, dtype=torch.bfloat16).item(),
            attention_scale=config.attention_scale or 0, attention_cap=config.attention_cap or 0,
            chunks=config.chunked, wide_rotation=config.rope.wide, rotated_norm=config.rotated_norm,
            sum=exchange and exchange.sum, ranks=exchange and exchange.ranks,
        )  # fmt: skip
        self._ids = ids = torch.zeros(-(-len(parts.ids) // LANES) * LANES, dtype=torch.int32)
        ids[: len(parts.ids)] = parts.ids
        norm = None if parts.norm is None else parts.norm.weight.detach()
        begins = None if parts.columns is None else torch.tensor(parts.columns.begins)
        self._output = struct_of(
            Output, head=pointer(self._head.weight), norm=norm, ids=ids, recycled=recycled,
            scale=parts.scale, cap=parts.cap or 0, outputs=len(parts.ids), begins=begins,
            gather=exchange and exchange.gather,
        )  # fmt: skip
        self._kept = (tables, scales, layers, experts, ids, join, calls, begins)  # targets of the structures' pointers
        self._nbytes = sum(packed(linear).nbytes for block in parts.blocks for linear in linears_of(block))

    def rename_outputs(self, places: Tensor, ids: Tensor) -> None:
        """Set the tokens `ids` [N] of the outputs `places` [N] of the head."""
        self._ids[places] = ids.to(torch.int32)

    def _run(self, tokens: Tensor, x: Tensor, cache: KVCache, view: View, taps: Sequence[Tensor | None]) -> Tensor:
        kept = [(span, span.ancestor_mask.contiguous()) for span in view.spans]
        spans = [_span(span, ancestor_mask) for span, ancestor_mask in kept]
        self._kernels.forward(self._model, self._pages(cache), spans, tokens.contiguous(), x, taps, self._nbytes)
        self._raise()
        return x

    def _raise(self) -> None:
        """Raise the first error of callbacks in calls of the kernels."""
        if self._raised:
            raise self._raised.pop()

    def guess(
        self, committed: Committed, cache: KVCache, limits: Sequence[int], sampling: Sampling, worth: Worth | None
    ) -> Guesses:
        """Read committed tokens and draft a chain after them.

        Args:
            limits: draft length of each row; tokens are drawn by the target's sampling, and the last one is not read.
            sampling: sampling of the same rows, not `edited`.
            worth: value of guesses, which ends rows where guesses do not pay and adds siblings where they do; None
                for the full `limits` in every row.
        """
        levels, costed = max(limits), None if worth is None else PricedGuesses(worth, limits)
        with self._reading(committed, sampling) as (feed, draw):
            nbytes, priced = (self._nbytes, self._head.nbytes), None if costed is None else costed.struct
            found = self._kernels.guess(
                self._model, self._pages(cache), feed, self._output, draw, priced, levels, nbytes
            )
        self._raise()
        return Guesses(*found) if costed is None else Guesses(*found, costed.ended, costed.tree)

    def grow(
        self, committed: Committed, cache: KVCache, bounds: TreeBounds, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read committed tokens and grow a draft tree from each row's last token.

        Returns:
            [B, N] int64 each: tokens and parents, as in a `Draft`, and the slot of a node's KV past the row's length,
            -1 for none.
        """
        batch, most = len(committed.rows), max(bounds.budgets)
        found = torch.empty(3, batch, 1 + most, dtype=torch.int64)
        tokens, parents, written = found
        limits, budgets = ((c_int32 * batch)(*each) for each in (bounds.limits, bounds.budgets))
        growth = struct_of(
            Growth, branches=bounds.branches, levels=max(bounds.limits), most=most, limits=addressof(limits),
            budgets=addressof(budgets), tokens=tokens, parents=parents, written=written,
        )  # fmt: skip
        with self._reading(committed, sampling) as (feed, draw):
            nbytes = self._nbytes, self._head.nbytes
            self._kernels.grow(self._model, self._pages(cache), feed, self._output, draw, growth, nbytes)
        tokens, parents, written = found[:, :, : growth.nodes]
        return tokens, parents, written

    @contextmanager
    def _reading(self, committed: Committed, sampling: Sampling) -> Iterator[tuple[Feed, Draw]]:
        """Structures of the rows' input tokens and sampling, for a call of the kernels inside the context."""
        batch, lengths = len(committed.rows), [len(tokens) for tokens in committed.tokens]
        width = max(lengths)
        tokens = _longs([*chain.from_iterable([*row, *[0] * (width - len(row))] for row in committed.tokens)])
        rows, starts, counts = _longs(committed.rows), _longs(committed.starts), (c_int32 * batch)(*lengths)
        positions = _longs(committed.drawn_at(self.ahead))
        features = committed.padded(width)
        features = None if features is None else features.contiguous()
        span = CSpan(batch, width, width, addressof(rows), addressof(starts))
        feed = Feed(span, addressof(tokens), addressof(counts), address(features))
        yield feed, draw_of(sampling, addressof(positions))

    def _pages(self, cache: KVCache) -> Pages:
        if self._paged is None or self._paged[0] is not cache:
            self._paged = cache, self._pages_of(cache)
        return self._paged[1]

    @staticmethod
    def _pages_of(cache: KVCache) -> Pages:
        form, table = KV_FORMS.get(cache.kv_format, 0), cache.table.table
        scales = (None if each is None else each.mT for each in (cache.key_scales, cache.value_scales))
        found: Pages = struct_of(
            Pages, keys=cache.keys, values=cache.values, layer_stride=cache.keys.stride(0),
            page_size=cache.table.page_size, table_stride=table.stride(0), table=table,
            **dict(zip(("key_scales", "value_scales"), scales, strict=True)), slots=cache.keys.shape[1], form=form,
        )  # fmt: skip
        return found

    def logits(self, last: Tensor, wanted: range | None = None) -> Tensor:
        """Logits [R, outputs] float32 of the last block's output [R, H]; `wanted`: range of outputs, None for all."""
        norm = None if self._norm is None else (self._norm.weight, self._norm.eps, self._norm.shift)
        scores = self._kernels.linear(self._head, last, torch.float32, norm, wanted)
        scores = scores if self._parts.scale == 1 else scores * self._parts.scale
        return scores if self._parts.cap is None else capped(scores, self._parts.cap)


class CompiledDecoder(Compiled):
    """Blocks and head of a decoder whose linears are packed for the kernels."""

    @staticmethod
    def of(parts: Parts) -> CompiledDecoder | None:
        """Compiled form of a decoder, None if the kernels are missing or cannot compute it."""
        kernels = library()
        return CompiledDecoder(parts, kernels) if kernels is not None and parts.fit() else None

    def __call__(
        self, tokens: Tensor, cache: KVCache, view: View, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run `tokens` [T] at the places in `view`; return the last block's output and the taps, each [T, H]."""
        shape = tokens.shape[0], self._model.hidden
        found = {tap: torch.empty(shape, dtype=torch.bfloat16) for tap in taps}
        outputs = [found.get(layer) for layer in range(self._model.layers)]
        last = self._run(tokens, torch.empty(shape, dtype=torch.bfloat16), cache, view, outputs)
        return last, tuple(found[tap] for tap in taps)


def _span(span: Span, ancestor_mask: Tensor) -> CSpan:
    batch, total = ancestor_mask.shape[:2]
    found: CSpan = struct_of(
        CSpan, batch=batch, nodes=span.nodes, total=total, rows=span.rows, starts=span.starts, ancestors=ancestor_mask
    )
    return found


def _sum(ranks: Ranks, raised: list[BaseException]) -> Any:
    """Callback of the kernels that sums the results of all ranks; errors, Ctrl-C included, are appended to `raised`."""

    def sum_here(own: int | None, numbers: int, count: int) -> None:
        if raised:
            return
        try:
            ranks.sum(_floats(numbers, count))
        except BaseException as error:
            raised.append(error)

    return SUM(sum_here)


def _gather(ranks: Ranks, columns: Columns | None, raised: list[BaseException]) -> Any:
    """Callback of the kernels that gathers the outputs of all ranks; errors are appended to `raised`."""

    def gather_here(own: int | None, part: int, begins: int, rows: int, stride: int, found: int) -> None:
        if raised or columns is None:
            return
        try:
            outputs = ranks.share(_floats(part, rows * len(columns.own)).view(rows, -1), columns.begins)
            _floats(found, rows * stride).view(rows, -1)[:, : outputs.shape[1]] = outputs
        except BaseException as error:
            raised.append(error)

    return GATHER(gather_here)


def _floats(start: int, count: int) -> Tensor:
    return torch.frombuffer((c_float * count).from_address(start), dtype=torch.float32)


def _longs(values: Sequence[int]) -> Any:
    return (c_int64 * len(values))(*values)
