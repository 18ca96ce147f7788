"""The one place where a method's name becomes a drafter; after this, everything is the protocol."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.config import SpeculativeConfig
from foretoken.drafters.base import Drafter
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.drafters.ngram import NgramDrafter
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.errors import ConfigError
from foretoken.model.decoder import Decoder
from foretoken.runtime.cache import KVCache


def build_drafter(
    method: str, config: SpeculativeConfig, draft: Decoder | None, cache_for: Callable[[Decoder], KVCache]
) -> Drafter:
    """The drafter of a method.

    Args:
        draft: the draft model, which only draft_target needs.
        cache_for: makes the cache of a model in the engine's pages.
    """
    budget = config.max_total_draft_tokens or config.max_draft_len * config.tree_top_k
    match method:
        case "draft_target":
            if draft is None:
                raise ConfigError("method 'draft_target' needs a draft model: give draft=PATH or --draft PATH")
            return DraftModelDrafter(
                draft,
                cache_for(draft),
                max_draft_len=config.max_draft_len,
                branches=config.tree_top_k,
                budget=budget,
            )
        case "ngram":
            return NgramDrafter(
                max_draft_len=config.max_draft_len,
                max_matching_ngram_size=config.max_matching_ngram_size,
                min_matching_ngram_size=config.min_matching_ngram_size,
                is_use_oldest=config.is_use_oldest,
                is_public_pool=config.is_public_pool,
            )
        case "suffix":
            return SuffixDrafter(
                budget=budget,
                max_draft_len=config.max_draft_len,
                max_tree_depth=config.suffix_decoding_max_tree_depth,
                max_cached_requests=config.suffix_decoding_max_cached_requests,
                max_spec_factor=config.suffix_decoding_max_spec_factor,
                min_token_prob=config.suffix_decoding_min_token_prob,
            )
        case _:
            raise ConfigError(f"method {method!r} makes no drafts; expected draft_target, ngram or suffix")
