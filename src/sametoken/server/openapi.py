"""The OpenAPI document, with the types of bodies and replies, which FastAPI does not see in our endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from sametoken.server.errors import ErrorReply
from sametoken.server.fields import Body

REFERENCE = "#/components/schemas/{model}"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
REFUSALS = {
    400: "A field, a prompt or the body as a whole cannot be honoured; `param` names the field.",
    401: "The key is missing or wrong.",
    404: "No such model, or no such response.",
    408: "The request took longer than the server allows.",
    413: "The body is larger than the server takes.",
    415: "The body is compressed.",
    429: "The queue is full; `Retry-After` is the time to wait.",
    500: "An internal error.",
    503: "The server stops.",
}
BODY_REFUSALS = (400, 401, 404, 413, 415, 500, 503)
TEXT_REFUSALS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}

EVENT = {
    "type": "object",
    "description": "With `stream: true`, of each server-sent event.",
    "properties": {
        "data": {"type": "string", "description": "JSON, an error's envelope included; the last is `[DONE]`."},
        "event": {"type": "string", "description": "The type of an event of /v1/responses."},
    },
    "required": ["data"],
}


class Operation(NamedTuple):
    """Operation of one method at one path.

    Attributes:
        endpoint: function that answers requests.
        reply: type of the reply's JSON; None for text.
        refusals: statuses of errors, which all have the error envelope.
        body: type of the request's body; None without a body.
        streams: True if the reply can be server-sent events.
        unready: True if the operation answers 503 with `reply` while the server stops.
        refusal: type of the JSON of errors.
    """

    method: str
    path: str
    endpoint: Callable[..., Any]
    reply: Any
    refusals: tuple[int, ...] = (401,)
    body: type[Body] | None = None
    streams: bool = False
    unready: bool = False
    refusal: Any = ErrorReply


def describe(app: FastAPI, operations: Sequence[Operation], root_path: str) -> None:
    """Set an application's OpenAPI document, with request bodies, replies and errors, below the path of a proxy."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            if root_path:
                found["servers"] = [{"url": root_path}]
            bearer = {"type": "http", "scheme": "bearer", "description": "Where the server was started with keys."}
            found["components"] = {"schemas": _schemas(operations), "securitySchemes": {"key": bearer}}
            for operation in operations:
                path = operation.path.replace(":path}", "}")  # Starlette's mark of a name that may have slashes
                found["paths"][path][operation.method.lower()] |= _described(operation)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    types = [each for known in operations for each in (known.body, known.reply, known.refusal) if each is not None]
    adapters = [(each, "validation", TypeAdapter(each)) for each in dict.fromkeys(types)]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template=REFERENCE)  # type: ignore[arg-type]
    return dict(schemas["$defs"])


def _described(operation: Operation) -> dict[str, Any]:
    """Entries of an operation in the document besides its name and parameters."""
    content = {TEXT: {"schema": {"type": "string"}}} if operation.reply is None else _content(operation.reply)
    described: dict[str, Any] = {"responses": {"200": {"description": "Done.", "content": dict(content)}}}
    if operation.streams:
        described["responses"]["200"]["content"][EVENTS] = {"schema": EVENT}
    if operation.unready:
        described["responses"]["503"] = {"description": REFUSALS[503], "content": content}
    for status in operation.refusals:
        refusal = {"description": REFUSALS[status], "content": _content(operation.refusal)}
        described["responses"][str(status)] = {**refusal, "headers": RETRY} if status in (429, 503) else refusal
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    if 401 in operation.refusals:
        described["security"] = [{}, {"key": []}]  # {}: a server without keys needs none
    return described


def _content(type_: Any) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REFERENCE.format(model=type_.__name__)}}}
