"""RoPE that an engine is given in place of the file's own: the keys of config.json with it, and the context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sametoken.errors import ConfigError
from sametoken.model.keys import MOST_POSITIONS, Keys
from sametoken.model.rope_config import Defaults, RopeConfig

ORIGINAL, POSITIONS, OPTION = "original_max_position_embeddings", "max_position_embeddings", "rope_scaling"
KEPT = ("rope_theta", "partial_rotary_factor", ORIGINAL)  # keys of the file's RoPE that a new kind leaves
CHANGED = ("default", "linear", "dynamic", "llama3", "yarn")  # kinds that may be changed or replaced
STRETCHED = ("linear", "dynamic", "yarn")  # kinds whose factor stretches the context


def overridden(keys: Keys, given: Mapping[str, Any], defaults: Defaults) -> Keys:
    """Keys of a file with another RoPE; with windows of their own RoPE, those of the layers with full attention.

    Args:
        given: keys of `options.rope.RopeScaling`.

    Raises:
        ConfigError: the family has no such RoPE, or the file has divisors for each frequency.
    """
    rope = {key: value for key, value in given.items() if key != POSITIONS}
    changes: dict[str, Any] = {key: given[key] for key in (POSITIONS, ORIGINAL) if key in given}
    if not rope:
        return keys.over(changes)
    layers = keys.mapping("rope_parameters")
    stated = layers if defaults.local_theta is None else Keys(layers).mapping("full_attention")
    own = keys.mapping("rope_scaling") or stated or defaults.absent_rope or {}
    kind = own.get("rope_type", own.get("type", "default"))
    own_kind = defaults.rope_names.get(kind, kind) if isinstance(kind, str) else kind
    wanted = given.get("rope_type") or ("linear" if own_kind == "default" and "factor" in given else own_kind)
    if defaults.rope_names.get(wanted) != wanted or (rope.keys() != {"rope_theta"} and own_kind not in CHANGED):
        raise ConfigError(
            f"got {wanted!r} for a model of family {defaults.family} with RoPE of kind {own_kind!r}, which it cannot "
            "replace; leave it out, or change rope_theta alone",
            field=OPTION,
        )
    kept = {key: own[key] for key in KEPT if key in own} if "rope_type" in given else own
    merged = {**kept, **rope, "rope_type": wanted}
    if defaults.local_theta is None:
        return keys.over({**changes, "rope_scaling": merged, "rope_parameters": None})
    return keys.over({**changes, "rope_scaling": None, "rope_parameters": {**layers, "full_attention": merged}})


def stretched_positions(rope: RopeConfig, given: Mapping[str, Any]) -> int:
    """Number of positions of a model with this RoPE: the given one, or that of the file times the stretch, if more.

    Raises:
        ConfigError: there are too many.
    """
    found = rope.max_position
    if POSITIONS not in given and "factor" in given and rope.kind in STRETCHED:
        inner = rope.original_max_position if rope.kind == "yarn" else rope.max_position
        found = int(min(max(found, inner * rope.factor), 2.0 * MOST_POSITIONS))
    if found > MOST_POSITIONS:
        raise ConfigError(f"got a context of more than {MOST_POSITIONS} positions; lower factor", field=OPTION)
    return found
