"""The OpenAPI document: bodies and replies are read and written by hand, so the document is told what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from sametoken.server import reply_schema as replies
from sametoken.server.chat_schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from sametoken.server.embedding_api import EmbeddingsRequest
from sametoken.server.errors import AnthropicError, ErrorReply
from sametoken.server.fields import Body
from sametoken.server.messages_schema import CountRequest, MessagesRequest
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.schema import CompletionRequest

REFERENCE = "#/components/schemas/{model}"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
REFUSALS = {
    400: "A field, a prompt or the body as a whole cannot be honoured; `param` names the field.",
    401: "The key is missing or wrong.",
    404: "No such model.",
    408: "It took longer than the server allows.",
    413: "The body is larger than the server takes.",
    415: "The body is compressed.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "An error of the server's own.",
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
    """One path.

    Attributes:
        reply: type of the JSON that it answers with; None is text.
        refusals: statuses of errors, which all have the envelope.
        body: of its request. `streams`: whether it can answer with events.
        refusal: type of the JSON of its errors.
        unready: whether it answers 503 with its own reply while the server stops.
    """

    reply: Any
    refusals: tuple[int, ...] = (401,)
    body: type[Body] | None = None
    streams: bool = False
    unready: bool = False
    refusal: Any = ErrorReply


OPERATIONS = {
    "/v1/completions": Operation(replies.CompletionReply, TEXT_REFUSALS, CompletionRequest, streams=True),
    "/v1/chat/completions": Operation(replies.ChatReply, TEXT_REFUSALS, ChatRequest, streams=True),
    "/v1/responses": Operation(replies.ResponsesReply, TEXT_REFUSALS, ResponsesRequest, streams=True),
    "/v1/messages": Operation(
        replies.MessagesReply, TEXT_REFUSALS, MessagesRequest, streams=True, refusal=AnthropicError
    ),
    "/v1/messages/count_tokens": Operation(replies.CountReply, BODY_REFUSALS, CountRequest, refusal=AnthropicError),
    "/tokenize": Operation(replies.TokenizeReply, BODY_REFUSALS, TokenizeRequest),
    "/detokenize": Operation(replies.DetokenizeReply, BODY_REFUSALS, DetokenizeRequest),
    "/tokenizer_info": Operation(replies.TokenizerInfoReply),
    "/v1/embeddings": Operation(replies.EmbeddingsReply, BODY_REFUSALS, EmbeddingsRequest),
    "/v1/models": Operation(replies.ModelsReply),
    "/v1/models/{name}": Operation(replies.ModelReply, (401, 404)),
    "/health": Operation(replies.StatusReply, (), unready=True),
    "/ping": Operation(replies.StatusReply, (), unready=True),
    "/load": Operation(replies.LoadReply),
    "/live": Operation(replies.StatusReply, ()),
    "/version": Operation(replies.VersionReply, ()),
    "/server_info": Operation(replies.ServerInfoReply),
    "/metrics": Operation(None),
}


def describe(app: FastAPI, root_path: str) -> None:
    """Gives an application a document that has these bodies, replies and errors, below a path of a proxy."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            if root_path:
                found["servers"] = [{"url": root_path}]
            bearer = {"type": "http", "scheme": "bearer", "description": "Where the server was started with keys."}
            found["components"] = {"schemas": _schemas(), "securitySchemes": {"key": bearer}}
            for path, methods in found["paths"].items():
                operation = OPERATIONS[path]
                for described in methods.values():
                    described |= _described(operation)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _types() -> Iterator[Any]:
    for operation in OPERATIONS.values():
        yield from (each for each in (operation.body, operation.reply, operation.refusal) if each is not None)


def _schemas() -> dict[str, Any]:
    adapters = [(each, "validation", TypeAdapter(each)) for each in dict.fromkeys(_types())]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template=REFERENCE)  # type: ignore[arg-type]
    return dict(schemas["$defs"])


def _described(operation: Operation) -> dict[str, Any]:
    """What the document says of a path besides its name and parameters."""
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
        described["security"] = [{}, {"key": []}]  # a server without keys asks for none
    return described


def _content(type_: Any) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REFERENCE.format(model=type_.__name__)}}}
