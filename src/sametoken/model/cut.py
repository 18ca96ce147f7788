"""Configuration of one rank's part of a decoder: a share of heads, MLP and logits, and all other layers whole."""

from __future__ import annotations

from dataclasses import replace

from sametoken.errors import ConfigError, UnsupportedModelError
from sametoken.model.config import ModelConfig
from sametoken.runtime.ranks import TILE, Columns, RankPart, divisors

OPTION = "tensor_parallel_size"


def cut(config: ModelConfig, part: RankPart, option: str = OPTION) -> ModelConfig:
    """Configuration of a part of a decoder.

    Args:
        option: the option with which the user set the number of parts.

    Raises:
        ConfigError: the heads or the MLP cannot be divided among so many ranks; the message lists possible numbers.
        UnsupportedModelError: a layer needs the heads of all ranks at once.
    """
    if part.size == 1:
        return config
    if config.whole_qk_norm:
        raise UnsupportedModelError(
            f"{option} {part.size}: {config.family} norms the queries of all heads together, which ranks cannot do "
            f"apart; use {option} 1"
        )
    if config.latent is not None:
        raise UnsupportedModelError(
            f"{option} {part.size}: {config.family} has latent attention, whose heads are not divided; use {option} 1"
        )
    experts = config.experts
    dense = experts is None or not all(experts.layers)
    sizes = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    if dense:
        sizes["intermediate_size"] = config.intermediate_size
    if experts is not None:
        sizes["the width of an expert"] = experts.width
        sizes |= {"the width of the shared expert": experts.shared} if experts.shared else {}
    if config.vocab_size < TILE * part.size:
        raise ConfigError(
            f"{option} {part.size}: the model has {config.vocab_size} logits, and each rank needs {TILE}; use one of "
            f"{', '.join(map(str, divisors([*sizes.values()], config.vocab_size // TILE)))}"
        )
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size % part.size]:
        counts = ", ".join(map(str, divisors([*sizes.values()])))
        raise ConfigError(
            f"{option} {part.size}: the model has {' and '.join(wrong)}, which {part.size} does not divide; "
            f"use one of {counts}"
        )
    if experts is not None:
        experts = replace(experts, width=experts.width // part.size, shared=experts.shared // part.size)
    return replace(
        config,
        num_heads=config.num_heads // part.size,
        num_kv_heads=config.num_kv_heads // part.size,
        intermediate_size=config.intermediate_size // part.size if dense else config.intermediate_size,
        experts=experts,
        columns=Columns.of(part, config.vocab_size),
    )
