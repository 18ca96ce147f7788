"""Options of RoPE that replace those of the target's own file, under the names of config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sametoken.errors import ConfigError
from sametoken.options.declaration import Settings

Number = Annotated[float, Field(gt=0, le=1e30)]
Positions = Annotated[int, Field(ge=1, le=1 << 24)]
NEEDED = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class RopeScaling(Settings):
    """RoPE of a target, in place of its file's. Keys that are left out have the meaning of an absent key."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] | None = None
    """kind; without it the file's own keys are changed, as linear RoPE where the file has plain RoPE."""
    factor: Number | None = None
    """stretch of the context."""
    original_max_position_embeddings: Positions | None = None
    """positions of pre-training; without it those of the file (yarn, llama3)."""
    max_position_embeddings: Positions | None = None
    """positions of the model; without it the file's, or those that the stretch gives if they are more."""
    rope_theta: Number | None = None
    """base of the frequencies; without it the file's."""
    attention_factor: Number | None = None
    """factor of cos and sin; without it the formula of YaRN."""
    beta_fast: Number | None = None
    """rotations above which a dimension is not stretched (yarn)."""
    beta_slow: Number | None = None
    """rotations below which a dimension is stretched wholly (yarn)."""
    mscale: Number | None = None
    """numerator of the attention factor (yarn of DeepSeek)."""
    mscale_all_dim: Number | None = None
    """denominator of the attention factor (yarn of DeepSeek)."""
    truncate: bool | None = None
    """round the bounds between stretched and other dimensions (yarn)."""
    low_freq_factor: Number | None = None
    """bound of the long wavelengths (llama3)."""
    high_freq_factor: Number | None = None
    """bound of the short wavelengths (llama3)."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in NEEDED.get(self.rope_type or "", ()):
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs {name}; give it too")
        return self


def read_rope_scaling(given: object) -> dict[str, Any] | None:
    """Keys of `RopeScaling` from a mapping, from JSON, or from the name of a kind; None for no key.

    Raises:
        ValueError: a key is unknown, or a value is not possible.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.lstrip().startswith("{") else {"rope_type": given.strip()}
        except (ValueError, RecursionError) as error:
            raise ValueError("expected a JSON object") from error
    if given is not None and not isinstance(given, Mapping):
        raise ValueError('expected keys and values, for example {"rope_type": "yarn", "factor": 4.0}')
    try:
        named = {"rope_type" if key == "type" else str(key): value for key, value in (given or {}).items()}
        return RopeScaling.of(named).model_dump(exclude_none=True) or None
    except ConfigError as error:
        raise ValueError(str(error)) from error
