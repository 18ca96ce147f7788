"""Building blocks of request bodies: a base class that refuses unknown fields, and field types with their own checks.

A field that is null counts as left out, even an unknown one. The texts below fields are part of the OpenAPI document.
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

from sametoken.options.declaration import SAME, declared, texts_of_fields
from sametoken.options.json_types import MOST_LOGPROBS

MOST_PROMPTS = 1024
EXACT = 2**53  # largest integer below which a float represents every integer
WHOLE = -1  # number of alternatives that means the whole vocabulary
NO_LIMIT = -1  # max_tokens that means up to the end of the context
PARTS = ("text", "input_text", "output_text", "refusal")  # types of parts with text; a refusal counts as text


def _with_whole_numbers(schema: Any) -> Any:
    """Core schema with integers that accept whole numbers of any notation, and with one error per list.

    pydantic collects all errors, of which one is reported: a list of a million wrong ids took seconds.
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
    """Convert a float without a fraction, up to `EXACT`, to an integer; larger floats may have lost their fraction."""
    exact = isinstance(given, float) and given.is_integer() and abs(given) <= EXACT
    return int(given) if exact else given  # type: ignore[call-overload]


class Body(BaseModel):
    """Base class of every body and of the objects in it; the text below a field is its description."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: object) -> object:
        """Drop unknown fields that are null, which clients send for unset fields of their own objects."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in given.items() if value is not None or name in known}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept integers that are written as 4.0, which JSON Schema allows."""
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
        for each in (described, *described["properties"].values()):
            if "description" in each:
                each["description"] = " ".join(each["description"].split())
        return made


class History(Body):
    """Base class of objects that clients send back with fields of their own: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


def _spoken(given: object) -> object:
    """Text of a string or of a list of text parts; any other value is returned unchanged, for the type to refuse."""
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
    """JSON schema as an object; a text is parsed."""
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
    """List of prompts, from a text, a list of texts, a list of token ids, or a list of such lists."""
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


_PROMPT = {"type": "string"}  # may be empty, because the tokenizer may add a begin token
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
# Literal[False] would accept 0.
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"const": False})]
# llama.cpp's -1 means no limit.
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
    """Make a class of bodies with the options of a declaration that request bodies have.

    Args:
        name: name of the class.
        declaration: class with the options.
        names: names of the options; empty for all.
        defaults: True if fields have the defaults of their options; otherwise the default is None.
    """
    fields: dict[str, Any] = {}
    for option in declared(declaration).values():
        kind = option.hint if option.shown.http is SAME else option.shown.http
        if kind is not None and (option.name in names or not names):
            default = option.field.default if defaults else None
            fields[option.name] = (kind | None, Field(default=default, description=option.help))
    return create_model(name, __base__=Body, __doc__=declaration.__doc__, **fields)
