"""Forecast of the memory of serving a model: weights, KV cache and activations, before weights are loaded.

Weights come from `checkpoint.planned` and pages from `engine.pages`, as in the engine; activations are estimated from
the shapes of one step; those of latent attention (MLA) from the tensors of `model.latent` and `attention`, since
torch computes it with a mask per query head, and with queries as wide as the cached vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.planned import held_bytes, planned_bytes
from sametoken.checkpoint.token_ranking import read_tokens
from sametoken.engine.draft_ranks import check_draft_model, check_draft_options
from sametoken.engine.load import dtype_for
from sametoken.engine.pages import Cached, lookahead_of, pool_pages, row_pages, short_pages
from sametoken.errors import ConfigError, UnsupportedModelError
from sametoken.heads.read import is_head, read_head
from sametoken.heads.registry import head_kind
from sametoken.heads.serve import LoadedDraft
from sametoken.kernels.devices import planned_for
from sametoken.model.attention import tile_height
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.model.formats.names import FORMATS
from sametoken.model.latent_config import LatentConfig
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.cache import KEY_BLOCK
from sametoken.runtime.kv_format import FORMATS as FORMATS_OF_KV
from sametoken.runtime.kv_format import SCALE_BYTES, KVFormat
from sametoken.runtime.memory import available_bytes
from sametoken.runtime.ranks import RankPart

FLOAT, INDEX = 4, 8  # bytes
RANKS = (2, 4, 8, 16)  # numbers of hosts of a remedy
QUANTIZATIONS, KV_DTYPES = ("int8", "int4"), ("int8", "fp8")  # of remedies


@dataclass(frozen=True)
class ModelMemory:
    """Memory of the target or of its draft, in bytes.

    Attributes:
        role: "target", "draft model" or "head".
        path: directory.
        weights: weights and rotary tables.
        token_bytes: KV cache of one token.
        cache: KV cache of all rows.
        window: last tokens that a draft model reads of a long text; 0 for the whole text.
        outputs: tokens that a draft model guesses, None for the vocabulary.
    """

    role: str
    path: str
    weights: int
    token_bytes: int
    cache: int = 0
    window: int = 0
    outputs: int | None = None


@dataclass(frozen=True)
class Remedy:
    """Change that makes the model fit, or the change with the least memory if none does.

    Attributes:
        change: option or number of hosts.
        total: bytes after the change, on each host.
    """

    change: str
    total: int


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of a model, its draft and a full batch, in bytes.

    Attributes:
        parts: target, and its draft if there is one.
        device: type of the device.
        memory: available memory, or the stated limit.
        batch: number of sequences.
        context: tokens of each sequence, prompt and output.
        activations: estimated peak of one step.
        total: memory of the process, or of the first rank, which has the most.
        fits: true if `total` is at most `memory`.
        ranks: number of ranks of the target.
        remedies: changes that make the model fit; () if it fits.
        notes: reasons for which the device cannot run the model, or the draft cannot guess for it.
    """

    parts: tuple[ModelMemory, ...]
    device: str
    memory: int
    batch: int
    context: int
    activations: int
    total: int
    fits: bool
    ranks: int
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Printed lines, one fact per line."""
        rows: list[tuple[str, str]] = []
        for part in self.parts:
            cache = f"{in_words(part.cache)}, {part.token_bytes:,} bytes a token"
            rows += [(part.role, part.path), ("  weights", in_words(part.weights)), ("  KV cache", cache)]
            rows += [("  draft window", f"the last {part.window} tokens")] * bool(part.window)
            rows += [("  vocabulary", f"{part.outputs} tokens, whose rows are held twice")] * (part.outputs is not None)
        sequences = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
        rows += [
            ("batch", f"{sequences} of {self.context:,} tokens"),
            ("activations", f"{in_words(self.activations)} at the peak of a step, estimated"),
        ]
        fits = "fits" if self.fits else "does not fit"
        ranks = f", the first of {self.ranks} ranks" if self.ranks > 1 else ""
        rows.append(("total", f"{in_words(self.total)} of {in_words(self.memory)} ({self.device}){ranks}: {fits}"))
        for each in self.remedies:
            name = "would fit with" if each.total <= self.memory else "least memory"
            rows.append((name, f"{each.change}: {in_words(each.total)}"))
        rows += [("note", note) for note in self.notes]
        return [f"{name:<16} {words}" for name, words in rows]


class EngineSettings(NamedTuple):
    """Settings of an engine."""

    engine: EngineConfig
    cache: KVCacheConfig
    speculative: SpeculativeConfig

    def changed(self, **values: Any) -> EngineSettings:
        """These settings with other values of the engine's options."""
        return self._replace(engine=self.engine.model_copy(update=values))


