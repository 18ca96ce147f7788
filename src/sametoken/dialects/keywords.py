"""Translation of keywords of vLLM's `LLM` into keywords of ours, by the table of options of `vllm serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from sametoken.dialects.peers import Passage, table, take
from sametoken.dialects.rules import Translation
from sametoken.dialects.vllm import read_json
from sametoken.dialects.vllm_door import RULES
from sametoken.errors import ConfigError, found_wrong, unknown_name
from sametoken.options.engine import EngineConfig, KVCacheConfig, ModelSettings
from sametoken.options.serving import CACHE, OPTIONS, elsewhere
from sametoken.options.speculation import SpeculativeConfig

ENGINE = {*EngineConfig.model_fields, *(CACHE + name for name in KVCacheConfig.model_fields)}
OURS = elsewhere("vllm-serve")  # our names of options that `sametoken serve` takes by vLLM's names too
GROUPS = (ENGINE, {*ModelSettings.model_fields}, {*SpeculativeConfig.model_fields})
ROWS = {name[2:].replace("-", "_"): row for row in table("vllm") for name in row.names if name.startswith("--")}


class Keywords(NamedTuple):
    """Keywords of `LLM`, translated and grouped.

    Attributes:
        engine: keys of `EngineConfig`, and of `KVCacheConfig` with the prefix "kv_cache_".
        models: keys of `ModelSettings`.
        speculative: keys of `SpeculativeConfig`.
        env: environment variables that the process needs.
        notes: one line for each keyword without effect.
    """

    engine: dict[str, Any]
    models: dict[str, Any]
    speculative: dict[str, Any]
    env: dict[str, str]
    notes: list[str]


def read_keywords(given: Mapping[str, Any]) -> Keywords:
    """Translate keywords of vLLM; our own keywords are unchanged.

    Raises:
        ConfigError: a keyword is unknown, would change texts, or is given twice; or its value is not possible here.
    """
    result, passage = Translation(), Passage()
    for name, value in given.items():
        if name in ENGINE and not _is_theirs(name, value):
            result.set(name, value, name)
        elif name not in ROWS:
            raise ConfigError(unknown_name("LLM keyword", name, ENGINE, ROWS))
        elif isinstance(value, int | float) or value:
            _take(name, value, passage)
            result.add(_settings(passage, f"{name}={value!r}"))
    passage.finish()
    result.add(_settings(passage))
    settings = {name: each.value for name, each in result.settings.items()}
    notes = [*result.notes, *([f"no effect here: {', '.join(passage.idle)}"] if passage.idle else [])]
    engine, models, speculative = ({name: settings[name] for name in settings if name in group} for group in GROUPS)
    return Keywords(engine, models, speculative, passage.env, notes)


def _is_theirs(name: str, value: Any) -> bool:
    """Return True if a keyword of both engines has a value that only vLLM has, such as dtype="half"."""
    hint = OPTIONS[name].field.annotation
    return name in ROWS and get_origin(hint) is Literal and value not in get_args(hint)


def _take(name: str, value: Any, passage: Passage) -> None:
    """Add one keyword of vLLM, in the form of the equivalent command-line option."""
    row = ROWS[name]
    spelling: str | None = name
    if not row.value and not value:
        spelling = row.names[0] if row.negates(name) else row.off
    if spelling is None:  # a switch that cannot be turned off
        return
    several = row.value.startswith("+") and _is_list(value)
    words = [] if not row.value else [*map(_word, value)] if several else [_word(value)]
    take(row, spelling, words, RULES, passage, f"{name}={value!r}")


def _settings(passage: Passage, keyword: str = "") -> Translation:
    """Settings from the words of a passage, which are removed from the passage.

    Args:
        keyword: keyword and value that the words stand for; "" for several, which the option names.
    """
    result = Translation()
    for option, stated in _pairs(passage.words):
        origin = keyword or option
        if option == "speculative_config":
            result.add(read_json(stated, option))
        elif any(option in group for group in GROUPS):
            result.set(option, _typed(option, stated, origin), origin)
        else:
            raise ConfigError(f"{origin}: {option} is an option of servers; leave it out")
    passage.words = []
    return result


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _word(value: Any) -> str:
    """Command-line form of a value."""
    if value is True:
        return "on"
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError):  # an object of vLLM or torch, such as torch.bfloat16
        return str(value).removeprefix("torch.")


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Our options in the words of a command line, each with its value as text."""
    left = list(words)
    while left:
        name, equals, stated = left.pop(0).partition("=")
        name = name.lstrip("-").replace("-", "_")
        option = name.removeprefix("no_")
        option = OURS.get(option, option)
        if equals or (left and not left[0].startswith("--")):
            yield option, stated if equals else left.pop(0)
        else:
            yield option, "false" if name.startswith("no_") else "true"


def _typed(option: str, stated: str, origin: str) -> Any:
    try:
        return TypeAdapter(OPTIONS[option].hint).validate_python(stated)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {found_wrong(error.errors()[0])}") from error
