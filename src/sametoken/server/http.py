"""HTTP details: keys, events, and clients that go away. Knows nothing of models."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sametoken.server.errors import ApiError, reply

DONE = b"data: [DONE]\n\n"
OPEN_PATHS = ("/", "/health", "/ping", "/live", "/version", "/docs", "/openapi.json")
OPEN_FOLDERS = ("/playground/", "/docs/")  # the files of pages, which ask for a key themselves
T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is cancelled when the client goes away: then None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def part_of(events: Iterable[Mapping[str, Any]], mark: bytes = b"", more: bool = True) -> Message:
    """A part of an answer: server-sent events, each named where its content has a type, and a mark after them."""
    spelled = b"".join(
        (f"event: {event['type']}\ndata: " if "type" in event else "data: ").encode()
        + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
        + b"\n\n"
        for event in events
    )
    return {"type": "http.response.body", "body": spelled + mark, "more_body": more}


class BearerKeys:
    """Lets requests with a known bearer key pass; without keys it lets all pass.

    Args:
        app: what lies behind.
        keys: valid ones.
        refused: told of every refusal.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Callable[[ApiError], None]) -> None:
        self._app, self._refused = app, refused
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or self._known(scope):
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

    def _known(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:  # of Anthropic's clients, which may send both
            given.append(headers[b"x-api-key"])
        digests = [hashlib.sha256(key.strip()).digest() for key in given]
        # All keys, always, and digests of one length: the time says nothing about which key or how much of it.
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return not self._digests or any(matches)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)
