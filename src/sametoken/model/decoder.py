"""The one decoder of every family: embed, blocks, norm, head. It serves trees over a cache view and yields taps.

A tap is the output of block i (0-based), before the final norm. Legend: T tokens of the whole batch, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sametoken.model.attention import attend
from sametoken.model.block import Attend, Block
from sametoken.model.compiled import CompiledDecoder, Parts, blocks_of
from sametoken.model.config import ModelConfig
from sametoken.model.formats.base import WeightFormat
from sametoken.model.layers import RMSNorm
from sametoken.model.linear import Embedding, Linear
from sametoken.model.rotary import rope_at, rope_tables
from sametoken.runtime.cache import KVCache, Span, View
from sametoken.speculation.draft import PADDING


class Hidden(NamedTuple):
    """Hidden states of one forward.

    Attributes:
        last: [T, H] output of the last block, before the final norm.
        taps: one [T, H] per wanted tap, in the order asked for.
    """

    last: Tensor
    taps: tuple[Tensor, ...]


def attend_in(cache: KVCache, view: View, sinks: Sequence[Tensor | None] = ()) -> Attend:
    """Attention over a view of a cache, which takes the new keys and values.

    Args:
        sinks: of each layer, none where no layer has them.
    """

    def attend_here(q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        own = sinks[layer] if sinks else None
        return attend(q, k, v, cache=cache, view=view, layer=layer, window=window, sinks=own)

    return attend_here


class Decoder(nn.Module):
    """A causal language model over a paged cache.

    Args:
        config: architecture facts; its `max_position` bounds the rotary tables.
        dtype: of weights and activations.
        format: what the linears are quantised to when they are packed, None for nothing.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        tied, hidden = config.tie_word_embeddings, config.hidden_size
        self.embed = Embedding(config.vocab_size, hidden, dtype, tied=tied, format=format)
        self.blocks = nn.ModuleList(Block(config, i, dtype, format) for i in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.norm_eps, dtype)
        self.head = None if tied else Linear(hidden, config.vocab_size, False, dtype, format)
        self._rope: tuple[Tensor, Tensor] | None = None

    @cached_property
    def native(self) -> CompiledDecoder | None:
        """The blocks as one call of the compiled kernels, where these can; ask when all weights are there."""
        head = self.output_head
        if head is None or head.native is None:
            return None
        ids = torch.arange(head.out_features)
        parts = Parts(self.config, blocks_of(self), self.rope_tables, self.embed, self.norm, head, ids)
        return CompiledDecoder.of(parts)

    @property
    def _sinks(self) -> list[Tensor | None]:
        return [block.sinks for block in blocks_of(self)] if self.config.sinks else []

    @property
    def output_head(self) -> Linear | None:
        """What `project` multiplies with: the output head, or the token vectors in its place."""
        return self.embed.head if self.head is None else self.head

    @property
    def least_rows(self) -> int:
        """Fewest tokens of a forward: torch computes a lone row with another kernel than two, see `model.linear`."""
        return 1 if self.native is not None or self.embed.weight.is_cuda else 2

    def set_deterministic(self, deterministic: bool) -> None:
        """Whether a token's numbers may depend on what is computed beside it; they do not unless this is turned off."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding):
                module.deterministic = deterministic

    def rope_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, rotated size] in the activations' dtype."""
        if self._rope is None:  # not in __init__, which may run on the meta device
            cos, sin = rope_tables(self.config.rope, self.config.max_position, device, self.dtype)
            self._rope = cos.unsqueeze(1), sin.unsqueeze(1)
        return self._rope

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotated size] at `positions` [T]."""
        return rope_at(self.rope_tables(positions.device), positions)

    def forward(self, tokens: Tensor, cache: KVCache, view: View, taps: tuple[int, ...] = ()) -> Hidden:
        """Runs `tokens` [T] (padding is -1) at the places that `view` names; T >= `least_rows`."""
        if self.native is not None:
            return Hidden(*self.native(tokens, cache, view, taps))
        x = self.embed(tokens.clamp(min=0))
        rope, attend = self.rope(view.positions), attend_in(cache, view, self._sinks)
        outputs = {}
        for i, block in enumerate(self.blocks):
            x = block(x, rope, attend)
            if i in taps:
                outputs[i] = x
        return Hidden(x, tuple(outputs[i] for i in taps))

    def run(self, tokens: Tensor, cache: KVCache, spans: Sequence[Span], taps: tuple[int, ...] = ()) -> Hidden:
        """Runs `tokens` [T], T >= 1, at the places of `spans`, with a padding node where `least_rows` asks for it."""
        if tokens.shape[0] >= self.least_rows:
            return self(tokens, cache, cache.view(spans), taps)  # type: ignore[no-any-return]
        padded = torch.cat([tokens, torch.full_like(tokens, PADDING)])
        hidden: Hidden = self(padded, cache, cache.view([spans[0].with_child()]), taps)
        return Hidden(hidden.last[:1], tuple(tap[:1] for tap in hidden.taps))

    def logits(self, last: Tensor) -> Tensor:
        """[R, V] from the rows `last` [R, H] of `Hidden.last`."""
        if self.native is not None:
            return self.native.logits(last)
        count = last.shape[0]
        return self.project(self.norm(last if count >= self.least_rows else last.expand(self.least_rows, -1)))[:count]

    def project(self, normed: Tensor) -> Tensor:  # [R, H] -> [R, V]
        """The output layer alone, for hidden states after the final norm."""
        projected: Tensor = self.embed.project(normed) if self.head is None else self.head(normed)
        return projected
