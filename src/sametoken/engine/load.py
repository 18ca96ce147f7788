"""Loading of the models of an engine from names and settings: resolve, check, load."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from sametoken import embedded, kinds
from sametoken.checkpoint.generation import recommended_sampling
from sametoken.checkpoint.hub import read_config, resolve, stored_scheme
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.memory import check_memory, times_held
from sametoken.checkpoint.places import draft_directory, target_directory
from sametoken.checkpoint.pooling import Pooling, read_pooling
from sametoken.checkpoint.shared_vocabulary import check_draft_vocabulary
from sametoken.checkpoint.token_ranking import draft_tokens
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.engine.draft_ranks import check_draft_model, check_draft_options
from sametoken.errors import CheckpointError, ConfigError
from sametoken.heads.read import is_head
from sametoken.heads.serve import LoadedDraft, load_draft
from sametoken.kernels.cpu.variant import status
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.model.decoder import Decoder
from sametoken.options.engine import EngineConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.parallel.lead import Lead, lead
from sametoken.parallel.messages import Models, ModelToLoad
from sametoken.parallel.place import place_of
from sametoken.runtime.ranks import RankPart

T = TypeVar("T")
LOG = logging.getLogger("sametoken")
_Named = tuple[str, str | None, Path]  # name of a model from the user, revision, and local directory
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Loaded(NamedTuple):
    """Models and tokenizer of an engine.

    Attributes:
        target: target model.
        draft: smaller model or head of the target that drafts; None for none.
        tokenizer: tokenizer of the target.
        max_seq_len: limit of prompt and output together, in tokens.
        sampling: sampling parameters that the model recommends, by name.
        pooling: pooling of an embedding model; None for other models.
        ranks: other processes that compute the target; None for none.
        places: directories of the target and of the draft.
    """

    target: Decoder
    draft: LoadedDraft | None
    tokenizer: Tokenizer
    max_seq_len: int
    sampling: dict[str, Any]
    pooling: Pooling | None
    ranks: Lead | None = None
    places: tuple[Path, ...] = ()


def load_models(
    model: str,
    draft: str | None,
    revisions: tuple[str | None, str | None],
    config: EngineConfig,
    speculative: SpeculativeConfig | None = None,
) -> Loaded:
    """Load the target and, if there is one, a draft model or a head, after a check that both fit each other.

    Errors of the configuration are raised before weights are read. The tokenizer is read in a second thread: its error
    ends loading before the target's next tensor. Before weights of the target are downloaded, it is read first.

    Args:
        model: name of the target.
        draft: name of the draft; None for none.
        revisions: revisions of target and draft on the Hub.
        config: settings of the engine.
        speculative: settings of drafts, which may state the kind of the draft.
    """
    speculative = speculative or SpeculativeConfig()
    check_draft_options(draft, config.tensor_parallel_size, speculative)
    started = _started_ranks(config)
    directory = target_directory(
        model, revisions[0], lambda place: _tokenizer(place, _plan(model, place, config).stated, config)
    )
    plan = _plan(model, directory, config)
    tokenizer = _in_thread(lambda: _tokenizer(directory, plan.stated, config))
    place = directory if draft is None and kinds.inside(speculative.method) else None
    if draft is not None:
        own = directory if config.tokenizer is None else None
        check = partial(check_draft_vocabulary, rows=plan.stated.vocab_size, target=own, tokenizer=tokenizer.result)
        place = draft_directory(draft, revisions[1], check)
        if not is_head(place, speculative.method):
            check(place)
        check_draft_model(place, config.tensor_parallel_size, speculative)
    draft_rope = None if place is None else _rope_of_draft(place, directory, config)
    ranks, part, draft_part = None, RankPart(), RankPart()
    if config.tensor_parallel_size > 1:
        tokenizer.result()  # its errors are raised before other processes start
        also = None
        if place is not None and draft is not None and speculative.draft_tensor_parallel_size > 1:
            also = (draft, revisions[1], place)
        ranks = _ranks((model, revisions[0], directory), also, plan, config, started, draft_rope)
        part = RankPart(0, ranks.place.size)
        draft_part = part if also else draft_part
    guesser: LoadedDraft | None = None
    if place is not None:
        rows = plan.stated.vocab_size
        tokens = draft_tokens(tokenizer.result(), rows, speculative) if speculative.narrows else None
        guesser = load_draft(
            place, replace(plan.stated, max_position=plan.limit), plan.dtype, plan.device, config.draft_quantization,
            plan.deterministic, speculative.method, draft_part, cache=config.weight_cache, rope_scaling=draft_rope,
            tokens=tokens,
        )  # fmt: skip
        part = part._replace(whole_head=ranks is not None and guesser.reads_target_head)
    try:
        target = load_decoder(
            directory,
            plan.dtype,
            plan.device,
            plan.limit,
            config.quantization,
            part,
            cache=config.weight_cache,
            watch=lambda: tokenizer.done() and tokenizer.result(),
            rope_scaling=config.rope_scaling,
        )
    except CheckpointError:
        if tokenizer.done():
            tokenizer.result()  # its error comes first
        raise
    target.set_deterministic(plan.deterministic)
    if ranks is not None:
        target.join(ranks.target)
        if guesser is not None and draft_part.size > 1:
            guesser.module.join(ranks.draft)
        ranks.loaded()
    return Loaded(
        target,
        guesser,
        tokenizer.result(),
        plan.limit,
        plan.sampling,
        plan.pooling,
        ranks,
        (directory,) if place is None else (directory, place),
    )


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Start a function in a thread, and return its future."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(function)
    pool.shutdown(wait=False)
    return running


def _started_ranks(config: EngineConfig) -> Lead | None:
    """Ranks that a launcher has started, or None; connected early, since they wait during downloads and loading."""
    count = config.tensor_parallel_size
    if count == 1 or not place_of(os.environ, count).launcher:
        return None
    return lead(os.environ, count, check=config.tensor_parallel_check)


def _rope_of_draft(place: Path, target: Path, config: EngineConfig) -> dict[str, Any] | None:
    """RoPE of a draft model in place of its file's: the target's, if both have one family and one context; else None.

    Such a draft model then guesses at the same distances as the target computes. A head keeps its own.
    """
    if config.rope_scaling is None or is_head(place):
        return None
    own, others = (ModelConfig.from_hf(read_config(each)) for each in (place, target))
    same = (own.family, own.max_position) == (others.family, others.max_position)
    LOG.info("rope_scaling: the draft model has %s", "the target's" if same else "its own")
    return config.rope_scaling if same else None


def _ranks(
    target: _Named,
    draft: _Named | None,
    plan: _Plan,
    config: EngineConfig,
    started: Lead | None,
    draft_rope: dict[str, Any] | None,
) -> Lead:
    """Start the other ranks unless they are `started`, and begin to load their parts.

    Args:
        target: target model.
        draft: draft model that is cut too; None for none.
        plan: plan for the target.
        config: settings of the engine.
        started: ranks that a launcher has started; None for none.
        draft_rope: RoPE of the draft model in place of its file's.

    Raises:
        ConfigError: the target cannot be cut into `tensor_parallel_size` parts, or not on this device.
    """
    count = config.tensor_parallel_size
    if plan.device.type != "cpu":
        raise ConfigError(f"tensor_parallel_size {count} is computed on the CPU only; use --device cpu, or 1 on CUDA")
    cut(plan.stated, RankPart(0, count))
    ranks = started or lead(os.environ, count, check=config.tensor_parallel_check)

    def wanted(named: _Named, quantization: str, rope: dict[str, Any] | None) -> ModelToLoad:
        name, revision, directory = named
        dtype = str(plan.dtype).removeprefix("torch.")
        name = name if ranks.place.launcher else str(directory)
        return ModelToLoad(name, revision, dtype, plan.limit, quantization, plan.deterministic, rope)

    models = Models(
        wanted(target, config.quantization, config.rope_scaling),
        draft and wanted(draft, config.draft_quantization, draft_rope),
    )
    ranks.load(models, [model_digest(each[2]) for each in (target, draft) if each])
    return ranks


class _Plan(NamedTuple):
    """Plan for loading a target: its configuration, device and number formats."""

    stated: ModelConfig
    limit: int
    device: torch.device
    dtype: torch.dtype
    deterministic: bool
    sampling: dict[str, Any]
    pooling: Pooling | None


def _plan(model: str, directory: Path, config: EngineConfig) -> _Plan:
    """Plan for the target in `directory`; `model` is its name in errors.

    Raises:
        ConfigError: a setting does not fit the model or the device.
        CheckpointError, UnsupportedModelError: the configuration is damaged or not supported.
        MemoryPlanError: the weights do not fit the memory.
    """
    stated = ModelConfig.from_hf(read_config(directory), None, config.rope_scaling)
    limit = _limit(model, stated.max_position, config)
    device = _device(config.device)
    if device.type == "cpu":
        note_missing_kernels()
    dtype = dtype_for(config.dtype, stated, device)
    deterministic = device.type == "cpu" if config.deterministic is None else config.deterministic
    if deterministic and device.type == "cpu" and dtype == torch.float16:
        raise ConfigError(
            "float16 kernels on the CPU give a token other bits in another batch; use dtype bfloat16 or float32, "
            "or give up equal outputs with deterministic=False"
        )
    for option in ("quantization", "draft_quantization"):
        if device.type != "cpu" and (asked := getattr(config, option)) != "none":
            raise ConfigError(f"{option} {asked!r} is computed on the CPU only; leave it out on {device}")
    scheme = stored_scheme(directory)
    count = config.tensor_parallel_size
    own = 1.0 if count == 1 else place_of(os.environ, count).share * times_held(stated, count)
    check_memory(model, stated, limit, dtype, device, config.quantization, scheme, own)
    sampling = recommended_sampling(directory) if config.generation_config == "auto" else {}
    return _Plan(stated, limit, device, dtype, deterministic, sampling, read_pooling(directory))


def _limit(model: str, positions: int, config: EngineConfig) -> int:
    """Number of tokens of a sequence at most."""
    limit = config.max_seq_len or positions
    if limit <= positions:
        return limit
    words = f"max_seq_len {limit} exceeds the {positions} positions that {model} was made for"
    if not config.cap_max_seq_len:
        raise ConfigError(f"{words}; lower it, or set rope_scaling to stretch them")
    LOG.warning(f"{words}, and is lowered to them; --rope-scaling would stretch them")
    return positions


@cache
def note_missing_kernels() -> None:
    """Log once that compiled kernels are missing, with reason and remedy."""
    found = status()
    if found.variant is None:
        mend = f"; {found.advice}" if found.advice else ""
        LOG.warning(f"no compiled CPU kernels are loaded ({found.reason}), so torch computes alone, slower{mend}")


def _tokenizer(directory: Path, target: ModelConfig, config: EngineConfig) -> Tokenizer:
    """Tokenizer of the target, or of the setting `tokenizer`, checked and tried."""
    place = directory if config.tokenizer is None else resolve(embedded.target(config.tokenizer), weights=False)
    tokenizer = load_tokenizer(place, directory)
    if config.tokenizer is not None and tokenizer.vocab_size > target.vocab_size:
        raise ConfigError(
            f"tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens and the target {target.vocab_size} rows; "
            "expected a tokenizer that the target was made for"
        )
    tokenizer.check_rows(target.vocab_size, place)
    tokenizer.try_once(place)
    if config.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(config.chat_template)
    tokenizer.try_templates()
    return tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: expected 'auto', 'cpu' or 'cuda[:N]'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r}: expected 'auto', 'cpu' or 'cuda[:N]'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this machine or this build of torch has no CUDA; use 'cpu'")
    return device


def dtype_for(name: str, stated: ModelConfig, device: torch.device) -> torch.dtype:
    """Dtype of weights, activations and cache: `name`, or for "auto" that of the checkpoint."""
    dtype = DTYPES[stated.dtype if name == "auto" else name]
    # float16 GEMMs of more than one row are five times slower than bfloat16 on CPU.
    return torch.bfloat16 if name == "auto" and device.type == "cpu" and dtype == torch.float16 else dtype