class _Plan(NamedTuple):
    """Models and sizes of a step.

    Attributes:
        models: target, and its draft if there is one, without their caches.
        config: configuration of the first rank's part of the target.
        lookahead: slots of a row past its last token.
        taps: number of tapped hidden states.
    """

    models: tuple[ModelMemory, ...]
    settings: EngineSettings
    config: ModelConfig
    dtype: torch.dtype
    lookahead: int
    taps: int

    def with_caches(self, batch: int, context: int) -> list[ModelMemory]:
        """Models with the bytes of their KV caches; that of the target includes the page table."""
        page, short, window = self.settings.cache.tokens_per_block, 0, 0
        if self.models[-1].role == "draft model":
            short = batch * short_pages(self.settings.speculative, context, self.lookahead, page)
            window = self.settings.speculative.draft_window if short else 0
        pages = pool_pages(batch, context, self.lookahead, page) + 1
        table = 8 * (1 + batch * (2 if short else 1)) * row_pages(context, self.lookahead, page)
        target, *drafts = self.models
        return [
            replace(target, cache=pages * page * target.token_bytes + table),
            *(replace(each, cache=(pages + short) * page * each.token_bytes, window=window) for each in drafts),
        ]

    def activations(self, batch: int, context: int) -> int:
        """Bytes of the larger one of a prefill step and a verification, with the logits of the latter."""
        config, most, nodes = self.config, self.settings.engine.max_num_tokens, 1 + self.settings.speculative.most_nodes
        width = config.intermediate_size
        if config.experts is not None:
            width = config.experts.width * config.experts.chosen + config.experts.shared + config.hidden_size
        row = (4 + self.taps) * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 4 * width
        peak = max(most, batch * nodes) * row * self.dtype.itemsize
        if config.latent is not None:
            shape = config, config.latent, self.dtype, FORMATS_OF_KV[self.settings.cache.dtype]
            prefill = step_bytes(*shape, 1, min(most, context), context)
            peak = max(peak, prefill, step_bytes(*shape, batch, nodes, context + nodes))
        return peak + 2 * batch * nodes * config.vocab_size * 4

    def total(self, batch: int, context: int) -> int:
        """Bytes of the process, or of the first rank."""
        models = self.with_caches(batch, context)
        return sum(each.weights + each.cache for each in models) + self.activations(batch, context)


def forecast(target: Path, draft: Path | None, settings: EngineSettings, memory: int | None = None) -> MemoryForecast:
    """Forecast the memory of serving a model, from configurations and headers of files.

    Args:
        target: directory of the target.
        draft: directory of the draft model or head, or None.
        settings: settings of the engine.
        memory: available bytes; None for the free memory of this machine.

    Raises:
        SametokenError: files are damaged or not supported, or `memory` is None and this machine lacks the device.
    """
    engine, speculative = settings.engine, settings.speculative
    check_draft_options(draft, engine.tensor_parallel_size, speculative)
    device = _device(engine.device, memory)
    memory = available_bytes(torch.device(device)) if memory is None else memory
    with planned_for(device):
        plan = _plan(target, draft, settings, device)
        batch, context = engine.max_batch_size, engine.max_seq_len or plan.config.max_position
        total = plan.total(batch, context)
        refused = plan.config.refused_on_cuda if device == "cuda" else None
        found = MemoryForecast(
            tuple(plan.with_caches(batch, context)), device, memory, batch, context, plan.activations(batch, context),
            total, total <= memory, engine.tensor_parallel_size, (), () if refused is None else (refused,),
        )  # fmt: skip
        tried = [] if found.fits else list(_remedies(target, draft, plan, found))
    fitting = [each for each in tried if each.total <= memory]
    return replace(found, remedies=tuple(fitting or sorted(tried, key=lambda each: each.total)[:1]))


def _device(name: str, memory: int | None) -> str:
    kind = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name).type
    if kind == "cuda" and memory is None and not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda': this machine has no CUDA device; give --memory, the memory of the planned GPU"
        )
    return kind


def _plan(target: Path, draft: Path | None, settings: EngineSettings, device: str) -> _Plan:
    engine, speculative, count = settings.engine, settings.speculative, settings.engine.tensor_parallel_size
    stated = ModelConfig.from_hf(read_config(target), engine.max_seq_len)
    dtype, config = dtype_for(engine.dtype, stated, torch.device(device)), cut(stated, RankPart(0, count))

    def weights(
        place: Path, ranks: int, quantization: str, whole_head: bool = False, outputs: int | None = None
    ) -> int:
        part = RankPart(0, ranks, whole_head)
        return planned_bytes(place, dtype, config.max_position, quantization, part, outputs)

    def model(role: str, place: Path, weights: int, layers: ModelConfig | None) -> ModelMemory:
        page = settings.cache.tokens_per_block
        size = 0 if layers is None else Cached(layers, dtype, settings.cache.dtype).page_bytes(page) // page
        return ModelMemory(role, str(place), weights, size)

    lookahead, taps, whole_head, drafts = lookahead_of(speculative, None), 0, False, list[ModelMemory]()
    if draft is not None:
        check_draft_model(draft, count, speculative)
    method, format = speculative.method, FORMATS.get(engine.draft_quantization)
    if draft is not None and is_head(draft, method):
        head = read_head(draft, config, dtype, "meta", pack=True, format=format, method=method)
        if (tables := getattr(head.module, "rope_tables", None)) is not None:
            tables(torch.device("meta"))
        loaded = LoadedDraft(head_kind(head.config), head.module)
        lookahead, taps, whole_head = lookahead_of(speculative, loaded), 3, count > 1 and loaded.reads_target_head
        drafts = [model("head", draft, held_bytes(head.module), loaded.cached_layers)]
    elif draft is not None:
        ranks = speculative.draft_tensor_parallel_size if count > 1 else 1
        own = cut(ModelConfig.from_hf(read_config(draft), config.max_position), RankPart(0, ranks))
        outputs = _outputs(speculative, own.vocab_size)
        size = weights(draft, ranks, engine.draft_quantization, outputs=outputs)
        drafts = [replace(model("draft model", draft, size, own), outputs=outputs)]
    first = model("target", target, weights(target, count, engine.quantization, whole_head), config)
    return _Plan((first, *drafts), settings, config, dtype, lookahead, taps)


