"""Decoder of all families: embedding, blocks, norm, output head. Runs draft trees over a cache view and returns taps.

A tap is the output of block i (0-based), before the final norm. Legend: T tokens of the whole batch, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sametoken.control.worth import Worth
from sametoken.model.attention import attend
from sametoken.model.block import Attend, Block, Rotation
from sametoken.model.compiled import CompiledDecoder, Parts
from sametoken.model.compiled_guesses import Committed, Guesses, TreeBounds
from sametoken.model.compiled_layers import blocks_of
from sametoken.model.config import ModelConfig
from sametoken.model.formats.base import WeightFormat
from sametoken.model.layers import RMSNorm, capped
from sametoken.model.linear import Embedding, Linear
from sametoken.model.rope_config import RopeConfig
from sametoken.model.rotary import query_scales, rope_at, rope_tables
from sametoken.runtime.cache import KVCache, Span, View
from sametoken.runtime.ranks import Ranks
from sametoken.speculation.draft import PADDING
from sametoken.speculation.rows import Sampling


class Hidden(NamedTuple):
    """Hidden states of one forward.

    Attributes:
        last: [T, H] output of the last block, before the final norm.
        taps: [T, H] for each requested tap, in the given order.
    """

    last: Tensor
    taps: tuple[Tensor, ...]


def attend_in(
    cache: KVCache,
    view: View,
    sinks: Sequence[Tensor | None] = (),
    scale: float | None = None,
    cap: float | None = None,
    chunked: bool = False,
    query_scales: Sequence[Tensor | None] = (),
) -> Attend:
    """Make the attention over a view of a cache, which writes the new keys and values into the cache.

    Args:
        sinks: attention sinks of each layer, empty if no layer has them.
        scale, cap: scale and cap of scores, see `ModelConfig`.
        chunked: true if windows are chunks, see `ModelConfig`.
        query_scales: [T, 1, 1] factors of the queries of each layer, empty if no layer has them.
    """

    def attend_here(q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        own, growth = sinks[layer] if sinks else None, query_scales[layer] if query_scales else None
        q = q if growth is None else (q * growth).to(q.dtype)
        return attend(
            q,
            k,
            v,
            cache=cache,
            view=view,
            layer=layer,
            window=window,
            chunked=chunked,
            sinks=own,
            scale=scale,
            cap=cap,
        )

    return attend_here


class Decoder(nn.Module):
    """Causal language model over a paged KV cache.

    Args:
        config: configuration; its `max_position` bounds the RoPE tables.
        dtype: dtype of weights and activations.
        format: format to which linears are quantised when they are packed, None for no quantisation.

    Attributes:
        ranks: processes that compute together, see `join`; None for one process.
        outputs: [N] int64 tokens whose logits are computed, see `narrowed`; None for the vocabulary.
    """

    whole_head: Linear
    ranks: Ranks | None = None
    outputs: Tensor | None = None

    def __init__(self, config: ModelConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        tied, hidden = config.tie_word_embeddings, config.hidden_size
        columns = config.columns
        scored = None if columns is None or columns.whole_head else columns.own
        self.embed = Embedding(config.vocab_size, hidden, dtype, tied=tied, format=format, scored=scored)
        self.blocks = nn.ModuleList(Block(config, i, dtype, format) for i in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.norm_eps, dtype, config.norm_shift)
        self.head = None if tied else Linear(hidden, config.head_outputs, False, dtype, format)
        self._tables: dict[RopeConfig, Rotation | Future[Rotation]] = {}
        self._growth: Tensor | None = None

    @cached_property
    def native(self) -> CompiledDecoder | None:
        """Compiled form of the blocks, None if the kernels do not support them; access after loading the weights."""
        head = self.output_head
        if head is None or head.native is None:
            return None
        columns = self.config.columns
        if columns is not None and head.out_features > len(columns.own):  # the head has all outputs
            columns = None
        ids = self.outputs
        if ids is None:
            ids = torch.arange(head.out_features if columns is None else columns.begins[-1])
        parts = Parts(
            self.config, blocks_of(self), self.rope_tables, self.embed, self.norm, head, ids,
            self.config.logits_scale, self.config.logits_cap, self.ranks, columns,
        )  # fmt: skip
        return CompiledDecoder.of(parts)

    @property
    def _sinks(self) -> list[Tensor | None]:
        return [block.sinks for block in blocks_of(self)] if self.config.sinks else []

    @property
    def output_head(self) -> Linear | None:
        """Linear of `project`: the output head, or the tied embedding's, which is None if it has no copy."""
        return self.embed.head if self.head is None else self.head

    def narrowed(self, ids: Tensor) -> Decoder:
        """Copy that computes the logits of the tokens `ids` [N] int64 alone, in that order; weights are shared.

        The rows of its output head are a copy, with the bits of the whole head.
        """
        found = copy(self)
        found.__dict__.pop("native", None)
        found._modules = {**self._modules}
        found.whole_head = self.embed.whole_head if self.head is None else self.head
        found.head, found.outputs = found.whole_head.selected(ids), ids
        return found

    def exchange_outputs(self, places: Tensor, ids: Tensor) -> None:
        """Replace the tokens at `places` [N] int64 of a narrowed decoder's `outputs` by `ids` [N]."""
        assert self.outputs is not None
        assert self.head is not None
        self.head.replace_outputs(places, self.whole_head, ids)
        self.outputs[places] = ids
        if self.native is not None:
            self.native.rename_outputs(places, ids)

    @property
    def least_rows(self) -> int:
        """Fewest tokens of a forward: torch computes a single row with another kernel than two, see `model.linear`."""
        return 1 if self.native is not None or self.embed.device.type == "cuda" else 2

    def set_deterministic(self, deterministic: bool) -> None:
        """Set whether the bits of a token's results must be independent of the batch (the default)."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding):
                module.deterministic = deterministic

    def join(self, ranks: Ranks) -> None:
        """Connect to the other ranks of a tensor-parallel model, whose parts complete this one."""
        self.ranks = ranks
        for block in blocks_of(self):
            block.ranks = ranks

    def owns(self, cache: KVCache) -> KVCache:
        """Prepare the decoder's own cache: with several ranks, commits are repeated in the caches of the others."""
        if self.ranks is not None:
            cache.on_commit = self.ranks.commit
        return cache

    def rope_tables(self, device: torch.device, rope: RopeConfig | None = None) -> Rotation:
        """RoPE tables cos and sin [positions, 1, rotated size] in the activations' dtype, of the main RoPE if None."""
        rope = rope or self.config.rope
        found = self._tables.get(rope)  # not made in __init__, which may run on the meta device
        if found is None:
            found = self._table(device, rope)
        elif isinstance(found, Future):
            found = found.result()
        self._tables[rope] = found
        return found

    def _table(self, device: torch.device, rope: RopeConfig) -> Rotation:
        cos, sin = rope_tables(rope, self.config.max_position, device, self.dtype)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def begin_rope_tables(self, device: torch.device) -> None:
        """Compute all RoPE tables in a thread while the weights are read: 0.1 s for 32,768 positions."""
        maker = ThreadPoolExecutor(1, "rope")
        for rope in dict.fromkeys(rope for rope in self.config.ropes if rope is not None):
            self._tables[rope] = maker.submit(self._table, device, rope)
        maker.shutdown(wait=False)

    def rotations(self, positions: Tensor) -> list[Rotation | None]:
        """RoPE values cos and sin [T, 1, rotated size] of each layer at `positions` [T]; None for layers without it."""
        ropes = {rope for rope in self.config.ropes if rope is not None}
        found = {rope: rope_at(self.rope_tables(positions.device, rope), positions) for rope in ropes}
        return [None if rope is None else found[rope] for rope in self.config.ropes]

    def _query_scales(self, positions: Tensor) -> list[Tensor | None]:
        """Factors [T, 1, 1] of each layer's queries at `positions` [T], None for a layer without scaled queries."""
        config = self.config
        if config.query_scale is None:
            return []
        if self._growth is None:  # a table, as for RoPE
            self._growth = query_scales(*config.query_scale, config.max_position, positions.device)
        found = self._growth[positions.clamp(max=config.max_position - 1)].view(-1, 1, 1)
        return [found if rope is None else None for rope in config.ropes]

    def scaled(self, vectors: Tensor) -> Tensor:  # [T, H] -> [T, H]
        """Token embeddings scaled for the first block."""
        scale = self.config.embed_scale  # rounded to the vectors' dtype, as Gemma's code does
        return vectors if scale == 1 else vectors * torch.tensor(scale, dtype=vectors.dtype, device="cpu").item()

    def forward(self, tokens: Tensor, cache: KVCache, view: View, taps: tuple[int, ...] = ()) -> Hidden:
        """Run `tokens` [T] (padding is -1) at the places in `view`; T >= `least_rows`."""
        if self.ranks is None:
            return self._forward(tokens, cache, view, taps)
        self.ranks.begin(tokens, view)
        hidden = self._forward(tokens, cache, view, taps)
        self.ranks.end(hidden.last)
        return hidden

    def _forward(self, tokens: Tensor, cache: KVCache, view: View, taps: tuple[int, ...]) -> Hidden:
        """Run the forward in this process only."""
        if self.native is not None:
            return Hidden(*self.native(tokens, cache, view, taps))
        config, x = self.config, self.scaled(self.embed(tokens.clamp(min=0)))
        scales = self._query_scales(view.positions)
        attend = attend_in(
            cache, view, self._sinks, config.attention_scale, config.attention_cap, config.chunked, scales
        )
        outputs = {}
        for i, (block, rope) in enumerate(zip(self.blocks, self.rotations(view.positions), strict=True)):
            x = block(x, rope, attend)
            if i in taps:
                outputs[i] = x
        return Hidden(x, tuple(outputs[i] for i in taps))

    def run(self, tokens: Tensor, cache: KVCache, spans: Sequence[Span], taps: tuple[int, ...] = ()) -> Hidden:
        """Run `tokens` [T], T >= 1, at the places of `spans`, with a padding node if `least_rows` requires it."""
        if tokens.shape[0] >= self.least_rows:
            return self(tokens, cache, cache.view(spans), taps)  # type: ignore[no-any-return]
        padded = torch.cat([tokens, torch.full_like(tokens, PADDING)])
        hidden: Hidden = self(padded, cache, cache.view([spans[0].with_child()]), taps)
        return Hidden(hidden.last[:1], tuple(tap[:1] for tap in hidden.taps))

    def guess(
        self, read: Committed, cache: KVCache, limits: Sequence[int], sampling: Sampling, worth: Worth | None = None
    ) -> Guesses | None:
        """Draft chains, see `Compiled.guess`: one call in each rank; None if the compiled kernels do not support it."""
        if self.native is None or sampling.edited:
            return None
        if self.ranks is None:
            return self.native.guess(read, cache, limits, sampling, worth)
        places = read.rows, read.starts, read.tokens, read.skipped
        self.ranks.begin_chains(cache.table, *places, max(limits), sampling)
        guesses = self.native.guess(read, cache, limits, sampling, None)
        self.ranks.end(guesses.tokens)
        return guesses

    def grow(
        self, read: Committed, cache: KVCache, bounds: TreeBounds, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Draft trees, see `Compiled.grow`; None if the compiled kernels do not support it, and with several ranks."""
        if self.native is None or sampling.edited or self.ranks is not None:
            return None
        return self.native.grow(read, cache, bounds, sampling)

    def logits(self, last: Tensor) -> Tensor:
        """Logits [R, V] from the rows `last` [R, H] of `Hidden.last`; with several ranks, on rank 0."""
        columns = self.config.columns
        if self.ranks is None or columns is None:
            return self._logits(last)
        self.ranks.score(last)
        own = self._logits(last, columns.own)
        return self.ranks.gather(own.to(torch.float32).contiguous(), columns.begins).to(own.dtype)

    def _logits(self, last: Tensor, wanted: range | None = None) -> Tensor:
        """Logits of this process's output head, or the `wanted` range of the whole vocabulary."""
        head = self.output_head
        if wanted is not None and head is not None and head.out_features == len(wanted):
            wanted = None
        if self.native is not None:
            return self.native.logits(last, wanted)
        count, cap = last.shape[0], self.config.logits_cap
        scores = self.project(self.norm(last if count >= self.least_rows else last.expand(self.least_rows, -1)))[:count]
        scores = scores if wanted is None else scores[:, wanted.start : wanted.stop]
        return scores if cap is None else capped(scores, cap)

    def project(self, normed: Tensor) -> Tensor:  # [R, H] -> [R, V]
        """Apply the output layer alone to hidden states after the final norm; its logits are not capped."""
        projected: Tensor = self.embed.project(normed) if self.head is None else self.head(normed)
        return projected if self.config.logits_scale == 1 else projected * self.config.logits_scale
