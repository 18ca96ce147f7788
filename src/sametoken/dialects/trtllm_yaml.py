"""Reader of the YAML file of `trtllm-serve --extra_llm_api_options`, which configures TensorRT-LLM's drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sametoken.dialects.rules import Group, Translation, apply, empty_group, translate
from sametoken.dialects.trtllm import COMMON, KNOWN_TYPES, OWN, SPECULATIVE, TOP, named
from sametoken.dialects.yaml_mapping import parse_mapping
from sametoken.errors import ConfigError

DRAFTS = "speculative_config"
TABLE = {**TOP, DRAFTS: Group(COMMON)}


def read_file(path: str) -> tuple[Translation, Translation]:
    """Translate a file into its settings of drafts and all other settings.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not possible here.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}; expected a YAML file of TensorRT-LLM's keys") from error
    return translate_text(text, Path(path).name)


def translate_text(text: str, name: str) -> tuple[Translation, Translation]:
    """Translate the text of a file, as `read_file` does; `name` is the file's name for messages."""
    stated = parse_mapping(text, name, "max_batch_size: 1")
    _check_indentation(stated, name)
    rest = {key: value for key, value in stated.items() if key != DRAFTS}
    if any(key not in TABLE for key in rest):
        translate(rest, TABLE, f"{name}: ")  # names the first unknown key
    drafts = _drafts(stated[DRAFTS], f"{name}: {DRAFTS}") if DRAFTS in stated else Translation()
    return drafts, translate(rest, TOP, f"{name}: ")


def _check_indentation(stated: Mapping[str, Any], name: str) -> None:
    """Refuse groups without keys whose keys stand at the top level."""
    inner: dict[str, set[str]] = {key: set(rule.keys) for key, rule in TOP.items() if isinstance(rule, Group)}
    inner[DRAFTS] = {key for table in SPECULATIVE.values() for key in table}
    for group in (DRAFTS, *inner):
        lost = [key for key in stated if key in inner[group] and key not in TABLE]
        if group in stated and stated[group] is None and lost:
            raise ConfigError(empty_group(f"{name}: {group}", lost))


def _drafts(stated: Any, origin: str) -> Translation:
    if stated is None:
        raise ConfigError(empty_group(origin))
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{origin} = {stated!r}: expected keys and values, decoding_type among them")
    if "decoding_type" not in stated:
        raise ConfigError(f"{origin} has no decoding_type; {KNOWN_TYPES}")
    apply(COMMON["decoding_type"], stated["decoding_type"], f"{origin}.decoding_type")
    kind = named(stated["decoding_type"]) or ""
    company = {
        key: f"is a key of decoding_type {other}, not of {stated['decoding_type']}"
        for other, table in OWN.items()
        for key in table
    }
    result = translate(stated, SPECULATIVE[kind], f"{origin}.", company)
    _check_tree(stated, origin)
    return result


def _check_tree(stated: Mapping[str, Any], origin: str) -> None:
    tree, width = stated.get("use_dynamic_tree"), stated.get("dynamic_tree_max_topK")
    if bool(tree) != (width is not None):
        raise ConfigError(
            f"{origin}: use_dynamic_tree is {tree!r} and dynamic_tree_max_topK {width!r}; "
            "expected true and a number of branches, or neither"
        )
