"""Configuration of RoPE, read from a `config.json`, and by option in its place; `rotary.py` computes the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError, shown
from sametoken.model.keys import MOST_POSITIONS, Keys

ORIGINAL, POSITIONS, OPTION = "original_max_position_embeddings", "max_position_embeddings", "rope_scaling"
KEPT = ("rope_theta", "partial_rotary_factor", ORIGINAL)  # keys of the file's RoPE that a new kind leaves
CHANGED = ("default", "linear", "dynamic", "llama3", "yarn")  # kinds that may be changed or replaced
STRETCHED = ("linear", "dynamic", "yarn")  # kinds whose factor stretches the context
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Configuration of RoPE. Fields that a kind does not use keep their defaults.

    Attributes:
        kind: one of ROPE_KINDS.
        theta: base of the frequencies.
        dim: rotated dimensions of a head, `head_dim * partial_rotary_factor`.
        max_position: number of positions of the model.
        original_max_position: positions of pre-training, before scaling (llama3, yarn, longrope).
        factor: context stretch; for yarn and longrope, `max_position / original_max_position` if none is given.
        attention_factor: multiplies cos and sin (yarn, longrope); None means the kind's own formula.
        short_factor, long_factor: [dim / 2] divisors of the frequencies (longrope).
        interleaved: a pair of rotated dimensions is adjacent (GLM), not `dim / 2` apart.
        wide: rotated in float32, with tables in float32 (Llama 4, DeepSeek V2), not in the activations' dtype.
    """

    kind: str
    theta: float
    dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Defaults:
    """Defaults of a family's transformers code for keys that files may leave out.

    Most are the values of absent keys, where None means "as many as query heads" and so on.

    Attributes:
        rope_names: the rotary kinds by their names in files.
        absent_rope: RoPE of a file without one.
        partial_rotation: an absent `partial_rotary_factor`, None if the code does not read it.
        local_theta: key, if there is one, and default of the base for layers with a window, if their RoPE differs;
            None if not.
        head_key: key of the size of a head, or of its rotated part (DeepSeek).
        tied: value of an absent `tie_word_embeddings`.
        activation: key of the activation, and the value of an absent one.
    """

    family: str
    max_position: int
    original_max_position: int | None = None
    norm_eps: float = 1e-6
    num_kv_heads: int | None = None
    head_dim: int | None = None
    head_key: str = "head_dim"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_ids: tuple[int, ...] = ()
    theta: float = 10000.0
    rope_names: Mapping[str, str] = field(default_factory=lambda: {kind: kind for kind in ROPE_KINDS})
    absent_rope: Mapping[str, Any] | None = None
    partial_rotation: float | None = None
    local_theta: tuple[str | None, float] | None = None
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")


def read_rope(keys: Keys, head_dim: int, defaults: Defaults) -> RopeConfig:
    """RoPE of all layers, or of those with full attention if the others differ."""
    scaling, stated = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    if defaults.local_theta is not None:
        full = Keys(stated, "'rope_parameters' of config.json").mapping("full_attention")
        if scaling and stated and not full:
            raise CheckpointError(
                "config.json has 'rope_scaling', and 'rope_parameters' without 'full_attention', expected one of them: "
                "is this file complete?"
            )
        keys = keys.over({"rope_parameters": {**full, **scaling}, "rope_scaling": None})
    elif defaults.absent_rope is not None and not scaling and not stated:
        keys = keys.over({"rope_parameters": defaults.absent_rope})
    return _read(keys, head_dim, defaults)


def read_local_rope(keys: Keys, head_dim: int, defaults: Defaults) -> RopeConfig:
    """RoPE of layers with a window, in a family in which it differs from that of other layers."""
    assert defaults.local_theta is not None
    key, absent = defaults.local_theta
    theta = absent if key is None else keys.number(key, absent)
    stated = Keys(keys.mapping("rope_parameters"), "'rope_parameters' of config.json").mapping("sliding_attention")
    return _read(keys.over({"rope_parameters": stated, "rope_scaling": None, "rope_theta": theta}), head_dim, defaults)


def _read(keys: Keys, head_dim: int, defaults: Defaults) -> RopeConfig:
    # transformers 5 writes `rope_parameters` and lets a `rope_scaling` that is also present win.
    name = "rope_scaling" if keys.mapping("rope_scaling") else "rope_parameters"
    values = keys.mapping(name)
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedModelError(
            f"{name!r} of config.json differs per layer type; supported: one rotary embedding for all layers"
        )
    rope = Keys(values, f"{name!r} of config.json")
    named = values.get("rope_type", values.get("type", "default"))
    if not isinstance(named, str) or named not in defaults.rope_names:
        raise UnsupportedModelError(
            f"rotary kind {shown(named)} is not supported for {defaults.family}; "
            f"supported: {', '.join(defaults.rope_names)}"
        )
    kind = defaults.rope_names[named]
    dim = _rotated(keys, rope, head_dim, kind, defaults)
    max_position = keys.integer("max_position_embeddings", defaults.max_position, MOST_POSITIONS)
    stretched = "original_max_position_embeddings"
    inner = rope.integer(stretched, max_position, MOST_POSITIONS)
    original = keys.integer(stretched, defaults.original_max_position or inner, MOST_POSITIONS)
    plain = RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", keys.number("rope_theta", defaults.theta)),
        dim=dim,
        max_position=max_position,
        original_max_position=original,
    )
    return _scaled(plain, rope)


def _rotated(keys: Keys, rope: Keys, head_dim: int, kind: str, defaults: Defaults) -> int:
    """Number of rotated dimensions of a head.

    Only the code of Phi 3 and GLM reads `partial_rotary_factor`. Plain RoPE of other families ignores it, and
    with a scaled one transformers itself cannot run such a file.
    """
    absent = defaults.partial_rotation
    key = "partial_rotary_factor"
    partial = rope.number(key, keys.number(key, 1.0 if absent is None else absent))
    if absent is None:
        if kind != "default" and partial != 1:
            raise UnsupportedModelError(
                f"config.json has 'partial_rotary_factor' {partial} with rotary kind {kind!r}, which models of family "
                f"{defaults.family} cannot have; expected 1, or no such key"
            )
        partial = 1.0
    dim = int(head_dim * partial)
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(
            f"{dim} of the {head_dim} dimensions of a head are rotated ('partial_rotary_factor' {partial}), "
            "expected an even number up to the head's own: is config.json complete?"
        )
    return dim


def _scaled(plain: RopeConfig, rope: Keys) -> RopeConfig:
    """Copy of `plain` with the fields of its kind read from the file."""
    stretch = plain.max_position / plain.original_max_position
    match plain.kind:
        case "linear" | "dynamic":
            return replace(plain, factor=rope.number("factor"))
        case "llama3":
            return replace(
                plain,
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        case "yarn":
            return replace(
                plain,
                factor=rope.number("factor", stretch),
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                attention_factor=rope.optional_number("attention_factor"),
                mscale=rope.optional_number("mscale"),
                mscale_all_dim=rope.optional_number("mscale_all_dim"),
                truncate=rope.flag("truncate", True),
            )
        case "longrope":
            return replace(
                plain,
                factor=rope.number("factor", stretch),
                attention_factor=rope.optional_number("attention_factor"),
                short_factor=rope.numbers("short_factor", plain.dim // 2),
                long_factor=rope.numbers("long_factor", plain.dim // 2),
            )
    return plain


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
