"""Speculation with a draft model: a small model with the target's tokenizer, whose KV is in the pages of the target.

Guesses are ranked under the target's noise, which raises acceptance at temperature > 0. Legend: B rows, N tokens of a
row, R rows of a product, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sametoken.control.worth import Worth
from sametoken.drafters.base import ANYONE, Drafter, RowOrigin
from sametoken.drafters.reading import TextWindow
from sametoken.drafters.rows import GrowingDrafter
from sametoken.heads.draft_model.vocabulary import RecentTokens
from sametoken.heads.kind import CacheFor, Weighted
from sametoken.model.compiled_guesses import Committed, Guesses, TreeBounds
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.cache import KVCache, Span
from sametoken.speculation.sampling import Sampling


class DraftModelGuesser:
    """`drafters.growing.Guesser` of a decoder, whose slots read tokens alone."""

    lag = 0

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.ids = decoder.outputs
        self.decoder, self.cache, self.vocabulary = decoder, decoder.owns(cache), decoder.config.vocab_size

    def guess(self, read: Committed, limits: Sequence[int], sampling: Sampling, worth: Worth | None) -> Guesses | None:
        return self.decoder.guess(read, self.cache, limits, sampling, worth)

    def branch(self, read: Committed, bounds: TreeBounds, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor] | None:
        return self.decoder.grow(read, self.cache, bounds, sampling)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def recycle(self, output: Tensor) -> None:
        return None

    def run(self, tokens: Tensor, hidden: Tensor | None, span: Span) -> Tensor:
        return self.decoder.run(tokens.flatten(), self.cache, [span]).last.view(*tokens.shape, -1)

    def scores(self, output: Tensor) -> Tensor:
        return self.decoder.logits(output)


class DraftModelDrafter(GrowingDrafter):
    """Drafter with a decoder whose KV cache shares the target's page table.

    Args:
        decoder: draft model with the target's vocabulary.
        cache: KV cache of the draft model.
        max_draft_len, branches, budget, window: see `GrowingDrafter`.
    """

    namespace = "draft_target"

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, max_draft_len: int, branches: int = 1, budget: int | None = None,
        window: TextWindow | None = None,
    ) -> None:  # fmt: skip
        outputs = decoder.outputs
        branches = branches if outputs is None else min(branches, len(outputs))
        super().__init__(DraftModelGuesser(decoder, cache), max_draft_len, branches, budget, window)
        self.decoder, self.vocabulary = decoder, None if outputs is None else RecentTokens(decoder, outputs)

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        super().admit(row, cached, draft_cached, origin)
        if self.vocabulary is not None:
            self.vocabulary.admit(origin.owner)
            self.vocabulary.learn(cached)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        super().observe(rows, tokens, features)
        if self.vocabulary is not None:
            for each in tokens:
                self.vocabulary.learn(each)


class DraftModel(Weighted):
    """Kind of drafts that are smaller decoders with the target's tokenizer."""

    shortens = True
    narrows = True

    def cached_layers(self, module: Decoder) -> ModelConfig:
        return module.config

    def build(self, config: SpeculativeConfig, module: Decoder, target: Decoder, cache_for: CacheFor) -> Drafter:
        cache = cache_for(module.config, module.dtype)
        levels, branches = config.max_draft_len, config.tree_top_k
        window = TextWindow(config.draft_window) if cache.table.short_pages else None
        return DraftModelDrafter(
            module, cache, max_draft_len=levels, branches=branches, budget=config.budget, window=window
        )
