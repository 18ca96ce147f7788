"""Layer ids in files of EAGLE-3 heads: two conventions, the tools that use each, and assumptions.

In this package, a tap is the output of block i. Files either use this id ("output": ModelOpt, SpecForge, SGLang,
TensorRT-LLM) or the number of blocks before ("before" = output + 1: EAGLE's code, vLLM, speculators), and do not
declare which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sametoken.errors import CheckpointError, ConfigError, DraftMismatchError
from sametoken.heads.files import mapping
from sametoken.heads.taps import default_taps
from sametoken.kinds import OURS
from sametoken.model.config import ModelConfig

IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Taps:
    """Layers that a file declares.

    Attributes:
        layers: 0-based blocks whose outputs are read.
        convention: convention of the ids in the file: "output", "before", or "default" if the file has no ids.
        known: False if the convention was assumed.
        why: reason for the convention, as text.
    """

    layers: tuple[int, ...]
    convention: str
    known: bool
    why: str


def read_taps(config: Mapping[str, Any], target: ModelConfig, count: int) -> Taps:
    """Read the taps of an EAGLE-3 head.

    Args:
        config: config.json of the head.
        count: number of taps that `fc` reads.

    Raises:
        CheckpointError: the ids are not a list of `count` integers, or contradict each other.
        DraftMismatchError: the target has no such layer.
    """
    found = _found(config, target, count)
    if len(found.layers) != count:
        raise CheckpointError(f"config.json names {len(found.layers)} layers {list(found.layers)}, fc reads {count}")
    if absent := [layer for layer in found.layers if not 0 <= layer < target.num_layers]:
        raise DraftMismatchError(
            f"the head reads the output of layer {absent[0]} ({found.why}), the target has layers 0 to "
            f"{target.num_layers - 1}; it was trained beside another model"
        )
    return found


def _found(config: Mapping[str, Any], target: ModelConfig, count: int) -> Taps:
    ours = mapping(config.get(OURS))
    if ours.get("taps") is not None:
        return Taps(_ids(ours["taps"], f"{OURS}.taps"), "output", True, "written by sametoken")
    nested, top = mapping(config.get("eagle_config")).get(IDS), config.get(IDS)
    if top is not None:
        return _top_level(_ids(top, IDS), nested, config, target, count)
    if nested is not None:
        return _nested(_ids(nested, f"eagle_config.{IDS}"), target)
    try:
        taps = default_taps(target.num_layers)
    except ConfigError as error:
        raise CheckpointError(f"config.json names no layers: {error}") from error
    return Taps(taps, "default", True, "no ids in config.json; everyone's default")


def _top_level(ids: tuple[int, ...], nested: Any, config: Mapping[str, Any], target: ModelConfig, count: int) -> Taps:
    if len(ids) == count + 1 and ids[-1] == target.num_layers:
        ids = ids[:-1]  # speculators also lists the last hidden state, which only its trainer reads
    taps = tuple(i - 1 for i in ids)
    if nested is not None:
        inner = _ids(nested, f"eagle_config.{IDS}")
        if inner == taps:
            return Taps(taps, "before", True, "both kinds of ids are there and agree")
        why = f"ids {list(ids)} and {list(inner)} contradict each other; the first count blocks before, as vLLM reads"
        return Taps(taps, "before", False, why)
    if "speculators_config" in config or "speculators_model_type" in config:
        return Taps(taps, "before", True, "speculators counts the blocks before")
    if 0 in ids:
        return Taps(ids, "output", True, "layer 0 has no block before it")
    return Taps(taps, "before", False, "top-level ids count the blocks before, as vLLM reads them")


def _nested(ids: tuple[int, ...], target: ModelConfig) -> Taps:
    if max(ids) == target.num_layers:
        why = f"id {max(ids)} of {target.num_layers} layers can only count the blocks before"
        return Taps(tuple(i - 1 for i in ids), "before", True, why)
    if 0 in ids or ids == _default(target):
        return Taps(ids, "output", True, "ids in eagle_config name outputs, and these fit no other reading")
    return Taps(ids, "output", False, "ids in eagle_config name outputs, as ModelOpt, SpecForge and SGLang have it")


def _default(target: ModelConfig) -> tuple[int, ...]:
    try:
        return default_taps(target.num_layers)
    except ConfigError:
        return ()


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise CheckpointError(f"config.json has {value!r} for {name!r}, expected a list of layers")
    return tuple(value)
