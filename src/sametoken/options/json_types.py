"""Types of sampling options in request bodies, where JSON or the cost of a request needs a type of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_SCORED = 128
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1024
MOST_BIASES = 1024
MOST_ALLOWED = 2**18  # size of the largest vocabularies
MOST_BIAS = 100  # largest absolute bias of a logit


def _texts(given: object) -> object:
    texts = [given] if isinstance(given, str) else given
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("expected a string or a list of strings for stop")
    if len(texts) > MOST_STOPS or any(len(text) > MOST_STOP_CHARACTERS for text in texts):
        raise ValueError(f"expected at most {MOST_STOPS} strings of at most {MOST_STOP_CHARACTERS} characters for stop")
    return texts


_SHORT = {"type": "string", "minLength": 1, "maxLength": MOST_STOP_CHARACTERS}
_TEXTS = {"anyOf": [_SHORT, {"type": "array", "items": _SHORT, "maxItems": MOST_STOPS}, {"type": "null"}]}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
    "maxProperties": MOST_BIASES,
}
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(max_length=MOST_BIASES)]
ScoredIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_SCORED)]
SomeTokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_ALLOWED)]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Words = Annotated[list[Word], Field(max_length=MOST_STOPS)]
Stops = Annotated[list[str] | None, BeforeValidator(_texts), WithJsonSchema(_TEXTS)]
Biases = Annotated[dict[str, float], Field(max_length=MOST_BIASES), WithJsonSchema(_BIASES)]
