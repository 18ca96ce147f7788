"""What bodies of requests are made of: a base that refuses what it does not know, and fields that check themselves.

null is the same as leaving a field out, for unknown fields too. What docstrings say of fields is in the OpenAPI
document too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic import GetJsonSchemaHandler as Handler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from sametoken.errors import unknown_name
from sametoken.notes import attribute_notes, purpose

MOST_LOGPROBS = 20
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1024
MOST_BIASES = 1024
MOST_PROMPTS = 1024
EXACT = 2**53  # up to which a float holds every integer
NO_LIMIT = -1  # of max_tokens: up to the end of the context
PARTS = ("text", "input_text", "output_text", "refusal")  # a refusal is sent back as any other text


def _with_whole_numbers(schema: Any) -> Any:
    """A schema of pydantic's whose integers take whole numbers of any notation."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_whole_numbers, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "int":
        return no_info_before_validator_function(_whole, schema)
    return {key: _with_whole_numbers(value) for key, value in schema.items()}


def _whole(given: object) -> object:
    """A number without a fraction as an integer; larger ones may have lost theirs when they were read."""
    exact = isinstance(given, float) and given.is_integer() and abs(given) <= EXACT
    return int(given) if exact else given  # type: ignore[call-overload]


class Body(BaseModel):
    """Base of every body and of the objects in it.

    Attributes:
        same_as: the class whose notes hold for fields of the same name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    same_as: ClassVar[type | None] = None

    @classmethod
    def notes(cls) -> dict[str, str]:
        """What each field means."""
        owners = [owner for owner in reversed(cls.__mro__) if issubclass(owner, Body) and owner is not Body]
        found = attribute_notes(cls.same_as) if cls.same_as is not None else {}
        for owner in owners:
            found |= attribute_notes(owner)
        return {name: found[name] for name in cls.model_fields if name in found}

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: object) -> object:
        """Clients dump their own objects, whose unset fields ask for nothing."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in given.items() if value is not None or name in known}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Integers may be written as 4.0, which they are in JSON Schema."""
        return cast(CoreSchema, _with_whole_numbers(handler(source)))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Handler) -> dict[str, Any]:
        made = handler(schema)
        described = handler.resolve_ref_schema(made)
        described["additionalProperties"] = {"type": "null"}
        described["description"] = purpose(cls)
        for name, note in cls.notes().items():
            described["properties"][cls.model_fields[name].alias or name]["description"] = note
        return made


def _texts(name: str, most: int, longest: int) -> BeforeValidator:
    def check(given: object) -> object:
        texts = [given] if isinstance(given, str) else given
        if texts is None:
            return None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected a string or a list of strings for {name}")
        if len(texts) > most or any(len(text) > longest for text in texts):
            raise ValueError(f"expected at most {most} strings of at most {longest} characters for {name}")
        return texts

    return BeforeValidator(check)


def _spoken(given: object) -> object:
    """Text from a string, or from parts of type text; anything else is for the type to refuse."""
    if not isinstance(given, list):
        return given
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in PARTS else None
        if not isinstance(text, str):
            problem = f'expected text or parts of {{"type": "text", "text": ...}}, not a part of type {kind!r}'
            raise ValueError(problem)  # noqa: TRY004 - pydantic takes no other
        texts.append(text)
    return "\n".join(texts)


def _schema(given: object) -> object:
    """A JSON schema that was sent as text, as an object."""
    if isinstance(given, str):
        try:
            return json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError("expected a JSON schema, as an object or as the text of one") from error
    return given


def _forms(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in _FORMS["properties"]:
            raise ValueError(unknown_name("form", name, _FORMS["properties"]))
    return given


def _limit(given: int) -> int:
    if given == 0:
        raise ValueError("expected at least 1, or -1 for no limit but the context")
    return given


def _off(given: bool) -> bool:
    if given:
        raise ValueError("expected false; leave it out")
    return given


def _prompts(given: object) -> object:
    """One text, texts, token ids or lists of token ids as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _are_ids(given):
            return [list(map(_whole, given))]
        if len(given) > MOST_PROMPTS:
            raise ValueError(f"expected at most {MOST_PROMPTS} prompts")
        if all(isinstance(prompt, str) or _are_ids(prompt) for prompt in given):
            return [prompt if isinstance(prompt, str) else list(map(_whole, prompt)) for prompt in given]
    raise ValueError("expected text, a list of texts, a list of token ids or a list of such lists")


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(_whole(token)) is int for token in given)


_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {"type": "string"}  # an empty one may get a begin token
_SHORT = {**_TEXT, "maxLength": MOST_STOP_CHARACTERS}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"anyOf": [_SHORT, {"type": "array", "items": _SHORT, "maxItems": MOST_STOPS}, {"type": "null"}]}
_PARTS = {"type": "array", "items": {"anyOf": [
    {"type": "object", "properties": {"type": {"enum": kinds}, name: {"type": "string"}}, "required": ["type", name]}
    for name, kinds in (("text", list(PARTS[:-1])), ("refusal", [PARTS[-1]]))
]}}  # fmt: skip
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MOST_BIASES,
}
_FORMS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "json": {"type": ["object", "boolean"]},
        "json_object": {"type": "boolean"},
        "regex": {"type": "string"},
        "choice": {"type": "array", "items": _TEXT, "minItems": 1},
        "grammar": {"type": "string"},
    },
    "additionalProperties": False,
    "minProperties": 1,
}
_MANY = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS}
Stops = Annotated[
    list[str] | None, _texts("stop", MOST_STOPS, MOST_STOP_CHARACTERS), WithJsonSchema(_TEXTS), Field(default=None)
]
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema({"anyOf": [_PROMPT, {**_MANY, "items": {"anyOf": [_PROMPT, _IDS]}}, _IDS]}),
]
Spoken = Annotated[str, BeforeValidator(_spoken), WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS]})]
# Literal[False] would take 0 for it.
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"const": False})]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Biases = Annotated[dict[str, float], Field(max_length=MOST_BIASES), WithJsonSchema(_BIASES)]
Words = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_BIASES)]
# llama.cpp's -1 is "no limit".
Limit = Annotated[
    int,
    Field(ge=-1),
    AfterValidator(_limit),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": NO_LIMIT}]}),
]
Schema = Annotated[
    dict[str, Any],
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "contentMediaType": "application/json"}]}),
]
Forms = Annotated[dict[str, Any], AfterValidator(_forms), WithJsonSchema(_FORMS)]


def field_names(body: type[Body]) -> Iterable[str]:
    """What a body may hold."""
    return body.model_fields
