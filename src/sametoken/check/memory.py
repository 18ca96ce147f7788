"""Memory that a model will need: weights, cache and activations, computed before loading.

Weights come from `checkpoint.planned`, which fills modules as the loader does, and pages from `engine.pages`, which the
engine plans with. Only activations are estimated, from the shapes of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from sametoken.check.latent_memory import step_bytes
from sametoken.check.memory_forecast import MemoryForecast, Part, Remedy, in_words
from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.planned import PlannedModel, planned_model
from sametoken.checkpoint.tensors import read_tensors
from sametoken.engine.draft_ranks import check_cut_draft, check_draft_ranks
from sametoken.engine.load import dtype_for
from sametoken.engine.pages import Cached, lookahead_of, pool_bytes, pool_pages, row_pages, short_pages
from sametoken.errors import ConfigError, UnsupportedModelError
from sametoken.heads.files import HEAD_FILES
from sametoken.heads.read import is_head, read_head
from sametoken.heads.registry import head_kind
from sametoken.heads.serve import LoadedDraft
from sametoken.kernels.devices import planned_for
from sametoken.model.config import ModelConfig
from sametoken.model.formats.names import FORMATS
from sametoken.model.held import Share, held, summed
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.kv_format import FORMATS as FORMATS_OF_KV
from sametoken.runtime.memory import available_bytes
from sametoken.runtime.ranks import RankPart

MOST_ROWS = 4096  # largest batch that is looked for
RANKS = (2, 4, 8, 16)  # numbers of hosts that are tried
QUANTIZATIONS, KV_DTYPES = ("int8", "int4"), ("int8", "fp8")


class EngineSettings(NamedTuple):
    """Settings of an engine to be built."""

    engine: EngineConfig
    cache: KVCacheConfig
    speculative: SpeculativeConfig


class _Plan(NamedTuple):
    """All that does not depend on batch and context."""

    parts: tuple[Part, ...]
    other: int  # bytes of the weights of each rank but the first
    cached: tuple[Cached, ...]
    shared: int  # of them, how many every rank has: the target's, and that of a draft model that is cut too
    config: ModelConfig  # of a rank's part of the target
    uncut: int
    lookahead: int
    itemsize: int
    taps: int
    shortens: bool = False  # a draft model has rows for shortened texts


def forecast(target: Path, draft: Path | None, settings: EngineSettings, memory: int | None = None) -> MemoryForecast:
    """Forecast the memory of serving a model; reads only headers.

    Args:
        target, draft: directories; the draft may be a head.
        memory: bytes that may be taken; None is what this machine has free.

    Raises:
        SametokenError: files are damaged or not supported, or the device is not there and no memory was given.
    """
    engine = settings.engine
    check_draft_ranks(draft, engine.tensor_parallel_size, settings.speculative.draft_tensor_parallel_size)
    device = _device(engine.device, memory)
    memory = available_bytes(torch.device(device)) if memory is None else memory
    with planned_for(device):
        plan, notes = _plan(target, draft, settings, device)
        batch = engine.max_batch_size
        context = engine.max_seq_len or plan.config.max_position
        step = _activations(plan, settings, batch, context)
        if engine.tensor_parallel_size > 1:
            alone = settings._replace(engine=engine.model_copy(update={"tensor_parallel_size": 1}))
            one = _total(_plan(target, draft, alone, device)[0], alone, batch, context)
            notes += _replicas_advice(one, engine.tensor_parallel_size, memory)
        total, ranks = _total(plan, settings, batch, context), engine.tensor_parallel_size
        found = MemoryForecast(
            parts=plan.parts, device=device, memory=memory, dtype=str(plan.cached[0].dtype).removeprefix("torch."),
            batch=batch, context=context, page=settings.cache.tokens_per_block, lookahead=plan.lookahead,
            lookahead_pages=-(-batch * plan.lookahead // settings.cache.tokens_per_block),
            pool=_pool(plan, settings, batch, context), activations=step, total=total, fits=total <= memory,
            ranks=ranks, other_rank=_other_rank(plan, settings, batch, context) if ranks > 1 else 0, uncut=plan.uncut,
            largest_batch=_largest(MOST_ROWS, lambda rows: _total(plan, settings, rows, context) <= memory),
            largest_context=_largest(
                plan.config.max_position, lambda length: _total(plan, settings, batch, length) <= memory
            ),
            remedies=(), notes=notes,
        )  # fmt: skip
        if found.fits:
            return found
        tried = list(_remedies(target, draft, settings, device, plan, found))
    fitting = [each for each in tried if each.total <= memory]
    return replace(found, remedies=tuple(fitting or sorted(tried, key=lambda each: each.total)[:1]))


def _device(name: str, memory: int | None) -> str:
    kind = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name).type
    if kind == "cuda" and memory is None and not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda': this machine has no CUDA device; give --memory, the memory of the GPU that you plan for"
        )
    return kind


def _plan(target: Path, draft: Path | None, settings: EngineSettings, device: str) -> tuple[_Plan, tuple[str, ...]]:
    engine, notes = settings.engine, []
    stated = ModelConfig.from_hf(read_config(target))
    dtype = dtype_for(engine.dtype, stated, torch.device(device))
    limit = engine.max_seq_len or stated.max_position
    count = engine.tensor_parallel_size

    def part(rank: int, *, whole_head: bool = False) -> PlannedModel:
        return planned_model(target, dtype, limit, engine.quantization, RankPart(rank, count, whole_head))

    planned = part(0)
    other = planned if count == 1 else part(count - 1)
    sizes = sum(share.bytes for share in planned.stored.values())
    if planned.stated_bytes is not None and abs(planned.stated_bytes - sizes) > 0.01 * sizes:
        notes.append(
            f"the index states {planned.stated_bytes} bytes and config.json amounts to {sizes}: the files hold more or "
            "less than the model needs"
        )
    if device == "cuda" and planned.config.refused_on_cuda is not None:
        notes.append(planned.config.refused_on_cuda)
    cached = [Cached(planned.config, dtype, settings.cache.dtype)]
    parts = [Part("target", str(target), planned.stored, planned.held, _token_bytes(cached[0], settings))]
    lookahead, taps = lookahead_of(settings.speculative, None), 0
    weights, shared = sum(share.bytes for share in other.held.values()), 1
    if draft is not None and is_head(draft):
        head = read_head(draft, planned.config, dtype, "meta", pack=True, format=FORMATS.get(engine.draft_quantization))
        if (tables := getattr(head.module, "rope_tables", None)) is not None:
            tables(torch.device("meta"))
        loaded = LoadedDraft(head_kind(head.config), head.module)
        lookahead, taps = lookahead_of(settings.speculative, loaded), 3
        if count > 1 and loaded.reads_target_head:
            parts[0] = replace(parts[0], held=part(0, whole_head=True).held)
        layers = loaded.cached_layers
        if layers is not None:
            cached.append(Cached(layers, dtype, settings.cache.dtype))
        stored = summed(
            {str(item.tensor.dtype).removeprefix("torch."): Share(item.tensor.numel() * item.tensor.dtype.itemsize, 1)}
            for item in read_tensors(draft, HEAD_FILES, data=False)
        )
        kv = 0 if layers is None else _token_bytes(cached[-1], settings)
        parts.append(Part("head", str(draft), stored, held(head.module), kv))
    elif draft is not None:
        ranks = settings.speculative.draft_tensor_parallel_size if count > 1 else 1
        if ranks > 1:
            check_cut_draft(draft, ranks)
        own, last = (
            planned_model(draft, dtype, planned.config.max_position, engine.draft_quantization, RankPart(rank, ranks))
            for rank in (0, ranks - 1)
        )
        if ranks > 1:
            weights, shared = weights + sum(share.bytes for share in last.held.values()), 2
        cached.append(Cached(own.config, dtype, settings.cache.dtype))
        parts.append(Part("draft model", str(draft), own.stored, own.held, _token_bytes(cached[-1], settings)))
    plan = _Plan(
        tuple(parts), weights, tuple(cached), shared, planned.config, other.outside, lookahead, dtype.itemsize, taps,
        draft is not None and not is_head(draft),
    )  # fmt: skip
    return plan, tuple(notes)


def _token_bytes(cached: Cached, settings: EngineSettings) -> int:
    page = settings.cache.tokens_per_block
    return cached.page_bytes(page) // page


def _pool(plan: _Plan, settings: EngineSettings, batch: int, context: int) -> int:
    page = settings.cache.tokens_per_block
    pages = pool_pages(batch, context, plan.lookahead, page) + 1
    short = batch * short_pages(settings.speculative, context, plan.lookahead, page) if plan.shortens else 0
    rows = 1 + batch * (2 if short else 1)
    held = pool_bytes(plan.cached, page, pages) + pool_bytes(plan.cached[1:], page, short)
    return held + 8 * rows * row_pages(context, plan.lookahead, page)


def _activations(plan: _Plan, settings: EngineSettings, batch: int, context: int) -> int:
    """The larger of a step that reads prompts and one that verifies drafts, and the logits of the latter."""
    nodes = 1 + settings.speculative.most_nodes
    return _states(plan, settings, batch, context) + 2 * batch * nodes * plan.config.vocab_size * 4


def _states(plan: _Plan, settings: EngineSettings, batch: int, context: int) -> int:
    """Activations without logits."""
    config, nodes = plan.config, 1 + settings.speculative.most_nodes
    tokens = max(settings.engine.max_num_tokens, batch * nodes)
    width = config.intermediate_size
    if config.experts is not None:
        width = config.experts.width * config.experts.chosen + config.experts.shared + config.hidden_size
    row = (4 + plan.taps) * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 4 * width
    peak = tokens * row * plan.itemsize
    if config.latent is not None:
        shape = config, config.latent, plan.cached[0].dtype, FORMATS_OF_KV[plan.cached[0].kv_format]
        piece = min(settings.engine.max_num_tokens, context)
        peak = max(peak, step_bytes(*shape, 1, piece, context), step_bytes(*shape, batch, nodes, context + nodes))
    return peak


def _total(plan: _Plan, settings: EngineSettings, batch: int, context: int) -> int:
    weights = sum(part.weights for part in plan.parts)
    return weights + _pool(plan, settings, batch, context) + _activations(plan, settings, batch, context)


def _other_rank(plan: _Plan, settings: EngineSettings, batch: int, context: int) -> int:
    """Bytes of a rank that verifies no drafts."""
    alone = plan._replace(cached=plan.cached[: plan.shared], taps=0)
    return plan.other + _pool(alone, settings, batch, context) + _states(alone, settings, batch, context)


def _replicas_advice(one: int, count: int, memory: int) -> tuple[str, ...]:
    """Advice to use replicas, not so many ranks; nothing where one process, which takes `one` bytes, does not fit."""
    if one > memory:
        return ()
    where = f"serve --dp {count}" if count * one <= memory else "one on each host"
    return (
        f"one process takes {in_words(one)} and fits: replicas ({where}) serve more requests a second, ranks answer "
        "one request sooner",
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to `most` that fits, where each one below a fitting one fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _remedies(
    target: Path, draft: Path | None, settings: EngineSettings, device: str, plan: _Plan, found: MemoryForecast
) -> Iterator[Remedy]:
    """Other formats of the weights and the cache, and several devices, each with the total that it leads to."""
    engine = settings.engine
    if found.largest_batch:
        rows = found.largest_batch
        yield Remedy(f"--max-batch-size {rows}", _total(plan, settings, rows, found.context))
    if found.largest_context >= 2:
        length = found.largest_context
        yield Remedy(f"--max-seq-len {length}", _total(plan, settings, found.batch, length))
    if settings.cache.dtype == "auto" and device == "cpu":
        for name in KV_DTYPES:
            other = settings._replace(cache=settings.cache.model_copy(update={"dtype": name}))
            cached = tuple(each._replace(kv_format=name) for each in plan.cached)
            yield Remedy(
                f"--kv-cache-dtype {name}", _total(plan._replace(cached=cached), other, found.batch, found.context)
            )
    for name in QUANTIZATIONS:
        if device != "cpu" or engine.quantization != "none" or stored_scheme(target) is not None:
            break
        other = settings._replace(engine=engine.model_copy(update={"quantization": name}))
        smaller, _ = _plan(target, draft, other, device)
        yield Remedy(f"--quantization {name}", _total(smaller, other, found.batch, found.context))
    for count in RANKS:
        if engine.tensor_parallel_size > 1:
            break
        other = settings._replace(engine=engine.model_copy(update={"tensor_parallel_size": count}))
        try:
            part, _ = _plan(target, draft, other, device)
        except (ConfigError, UnsupportedModelError):  # heads, widths or groups that it does not divide
            continue
        total = _total(part, other, found.batch, found.context)
        here = f"hosts with --tp_size {count}, on each"
        there = "devices with tensor parallelism, which is not implemented on CUDA"
        yield Remedy(f"{count} {here if device == 'cpu' else there}", total)
        if total <= found.memory:
            break
