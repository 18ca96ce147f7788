"""Building blocks of request bodies: a base class that refuses unknown fields, and field types with their own checks.

null is the same as leaving a field out, for unknown fields too. What docstrings say of fields is in the OpenAPI
document too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic import GetJsonSchemaHandler as Handler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from sametoken.options.declaration import SAME, declared
from sametoken.options.json_types import MOST_LOGPROBS
from sametoken.options.texts import texts_of_fields

MOST_PROMPTS = 1024
EXACT = 2**53  # up to which a float holds every integer
WHOLE = -1  # of the number of alternatives: all of the vocabulary
NO_LIMIT = -1  # of max_tokens: up to the end of the context
PARTS = ("text", "input_text", "output_text", "refusal")  # a refusal is sent back as any other text


def _with_whole_numbers(schema: Any) -> Any:
    """A schema of pydantic's whose integers take whole numbers of any notation, and whose lists have one error each.

    All errors are collected though one is told: a list of a million wrong ids took seconds.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_whole_numbers, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "int":
        return no_info_before_validator_function(_whole, schema)
    once = {"fail_fast": True} if schema.get("type") == "list" else {}
    return {key: _with_whole_numbers(value) for key, value in schema.items()} | once


def _whole(given: object) -> object:
    """A number without a fraction as an integer; larger ones may have lost theirs when they were read."""
    exact = isinstance(given, float) and given.is_integer() and abs(given) <= EXACT
    return int(given) if exact else given  # type: ignore[call-overload]


class Body(BaseModel):
    """Base of every body and of the objects in it; a text below a field says what it means."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
    )

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
        described["additionalProperties"] = cls.model_config["extra"] == "ignore" or {"type": "null"}
        texts = texts_of_fields(cls)
        for name, field in cls.model_fields.items():
            if name in texts:
                described["properties"][field.alias or name].setdefault("description", texts[name])
        for said in (described, *described["properties"].values()):
            if "description" in said:
                said["description"] = " ".join(said["description"].split())
        return made


class History(Body):
    """Base of what clients send back as they got it, with fields of their own: what is unknown is ignored."""

    model_config = ConfigDict(extra="ignore")


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


_PROMPT = {"type": "string"}  # an empty one may get a begin token
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PARTS = {"type": "array", "items": {"anyOf": [
    {"type": "object", "properties": {"type": {"enum": kinds}, name: {"type": "string"}}, "required": ["type", name]}
    for name, kinds in (("text", list(PARTS[:-1])), ("refusal", [PARTS[-1]]))
]}}  # fmt: skip
_MANY = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS}
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema({"anyOf": [_PROMPT, {**_MANY, "items": {"anyOf": [_PROMPT, _IDS]}}, _IDS]}),
]
Spoken = Annotated[str, BeforeValidator(_spoken), WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS]})]
# Literal[False] would take 0 for it.
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"const": False})]
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


Alternatives = Annotated[int, Field(ge=WHOLE, le=MOST_LOGPROBS)]


def field_names(body: type[Body]) -> Iterable[str]:
    """Names of the fields of a body."""
    return body.model_fields


def view(name: str, declaration: type, *names: str, defaults: bool = False) -> Any:
    """A body with the options of a declaration that bodies of requests have.

    Args:
        names: of the options; none are all of them.
        defaults: whether fields have their own defaults; otherwise what is left out is None, for others to fill in.
    """
    fields: dict[str, Any] = {}
    for option in declared(declaration).values():
        kind = option.hint if option.shown.http is SAME else option.shown.http
        if kind is not None and (option.name in names or not names):
            default = option.field.default if defaults else None
            fields[option.name] = (kind | None, Field(default=default, description=option.help))
    return create_model(name, __base__=Body, __doc__=declaration.__doc__, **fields)
