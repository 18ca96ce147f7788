"""`sametoken doctor MODEL`: forecast of the memory of a model, its draft and a batch, before weights are loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken import embedded, kinds
from sametoken.commands.options import Option, Values, settings_options, titled
from sametoken.errors import ConfigError, SametokenError
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.serving import CACHE
from sametoken.options.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from sametoken.check.memory import EngineSettings

ALIASES = {"max_batch_size": ("--max-num-seqs",), "max_seq_len": ("--max-model-len",)}
ENGINE = (
    "max_batch_size", "max_num_tokens", "max_seq_len", "quantization", "draft_quantization", "tensor_parallel_size",
)  # fmt: skip
SPECULATIVE = (
    "method", "max_total_draft_tokens", "tree_top_k", "draft_window", "draft_vocab_size", "draft_token_map",
    "draft_tensor_parallel_size",
)  # fmt: skip
SHARED = {"device": EngineConfig, "dtype": EngineConfig, "max_draft_len": SpeculativeConfig}  # for heads too


def _options() -> tuple[Option, ...]:
    named = {option.name: option for owner in (EngineConfig, SpeculativeConfig) for option in settings_options(owner)}
    chosen = [named[name] for name in (*ENGINE, *SPECULATIVE)]
    return (
        *titled(
            "The memory of a model",
            Option("draft", str, None, "draft of the model: a head or a smaller model.", "DRAFT"),
            Option("heads", str, None, "directory to search for heads of the model, with the Hub's cache.", "DIR"),
            Option("memory", str, None, "available memory, such as 24GiB; by default the free memory here.", "BYTES"),
            Option("training", bool, False, "also print the memory of training an EAGLE-3 head for the model."),
        ),
        *(option._replace(aliases=(*option.aliases, *ALIASES.get(option.name, ()))) for option in chosen),
        *settings_options(KVCacheConfig, CACHE),
    )


OPTIONS = _options()


def print_memory(model: str, values: Values) -> int:
    """Print the forecast of a model's memory; without a draft, also known heads of the model."""
    from sametoken.check.fitting import fitting_heads
    from sametoken.check.memory import forecast, in_words
    from sametoken.checkpoint.hub import read_config, resolve
    from sametoken.model.config import ModelConfig
    from sametoken.train import memory as training
    from sametoken.train.dataset.extraction import parse_bytes

    memory = None if values["memory"] is None else parse_bytes(values["memory"], "memory")
    target = resolve(embedded.target(model), weights=False, index=True)
    draft = _draft(values["draft"]) if values["draft"] is not None else None
    if draft is None and kinds.inside(values["method"]):
        draft = target
    found = forecast(target, draft, _settings(values), memory)
    if draft is not None and (problem := _mismatch(target, draft)):
        found = replace(found, notes=(*found.notes, problem))
    folders = [] if values["heads"] is None else [_folder(values["heads"])]
    heads = fitting_heads(target, model, folders) if draft is None or folders else []
    trained = training.forecast(ModelConfig.from_hf(read_config(target))) if values["training"] else {}
    if values["json"]:
        record = {**asdict(found), "heads": [asdict(head) for head in heads]}
        print(json.dumps(record | ({"training": trained} if trained else {})))
        return 0
    lines = [*found.lines(), *(f"{'head that fits':<16} {each.name}: {each.kind}, {each.words}" for each in heads)]
    if trained:
        sizes = ", ".join(f"{in_words(size)} {way}" for way, size in trained.items())
        lines.append(f"{'training':<16} an EAGLE-3 head takes in each process: {sizes}")
    print("\n".join(lines))
    return 0


def _folder(name: str) -> Path:
    if not Path(name).is_dir():
        raise ConfigError(f"--heads {name} is no directory; expected a head, or a directory of heads")
    return Path(name)


def _draft(name: str) -> Path:
    """Directory of a draft; only a head is downloaded with its weights."""
    from sametoken.checkpoint.hub import read_json, resolve
    from sametoken.checkpoint.places import draft_directory
    from sametoken.kinds import states_head

    try:
        place = resolve(embedded.draft(name), weights=False, index=True)
        head = states_head(read_json(place / "config.json") or {})
    except SametokenError:
        return draft_directory(name)
    return draft_directory(name) if head else place


def _mismatch(target: Path, draft: Path) -> str | None:
    """Reason why a draft model cannot guess tokens of the target; None for a draft that can, and for heads."""
    from sametoken.checkpoint.hub import read_config
    from sametoken.checkpoint.shared_vocabulary import check_draft_vocabulary
    from sametoken.checkpoint.tokenizer_files import load_tokenizer
    from sametoken.heads.read import is_head
    from sametoken.model.config import ModelConfig

    if is_head(draft):
        return None
    rows = ModelConfig.from_hf(read_config(target)).vocab_size
    try:
        check_draft_vocabulary(draft, rows, target, lambda: load_tokenizer(target))
    except SametokenError as error:
        return str(error)
    return None


def _settings(values: Values) -> EngineSettings:
    from sametoken.check.memory import EngineSettings

    given: frozenset[str] = getattr(values, "given", frozenset())

    def of(owner: type[Any], *names: str, prefix: str = "") -> dict[str, Any]:
        shared = [name for name, its in SHARED.items() if its is owner and name in given]
        return {name: values[f"{prefix}{name}"] for name in (*names, *shared)}

    cache = [option.name.removeprefix(CACHE) for option in settings_options(KVCacheConfig, CACHE)]
    return EngineSettings(
        EngineConfig(**of(EngineConfig, *ENGINE)),
        KVCacheConfig(**of(KVCacheConfig, *cache, prefix=CACHE)),
        SpeculativeConfig(**of(SpeculativeConfig, *SPECULATIVE)),
    )
