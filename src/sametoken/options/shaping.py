"""Samplers of llama.cpp that vLLM does not have, as parameters of a request; names and formulas are llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator
from pydantic.dataclasses import dataclass

from sametoken.options.declaration import STRICT, refusal, refusing

WHOLE = -1  # as many tokens as there are


def _breakers(value: Any) -> tuple[str, ...]:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not (listed and all(isinstance(text, str) and text for text in value)):
        raise refusal("dry_sequence_breakers", value, "a list of strings that are not empty")
    return tuple(value)


@refusing("shaping")
@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Shaping:
    """Samplers of llama.cpp, applied in llama.cpp's default order.

    They read logits before temperature, and so do top_p, top_k and min_p of a request that has one of the first six.

    Raises:
        RequestError: a field has the wrong type or range.
    """

    top_n_sigma: float = -1.0
    """keep the tokens whose score is at most so many standard deviations of all scores below the highest one; 0 and
    less is off."""
    typical_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """keep the tokens whose information is nearest to the expected one, until their probabilities exceed this; 1 is
    off."""
    xtc_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """chance that of several tokens above `xtc_threshold` the least probable alone is kept; 0 is off."""
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] = 0.1
    """probability from which `xtc_probability` counts a token."""
    dynatemp_range: Annotated[float, Field(ge=0)] = 0.0
    """how far the temperature may go down where the next token is certain, and up where it is not; 0 is off."""
    dynatemp_exponent: Annotated[float, Field(gt=0)] = 1.0
    """power of the uncertainty, 0 .. 1, that says where in its range the temperature is."""
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    """number of newest tokens, those of the prompt included, that all penalties count; 0 counts none, -1 all; without
    it: repetition_penalty counts prompt and output, the other penalties count the output."""
    dry_multiplier: Annotated[float, Field(ge=0)] = 0.0
    """what is subtracted from the score of a token that would make a repeated sequence longer; 0 is off."""
    dry_base: Annotated[float, Field(ge=0)] = 1.75
    """factor of that for each token that the sequence has beyond `dry_allowed_length`; below 1 is off."""
    dry_allowed_length: Annotated[int, Field(ge=0)] = 2
    """length of repeated sequences that costs nothing."""
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] = WHOLE
    """number of newest tokens that are searched for repeats; 0 is off, -1 is all."""
    dry_sequence_breakers: Annotated[Sequence[str], PlainValidator(_breakers)] = ("\n", ":", '"', "*")
    """texts at which a repeated sequence ends; one counts where it lies within one token."""

    @property
    def shapes(self) -> bool:
        """True if a sampler changes the distribution of tokens; DRY, which only subtracts penalties, does not count."""
        cut = self.top_n_sigma > 0 or self.typical_p < 1
        return cut or self.xtc_probability > 0 or self.dynatemp_range > 0

    @property
    def dry(self) -> bool:
        """True if repeated sequences are penalised."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0
