"""Serving of a draft model: a separate decoder, whose KV is in the target's pages."""

from __future__ import annotations

from sametoken.drafters.base import Drafter
from sametoken.drafters.reading import TextWindow
from sametoken.heads.draft_model.drafter import DraftModelDrafter
from sametoken.heads.kind import CacheFor, Weighted
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.options.speculation import SpeculativeConfig


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
