"""The one place where a method's name becomes a drafter; after this, everything is the protocol."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sametoken.drafters.base import Drafter
from sametoken.drafters.forced import ForcedDrafter
from sametoken.drafters.ngram import NgramDrafter
from sametoken.drafters.prediction import PredictionDrafter
from sametoken.drafters.suffix import SuffixDrafter
from sametoken.errors import ConfigError
from sametoken.heads.draft_model.drafter import DraftModelDrafter
from sametoken.heads.eagle.drafter import EagleDrafter
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.drafter import MedusaDrafter, tree_of
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.cache import KVCache

Model = Decoder | EagleHead | MedusaHeads  # what guesses: a draft model or a head of the target
CacheFor = Callable[[ModelConfig, torch.dtype], KVCache]
PREDICTION = "prediction"  # what a request that brings its own guess is drafted by
FORCED = "forced"  # what the form of an output leaves no choice about; asked first
MODEL_FREE = (FORCED, "ngram", "suffix", PREDICTION)  # any request may choose these: they need no weights


def method_of(model: Model) -> str:
    """The method that a draft model or a head is for."""
    match model:
        case Decoder():
            return "draft_target"
        case MedusaHeads():
            return "medusa"
        case EagleHead():
            return "eagle3" if model.config.version == 3 else "eagle"


def kept_shape(model: Model) -> ModelConfig | None:
    """The layers whose keys and values a model keeps beside the target's, None for none."""
    match model:
        case Decoder():
            return model.config
        case MedusaHeads():
            return None
        case EagleHead():
            return model.config.layers


def most_nodes(config: SpeculativeConfig, model: Model | None) -> int:
    """Cache slots past the pending token that any drafter may take."""
    levels, budget = config.max_draft_len, config.max_total_draft_tokens
    static = len(tree_of(model, levels, budget)) if isinstance(model, MedusaHeads) else 0
    return max(budget or 0, levels * config.tree_top_k, static)


def build_drafter(config: SpeculativeConfig, model: Model, target: Decoder, cache_for: CacheFor) -> Drafter:
    """The drafter that guesses with a model or a head.

    Args:
        target: the model that is guessed for.
        cache_for: makes a cache of such layers in the engine's pages.
    """
    if isinstance(model, MedusaHeads):
        return MedusaDrafter(model, target, max_draft_len=config.max_draft_len, budget=config.max_total_draft_tokens)
    shape = kept_shape(model)
    assert shape is not None
    cache = cache_for(shape, model.dtype)
    levels, branches, budget = config.max_draft_len, config.tree_top_k, _budget(config)
    if isinstance(model, EagleHead):
        return EagleDrafter(model, target, cache, max_draft_len=levels, branches=branches, budget=budget)
    return DraftModelDrafter(model, cache, max_draft_len=levels, branches=branches, budget=budget)


def build_model_free(method: str, config: SpeculativeConfig) -> Drafter:
    """The drafter of a method that needs no weights."""
    match method:
        case "ngram":
            return NgramDrafter(
                max_draft_len=config.longest,
                max_matching_ngram_size=config.max_matching_ngram_size,
                min_matching_ngram_size=config.min_matching_ngram_size,
                is_use_oldest=config.is_use_oldest,
                is_public_pool=config.is_public_pool,
            )
        case "forced":
            return ForcedDrafter(config.longest)
        case "prediction":
            return PredictionDrafter(config.longest)
        case "suffix":
            return SuffixDrafter(
                budget=_budget(config),
                max_draft_len=config.longest,
                max_tree_depth=config.suffix_decoding_max_tree_depth,
                max_cached_requests=config.suffix_decoding_max_cached_requests,
                max_spec_factor=config.suffix_decoding_max_spec_factor,
                min_token_prob=config.suffix_decoding_min_token_prob,
            )
        case _:
            raise ConfigError(f"method {method!r} takes a model or a head; expected one of {', '.join(MODEL_FREE)}")


def _budget(config: SpeculativeConfig) -> int:
    return config.max_total_draft_tokens or config.max_draft_len * config.tree_top_k
