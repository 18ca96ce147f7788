"""Configuration of latent attention (MLA), read from a `config.json`; `latent.py` has the module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sametoken.errors import CheckpointError
from sametoken.model.keys import MOST_HEADS, Keys


@dataclass(frozen=True)
class LatentConfig:
    """Configuration of MLA: keys and values of all heads are products of a small vector, the latent, plus a RoPE key.

    Attributes:
        rank: size of the latent.
        query_rank: size of the vector that queries are products of, None if they are products of the hidden state.
        rotated: rotated dimensions of a query, and of the key that all heads share.
        unrotated: the other dimensions of a query.
        value: size of a head's value.
        bias: the linears that read the hidden state into small vectors have biases.
    """

    rank: int
    query_rank: int | None
    rotated: int
    unrotated: int
    value: int
    bias: bool

    def parameters(self, hidden: int, heads: int) -> int:
        """Number of parameters of a layer's attention, without its output layer."""
        down = self.rank + self.rotated
        reads = hidden if self.query_rank is None else self.query_rank
        queries = 0 if self.query_rank is None else (hidden + 1 + self.bias) * self.query_rank
        queries += reads * heads * (self.unrotated + self.rotated)
        return queries + (hidden + self.bias) * down + self.rank * (1 + heads * (self.unrotated + self.value))


def read_latent(keys: Keys, heads: int) -> LatentConfig:
    """Read the configuration of latent attention from a `config.json` of DeepSeek.

    Raises:
        CheckpointError: a value is not a size, or there are fewer keys than queries.
    """
    if keys.integer("num_key_value_heads", heads, MOST_HEADS) != heads:
        raise CheckpointError(
            f"config.json has {keys.values['num_key_value_heads']} 'num_key_value_heads', expected {heads} as "
            "'num_attention_heads': latent attention has a key for every query; is this file complete?"
        )
    ranked = keys.values.get("q_lora_rank", 1536) is not None
    return LatentConfig(
        rank=keys.integer("kv_lora_rank", 512),
        query_rank=keys.integer("q_lora_rank", 1536) if ranked else None,
        rotated=keys.integer("qk_rope_head_dim", 64, MOST_HEADS),
        unrotated=keys.integer("qk_nope_head_dim", 128, MOST_HEADS),
        value=keys.integer("v_head_dim", 128, MOST_HEADS),
        bias=keys.flag("attention_bias", False),
    )


def score_scale(keys: Keys, latent: LatentConfig) -> float:
    """Factor of the products of queries and keys, which is greater for stretched RoPE (mscale of YaRN)."""

    scaling = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    stated: Any = scaling.get("mscale_all_dim")
    plain = 1 / math.sqrt(latent.unrotated + latent.rotated)
    if scaling.get("rope_type", scaling.get("type", "default")) == "default" or not stated:
        return plain
    rope = Keys(scaling, "the rotation of config.json")
    factor, share = rope.number("factor"), rope.number("mscale_all_dim")
    stretched = 0.1 * share * math.log(max(factor, 1.0)) + 1
    return plain * stretched * stretched
