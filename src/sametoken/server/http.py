"""HTTP details: keys, events, and clients that go away. Knows nothing of models."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sametoken.server.errors import ApiError, reply

DONE = b"data: [DONE]\n\n"
OPEN_PATHS = ("/", "/health", "/ping", "/live", "/version", "/docs", "/openapi.json")
OPEN_FOLDERS = ("/playground/", "/docs/")  # the files of pages, which ask for a key themselves
# What pages of other origins may do; see Starlette's CORSMiddleware.
CORS: dict[str, Any] = {
    "allow_methods": ["GET", "POST"],
    "allow_headers": ["*"],
    "expose_headers": ["X-Request-Id"],
}


@contextmanager
def when_gone(receive: Receive, call: Callable[[], object]) -> Iterator[None]:
    """Calls something if the client goes away within the block; the body of its request has been read."""
    watch = asyncio.ensure_future(receive())

    def came(watch: asyncio.Future[Message]) -> None:
        if not watch.cancelled() and watch.result()["type"] == "http.disconnect":
            call()

    watch.add_done_callback(came)
    try:
        yield
    finally:
        watch.cancel()


def part_of(events: Iterable[Mapping[str, Any]], mark: bytes = b"", more: bool = True) -> Message:
    """A part of an answer: server-sent events, each named where its content has a type, and a mark after them."""
    spelled = ""
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        spelled += f"{name}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
    return {"type": "http.response.body", "body": spelled.encode() + mark, "more_body": more}


class BearerKeys:
    """Lets requests with a known bearer key pass.

    Args:
        app: what lies behind.
        keys: valid ones, at least one.
        refused: called with every refusal.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Callable[[ApiError], None]) -> None:
        self._app, self._refused = app, refused
        self._keys = AcceptedKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or self._keys.open(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong; send the header 'Authorization: Bearer KEY' with a key of this server",
            "authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        self._refused(error)
        await reply(error, scope["path"])(scope, receive, send)


class AcceptedKeys:
    """The valid keys of a server, at least one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def open(self, scope: Scope) -> bool:
        """Whether a request has one of them."""
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:  # of Anthropic's clients, which may send both
            given.append(headers[b"x-api-key"])
        digests = [hashlib.sha256(key.strip()).digest() for key in given]
        # All keys, always, and digests of one length: the time says nothing about which key or how much of it.
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)