def _outputs(speculative: SpeculativeConfig, rows: int) -> int | None:
    """Number of tokens that a draft model of `rows` guesses, None for all; special tokens that a file lacks are few."""
    size, file = speculative.draft_vocab_size, speculative.draft_token_map
    if file is not None and (size is None or size < rows):
        size = min(size or rows, len(read_tokens(file, rows)))
    return None if size is None or size >= rows else size


def _remedies(target: Path, draft: Path | None, plan: _Plan, found: MemoryForecast) -> Iterator[Remedy]:
    """Smaller batch or context, other formats of cache and weights, and several hosts, each with its total."""
    settings, batch, context = plan.settings, found.batch, found.context

    def total(changed: EngineSettings) -> int:
        return _plan(target, draft, changed, found.device).total(batch, context)

    if rows := _largest(batch, lambda rows: plan.total(rows, context) <= found.memory):
        yield Remedy(f"--max-batch-size {rows}", plan.total(rows, context))
    if (length := _largest(context, lambda length: plan.total(batch, length) <= found.memory)) >= 2:
        yield Remedy(f"--max-seq-len {length}", plan.total(batch, length))
    if found.device != "cpu":
        return
    for name in KV_DTYPES if settings.cache.dtype == "auto" else ():
        smaller = settings._replace(cache=settings.cache.model_copy(update={"dtype": name}))
        yield Remedy(f"--kv-cache-dtype {name}", total(smaller))
    plain = settings.engine.quantization == "none" and stored_scheme(target) is None
    for name in QUANTIZATIONS if plain else ():
        yield Remedy(f"--quantization {name}", total(settings.changed(quantization=name)))
    for count in RANKS if settings.engine.tensor_parallel_size == 1 else ():
        with suppress(ConfigError, UnsupportedModelError):  # heads, widths or groups may not be divisible
            each = total(settings.changed(tensor_parallel_size=count))
            yield Remedy(f"{count} hosts with --tp_size {count}, on each", each)
            if each <= found.memory:
                break


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Largest number from 0 to `most` that fits; a number below a fitting one fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def in_words(count: int) -> str:
    """Bytes in GiB or MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def step_bytes(
    config: ModelConfig, latent: LatentConfig, dtype: torch.dtype, form: KVFormat, rows: int, nodes: int, length: int
) -> int:
    """Bytes of activations in attention of one layer, with hidden states.

    Args:
        config: configuration of the model.
        latent: its latent attention.
        dtype: data type of activations.
        form: storage format of the KV cache.
        rows: number of rows.
        nodes: new tokens of each row, a chain.
        length: keys of each row, with those of the new tokens.
    """
    heads, size, parts = config.num_heads, dtype.itemsize, config.cached_parts
    cached, keys = sum(parts), -(-length // KEY_BLOCK) * KEY_BLOCK
    tile = tile_height(heads, dtype)
    tiles = -(-nodes // tile)
    tokens, padded = rows * nodes, rows * tiles * tile
    # Hidden state and its norm, queries, their part with RoPE and its key, four forms of the new keys, RoPE tables.
    row = 2 * config.hidden_size + heads * (config.head_dim + latent.rotated) + 3 * latent.rotated + 4 * cached
    base = tokens * (row * size + 4 * INDEX)
    mask, query = padded * heads * keys * size, heads * cached * size
    stored, copied = rows * keys * cached * size, rows > 1 and tiles > 1  # keys per tile, separate values
    held = base + mask + tokens * query
    read = 2 * tiles * stored if copied else stored
    copying = read + copied * stored + padded * query
    building = read + padded * (query + keys * size) + tokens * keys
    ending = read + 3 * padded * query + (rows > 1 and padded > tokens) * tokens * query
    decoding = 0
    if form.greatest is not None:  # codes and scales; both parts, the last in float32; both joined
        widest = max(2 * FLOAT * parts[-1] + size * parts[0], 2 * size * cached)
        decoding = rows * keys * (cached + SCALE_BYTES * len(parts) + widest)
    return held + max(copying, building, ending, decoding)
