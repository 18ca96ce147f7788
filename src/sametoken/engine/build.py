"""Assembly of an engine from loaded models and settings, with a plan of the cache's memory."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from sametoken.control.acceptance import Gate
from sametoken.control.policy import Policy
from sametoken.drafters.device import proposers
from sametoken.engine.blocks import BlockManager
from sametoken.engine.captured import CapturedSteps
from sametoken.engine.drafting import Drafting
from sametoken.engine.engine import Engine
from sametoken.engine.host import HostRunner
from sametoken.engine.load import Loaded
from sametoken.engine.meter import Meter
from sametoken.engine.pace import Pace
from sametoken.engine.pages import Cached, cached_by, lookahead_of, pool_bytes, pool_pages, row_pages, short_pages
from sametoken.engine.rows import Rows
from sametoken.errors import ConfigError, MemoryPlanError
from sametoken.heads.registry import model_free_drafters
from sametoken.heads.serve import LoadedDraft
from sametoken.kinds import named
from sametoken.model.config import ModelConfig
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.speculation import AUTO, FREE, FREE_LENGTH, MODEL_METHODS, NO_DRAFT, SpeculativeConfig
from sametoken.parallel.messages import Cache
from sametoken.runtime.cache import KVCache, PageTable
from sametoken.runtime.kv_format import FORMATS
from sametoken.runtime.memory import available_bytes, default_share

LOG = logging.getLogger("sametoken")


class Context(NamedTuple):
    """Longest sequence of an engine.

    Attributes:
        length: greatest number of tokens of prompt and output together.
        remedy: advice for raising it.
    """

    length: int
    remedy: str


def build_engine(
    loaded: Loaded, speculative: SpeculativeConfig, config: EngineConfig, cache: KVCacheConfig
) -> tuple[Engine, Context]:
    """Build the engine; return the engine and the longest sequence that its cache can hold.

    Raises:
        MemoryPlanError: the pool cannot hold a sequence of the requested length, or of any length.
    """
    target, draft = loaded.target, loaded.draft
    device = target.embed.device
    page = cache.tokens_per_block
    lookahead = lookahead_of(speculative, draft)

    def short_of(context: int) -> int:
        shortens = draft is not None and draft.kind.shortens
        return short_pages(speculative, context, lookahead, page) if shortens else 0

    pages, context = _plan_pages(loaded, config, cache, lookahead, short_of(loaded.max_seq_len))
    per_row, short = row_pages(context.length, lookahead, page), short_of(context.length)
    table = PageTable(config.max_batch_size, pages, per_row, page, device, short)
    if loaded.ranks is not None:
        loaded.ranks.hold(Cache(config.max_batch_size, pages, per_row, page, cache.dtype, short))

    kv_format = FORMATS[cache.dtype]
    caches: list[KVCache] = []

    def cache_for(shape: ModelConfig, dtype: torch.dtype, pages: int = table.all_pages) -> KVCache:
        caches.append(KVCache.of(shape, table, dtype, device, kv_format, pages))
        return caches[-1]

    drafters = model_free_drafters(speculative)
    if draft is not None:
        drafters[draft.method] = draft.build(speculative, target, cache_for)
    policy = Policy(
        slots=lambda method, limit: drafters[method].slots(limit),
        runs_model=lambda method: drafters[method].runs_model,
        max_draft_len=speculative.longest,
        schedule=speculative.schedule,
        gate=Gate(speculative.acceptance_window, speculative.acceptance_length_threshold),
        ragged=target.embed.device.type == "cpu",
    )
    pace = Pace(config.max_prefill_share, config.max_mixed_prefill_tokens)
    rows, meter = Rows(), Meter(pace, policy)
    drafting = Drafting(drafters, policy, rows, meter)
    runner = HostRunner(target, cache_for(target.config, target.dtype, pages), drafting.taps, rows, meter)
    engine = Engine(
        runner,
        table,
        BlockManager(pages, page, reuse=cache.enable_block_reuse),
        drafting,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        pace=pace,
        captured=_captured(runner, drafting, config),
        caches=caches,
    )
    return engine, context


def _captured(runner: HostRunner, drafting: Drafting, config: EngineConfig) -> CapturedSteps | None:
    # Experts are chosen on the device, and the host launches only the chosen ones, so that no graph is fixed.
    if runner.device.type != "cuda" or not config.cuda_graphs or runner.decoder.config.experts is not None:
        return None
    return CapturedSteps(runner, proposers(drafting.drafters, NO_DRAFT), config.max_num_tokens, drafting.unbounded)


def default_method(speculative: SpeculativeConfig, draft: LoadedDraft | None, device: torch.device) -> str:
    """Drafting method of requests that name none.

    A draft model is combined with the drafters that need no model, unless a setting of drafts is stated. On a GPU, a
    captured step drafts on the device; a drafter on the host would prevent capture.

    Raises:
        ConfigError: the requested method does not fit the draft, or needs a draft that is missing.
    """
    asked, made_for = speculative.method, None if draft is None else draft.method
    if asked is None:
        on_host = device.type == "cpu"
        if made_for is None:
            return FREE if on_host else NO_DRAFT
        set_nothing = not speculative.model_fields_set - {"method"}
        return AUTO if on_host and set_nothing and named(made_for).weights == "model" else made_for
    if asked in MODEL_METHODS and asked != made_for:
        if made_for is None:
            raise ConfigError(f"method {asked!r} needs {MODEL_METHODS[asked]}: give draft=PATH or --draft PATH")
        raise ConfigError(
            f"method {asked!r} needs {MODEL_METHODS[asked]}, and the draft is {MODEL_METHODS[made_for]}; "
            f"use method {made_for!r} or another draft"
        )
    return asked


def with_length(speculative: SpeculativeConfig, method: str) -> SpeculativeConfig:
    """Settings with the default draft length for `FREE` and `AUTO`, if no other method, length or limit is stated.

    Args:
        method: result of `default_method`.
    """
    limited = speculative.draft_len_schedule or speculative.max_total_draft_tokens or speculative.tree_top_k > 1
    stated = speculative.method not in (None, AUTO) or "max_draft_len" in speculative.model_fields_set
    if method not in (FREE, AUTO) or stated or limited:
        return speculative
    return speculative.model_copy(update={"max_draft_len": FREE_LENGTH})


def _plan_pages(
    loaded: Loaded, config: EngineConfig, cache: KVCacheConfig, lookahead: int, short: int
) -> tuple[int, Context]:
    """Number of pages of the pool, sink included, and the longest sequence that fits with its lookahead.

    Args:
        lookahead: slots of a row past its last token.
        short: pages of each row for a draft model's shortened text.
    """
    page, context, asked = cache.tokens_per_block, loaded.max_seq_len, config.max_seq_len is not None
    cached = cached_by(Cached(loaded.target.config, loaded.target.dtype, cache.dtype), loaded.draft)
    per_page = pool_bytes(cached, page, 1)
    sharing = 1 if loaded.ranks is None else loaded.ranks.place.here  # ranks that share the memory of this host
    device = loaded.target.embed.device
    free = available_bytes(device) // sharing
    share = cache.free_memory_fraction or default_share(device)
    fits = max(0, int(free * share) - pool_bytes(cached[1:], page, short * config.max_batch_size)) // per_page
    wanted = -(-cache.max_tokens // page) if cache.max_tokens else None
    pages = min(wanted or pool_pages(config.max_batch_size, context, lookahead, page), fits)
    if cache.max_tokens is not None and pages * page < cache.max_tokens:
        raise MemoryPlanError(
            f"max_tokens {cache.max_tokens} needs {cache.max_tokens // page * per_page / 2**30:.2f} GiB, free is room "
            f"for {pages * page} tokens; lower max_tokens, max_batch_size or max_seq_len"
        )
    longest, option = pages * page - lookahead, "free_memory_fraction" if cache.max_tokens is None else "max_tokens"
    limit = f"{share:.2g}" if cache.max_tokens is None else cache.max_tokens
    pool = f"the cache holds {pages * page} tokens ({option} {limit}), of which drafts take {lookahead}"
    if longest < 2 or (asked and longest < context):
        least = f"max_seq_len {context}" if asked else "a sequence of 2 tokens"
        raise MemoryPlanError(f"{pool}: too few for {least}; raise kv_cache {option} or request a shorter context")
    if longest < context:
        LOG.warning(f"{pool}: the context is {longest} tokens instead of {context}; raise kv_cache {option} for more")
        return pages + 1, Context(longest, f"raise kv_cache {option}")
    if device.type == "cpu":
        LOG.info(
            f"KV cache: at most {pages * page} tokens ({pages * per_page / 2**30:.2f} GiB), taken as they are written; "
            f"--kv-cache-max-tokens or --kv-cache-free-memory-fraction ({share:.2g}) change this"
        )
    return pages + 1, Context(context, "raise max_seq_len" if asked else "take a model with a longer context")
