"""`sametoken doctor MODEL`: forecast of the memory of a model, its draft and a batch, before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken import embedded
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
SPECULATIVE = ("max_total_draft_tokens", "tree_top_k", "draft_window", "draft_tensor_parallel_size")
SHARED = {"device": EngineConfig, "dtype": EngineConfig, "max_draft_len": SpeculativeConfig}  # for heads too
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip


def _options() -> tuple[Option, ...]:
    named = {option.name: option for owner in (EngineConfig, SpeculativeConfig) for option in settings_options(owner)}
    chosen = [named[name] for name in (*ENGINE, *SPECULATIVE)]
    return (
        *titled(
            "The memory of a model",
            Option("draft", str, None, "draft of the model: a head or a smaller model.", "DRAFT"),
            Option(
                "heads", str, None, "directory to search for heads that fit the model, beside the Hub's cache.", "DIR"
            ),
            Option(
                "memory",
                str,
                None,
                "memory that the model may take, for example 24GiB; without it: what is free on this machine.",
                "BYTES",
            ),
            Option("training", bool, False, "say too what a process takes that trains an EAGLE-3 head for the model."),
        ),
        *(option._replace(aliases=(*option.aliases, *ALIASES.get(option.name, ()))) for option in chosen),
        *settings_options(KVCacheConfig, CACHE),
    )


OPTIONS = _options()


def print_memory(model: str, values: Values) -> int:
    """Print the forecast of a model's memory; without a draft, also known heads that fit the model."""
    from sametoken.check import fitting
    from sametoken.check.memory import forecast
    from sametoken.check.memory_report import report
    from sametoken.checkpoint.hub import resolve

    memory = None if values["memory"] is None else bytes_of(values["memory"])
    target = resolve(embedded.target(model), weights=False, index=True)
    draft = None if values["draft"] is None else _draft(values["draft"])
    found = forecast(target, draft, _settings(values), memory)
    folders = [] if values["heads"] is None else [_folder(values["heads"])]
    heads = fitting.fitting_heads(target, model, folders) if draft is None or folders else []
    training = _training(target) if values["training"] else {}
    if values["json"]:
        record = {**found.to_json(), "heads": [head.to_json() for head in heads]}
        print(json.dumps(record | ({"training": training} if training else {})))
    else:
        rows = [f"  {way:<36} {size / 1e9:.1f} GB" for way, size in training.items()]
        title = ["training an EAGLE-3 head, of each process in bfloat16 with AdamW, forwards of 2048 tokens:"]
        print("\n".join(filter(None, [report(found), fitting.report(heads), *(title if rows else []), *rows])))
    return 0


def _training(target: Path) -> dict[str, int]:
    from sametoken.checkpoint.hub import read_config
    from sametoken.model.config import ModelConfig
    from sametoken.train.memory import forecast

    return forecast(ModelConfig.from_hf(read_config(target)))


def _folder(name: str) -> Path:
    if not Path(name).is_dir():
        raise ConfigError(f"--heads {name} is no directory; expected a head, or a directory that holds heads")
    return Path(name)


def _draft(name: str) -> Path:
    """Directory of a draft; of a draft model only the index is downloaded, of a head also its small weights."""
    from sametoken.checkpoint.hub import read_json, resolve
    from sametoken.checkpoint.places import draft_directory
    from sametoken.kinds import states_head

    try:
        place = resolve(embedded.draft(name), weights=False, index=True)
        head = states_head(read_json(place / "config.json") or {})
    except SametokenError:
        return draft_directory(name)
    return draft_directory(name) if head else place


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


def bytes_of(text: str) -> int:
    """Number of bytes from a text such as "24GiB", "80GB" or "1000000"; a unit of one letter is a power of 1024.

    Raises:
        ConfigError: the text is not a number of bytes above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS or float(match[1]) <= 0:
        raise ConfigError(f"--memory is {text!r}, expected a number of bytes such as 24GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2].lower()])
