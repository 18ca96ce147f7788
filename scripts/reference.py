"""The generated parts of docs/server.md: `python scripts/reference.py docs/server.md` writes them anew.

Fields come from the schemas, paths from the application, metrics from their table, options from `serve`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from foreign_keys import markdown as keys

from sametoken import LLM, SamplingParams
from sametoken.commands.serve import OPTIONS
from sametoken.engine.async_llm import AsyncLLM
from sametoken.options.declaration import declared
from sametoken.options.server import ServerConfig
from sametoken.server import chat_schema as chat
from sametoken.server import inert, schema
from sametoken.server import responses_schema as responses
from sametoken.server.app import build_app
from sametoken.server.fields import Body
from sametoken.server.metrics import METRICS, OURS, SAME, Metrics
from sametoken.server.worker import Worker

Json = dict[str, Any]
Row = tuple[str, ...]
PART = re.compile(r"(?P<begin><!-- generated: (?P<name>\w+) -->).*?(?P<end><!-- end -->)", flags=re.DOTALL)
# What a request that leaves fields out gets.
SHARED = {name: option.field.default for name, option in declared(SamplingParams).items()}
ENDPOINT_DEFAULTS = ("max_tokens",)  # which each endpoint has its own of, said in the note
ITEMS = (
    responses.InputMessage,
    responses.InputReasoning,
    responses.InputCall,
    responses.InputOutput,
)  # of `input`, whose document has no names
BODIES = (
    ("/v1/completions", schema.CompletionRequest),
    ("/v1/chat/completions", chat.ChatRequest),
    ("/v1/responses", responses.ResponsesRequest),
    ("/tokenize", chat.TokenizeRequest),
    ("/detokenize", chat.DetokenizeRequest),
)


def written(page: str) -> str:
    """The page with its generated parts as they are now.

    Raises:
        KeyError: the page has a mark for a part that there is not.
    """
    parts: dict[str, Callable[[], str]] = {
        "paths": lambda: _paths(asyncio.run(document())),
        "metrics": _metrics,
        "options": _options,
        "fields": _fields,
        "inert": _inert,
        "keys": keys,
    }
    return PART.sub(lambda found: f"{found['begin']}\n\n{parts[found['name']]()}\n{found['end']}", page)


async def document() -> Json:
    """The document of a server without a network."""
    config = ServerConfig()
    worker = Worker(AsyncLLM(LLM("embedded", "embedded"), config.max_chunks_per_second), config, Metrics("model"))
    await worker.engine.close()
    return build_app(worker, ("model",), {}).openapi()


def _table(header: Row, rows: Iterable[Row]) -> str:
    lines = (header, tuple("---" for _ in header), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _paths(document: Json) -> str:
    return _table(
        ("path", "what"),
        (
            (f"`{method.upper()} {path}`", said["description"])
            for path, methods in document["paths"].items()
            for method, said in methods.items()
        ),
    )


def _metrics() -> str:
    def rows() -> Iterator[Row]:
        for spec in METRICS:
            total, labels = "_total" if spec.kind == "counter" else "", ",".join(spec.labels)
            name = f"`{spec.name}{total}{{{labels}}}`" if labels else f"`{spec.name}{total}`"
            theirs = {SAME: "the same", OURS: ""}.get(spec.vllm, f"`{spec.vllm}`")
            yield name, spec.kind, spec.purpose, theirs

    return _table(("metric", "type", "meaning", "vLLM's name"), sorted(rows()))


def _options() -> str:
    return _table(
        ("option", "type", "default", "meaning"),
        (
            (f"`{option.spellings[0]}`", _option_type(option.kind, option.metavar), _value(option.default), option.help)
            for option in OPTIONS
            if not option.hidden
        ),
    )


def _option_type(kind: Any, metavar: str | None) -> str:
    words = {str: "text", int: "integer", float: "number", bool: "switch"}
    if metavar and "|" in metavar:
        return " or ".join(f"`{value}`" for value in metavar.split("|"))
    if get_origin(kind) is list:
        return f"{words[get_args(kind)[0]]}, repeatable"
    return f"`{metavar}`" if metavar else words[kind]


def _fields() -> str:
    header = ("field", "type", "default", "meaning")
    said = set(_rows(inert.Inert))
    common = [row for row in _rows(schema.Generation) if row not in said]
    texts = ", ".join(f"`{path}`" for path, body in BODIES if issubclass(body, schema.Generation))
    parts = [f"**{texts}**\n\n{_table(header, _joined(common))}"]
    said.update(common)
    for path, body in BODIES:
        inherits = issubclass(body, schema.Generation)
        own = [row for row in _rows(body) if row not in said or not (inherits or "." in row[0])]
        said.update(own)
        parts.append(f"**`{path}`**\n\n{_table(header, _joined(own))}")
    return "\n".join(parts)


def _inert() -> str:
    """Fields that are accepted without effect, and why."""
    rows = [(name, kind, note) for name, kind, _, note in _rows(inert.Inert)]
    return _table(("field", "type", "accepted without effect, because"), _joined(rows))


def _rows(body: type[Body], before: str = "") -> Iterator[Row]:
    """A row for every field of a body, and of the objects in it."""
    made = body.model_json_schema()
    yield from _object(made, made.get("$defs", {}), before, SHARED if issubclass(body, schema.Generation) else {})
    if body is responses.ResponsesRequest:
        for item in ITEMS:
            kind = get_args(item.model_fields["type"].annotation)[0]
            yield from _rows(item, f"input[{kind}].")


def _object(made: Json, named: Json, before: str, shared: Json) -> Iterator[Row]:
    """Rows of an object; `named` are the objects that it refers to, `shared` the defaults of fields that name none."""
    for name, said in made["properties"].items():
        kind, default = type_in_words(said), _value(said.get("default"))
        if name in made.get("required", ()):
            default = "required"
        elif not default and kind != "null" and name not in ENDPOINT_DEFAULTS:
            default = _value(shared.get(name))
        yield f"`{before}{name}`", kind, default, said.get("description", "")
        for inner, many in _inner(said):
            yield from _object(named[inner], named, f"{before}{name}{'[]' if many else ''}.", {})


def _inner(said: Json, many: bool = False) -> Iterator[tuple[str, bool]]:
    """Names of the objects that a field may hold, and whether it holds a list of them."""
    if "$ref" in said:
        yield said["$ref"].rpartition("/")[2], many
    for each in said.get("anyOf", ()):
        yield from _inner(each, many)
    if isinstance(said.get("items"), dict):
        yield from _inner(said["items"], True)


def _joined(rows: Iterable[Row]) -> Iterator[Row]:
    """Fields of which the same is said share a row."""
    found: dict[Row, list[str]] = {}
    for name, *rest in rows:
        found.setdefault(tuple(rest), []).append(name)
    yield from ((", ".join(names), *rest) for rest, names in found.items())


def _value(value: Any) -> str:
    if value is None or value == () or value == {}:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def type_in_words(said: Json) -> str:
    """A type with its range, in words."""
    if "anyOf" in said:
        found = dict.fromkeys(type_in_words(each) for each in said["anyOf"] if each != {"type": "null"})
        return " or ".join(found)
    if "$ref" in said:
        return "object"
    if "const" in said or "enum" in said:
        return " or ".join(f"`{value}`" for value in said.get("enum", [said.get("const")])).replace("False", "false")
    kind = said.get("type")
    if kind == "array":
        items = said.get("items", {})
        kinds = dict.fromkeys(_plural(type_in_words(each)) for each in items.get("anyOf", [items]))
        most = f"at most {said['maxItems']} " if "maxItems" in said else ""
        return f"list of {most}{' or '.join(kinds)}"
    words = {"string": "text", "boolean": "true or false", "null": "null", None: "anything"}
    return words.get(kind, str(kind)) + _range(said)


def _plural(kind: str) -> str:
    return re.sub(r"^(integer|object|number|text|list)\b", r"\1s", kind)


def _range(said: Json) -> str:
    """Bounds of a number, or of how much there may be."""
    if "maxLength" in said:
        return f" of at most {said['maxLength']} characters"
    if "maxProperties" in said:
        return f" of at most {said['maxProperties']} keys"
    if "minimum" in said and "maximum" in said:
        return f" {said['minimum']:g} to {said['maximum']:g}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f" {sign} {said[name]:g}" for name, sign in signs.items() if name in said]
    return " and".join(bounds)


def main(path: str) -> None:
    page = Path(path)
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
