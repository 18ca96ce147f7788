"""HTTP details, independent of the model: API keys, Host and Origin headers, events, and clients that disconnect."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sametoken.options.server import ServerConfig
from sametoken.server.errors import ApiError, reply
from sametoken.server.exchange import CURRENT

T = TypeVar("T")
Encode = Callable[[Any], str]

DONE = b"data: [DONE]\n\n"
OPEN_PATHS = ("/", "/health", "/ping", "/live", "/version", "/docs", "/openapi.json")
OPEN_FOLDERS = ("/playground/", "/docs/")  # files of the web pages, which prompt the user for a key
# Permissions of pages of other origins, as arguments of Starlette's CORSMiddleware.
CORS: dict[str, Any] = {
    "allow_methods": ["GET", "POST", "DELETE", "OPTIONS"],
    "allow_headers": ["*"],
    "expose_headers": ["X-Request-Id"],
}

PROTOCOL = (b"content-length", b"transfer-encoding", b"connection")  # headers that the HTTP library looks for
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins of "localhost", as in llama-server


@contextmanager
def when_gone(receive: Receive, call: Callable[[], object]) -> Iterator[None]:
    """Call a function if the client disconnects within the block; the request's body must have been read."""

    async def watch() -> None:
        if (await receive())["type"] == "http.disconnect":
            call()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects first."""
    task = asyncio.ensure_future(work)
    try:
        with when_gone(receive, task.cancel):
            await asyncio.wait({task})
    finally:
        task.cancel()
    return None if task.cancelled() else task.result()


def part_of(
    events: Iterable[Mapping[str, Any]], mark: bytes = b"", more: bool = True, encode: Encode | None = None
) -> Message:
    """Part of a reply: server-sent events, each named by its type if it has one, and `mark` after them.

    Args:
        encode: encoder of JSON; None for `json.dumps`.
    """
    spelled = ""
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        body = json.dumps(event, ensure_ascii=False, separators=(",", ":")) if encode is None else encode(event)
        spelled += f"{name}data: {body}\n\n"
    return {"type": "http.response.body", "body": spelled.encode() + mark, "more_body": more}


class BearerKeys:
    """Middleware that refuses requests without a valid bearer key, except at open paths.

    Args:
        app: next layer of the application.
        keys: valid keys, at least one.
        refused: callback for every refusal.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Callable[[ApiError], None]) -> None:
        self._app, self._refused = app, refused
        self._keys = AcceptedKeys(keys)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        owner = self._keys.owner(scope) if scope["type"] == "http" else ""
        if (exchange := CURRENT.get()) is not None:
            exchange.owner = owner or ""
        if owner is not None or _is_open(scope["path"]):
            return self._app(scope, receive, send)
        error = ApiError(
            401,
            "the API key is missing or wrong; send the header 'Authorization: Bearer KEY' with a key of this server",
            "authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        self._refused(error)
        return reply(error, scope["path"])(scope, receive, send)


class KnownHosts:
    """Middleware that refuses requests whose Host header is not a name of this server.

    This prevents DNS rebinding: a web page whose name is changed to this machine's address could otherwise read all
    replies of a server without a key, because the browser would treat the server as the page's own. `localhost` and
    IP addresses are safe, because a page cannot have them as its name.

    Args:
        app: next layer of the application.
        names: permitted names in addition to `localhost` and IP addresses.
        refused: callback for every refusal.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], refused: Callable[[ApiError], None]) -> None:
        self._app, self._refused = app, refused
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        unknown = next((host for host in given if not self._is_known(host)), None)
        if scope["type"] != "http" or unknown is None:
            return self._app(scope, receive, send)
        error = ApiError(
            403,
            f"this server is not called {unknown[:100]!r}: without a key it answers to localhost and IP addresses; "
            "give the name with --allowed-host, or a key with --api-key",
            "permission_error",
            code="unknown_host",
        )
        self._refused(error)
        return reply(error, scope["path"])(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        found = HOST.fullmatch(host)
        name = (found["name"] or found["address"] or "").lower().rstrip(".") if found else ""
        return name in self._names or _is_address(name)


HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]/@]*))(?::\d*)?")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """True if an address to listen on is reachable from this machine alone."""
    return host.lower().rstrip(".") == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def check_content(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not JSON: a page of another origin may send such a body without a preflight request.

    A body without a content type is accepted unless it comes from a page, with the header Origin.

    Raises:
        ApiError: the content type is refused.
    """
    stated = headers.get("content-type")
    kind = "" if stated is None else stated.partition(";")[0].strip().lower()
    if JSON_TYPE.fullmatch(kind) or (stated is None and "origin" not in headers):
        return
    got = "no Content-Type" if stated is None else f"the Content-Type {stated[:100]!r}"
    message = f"the body has {got}, which any web page may send; add -H 'Content-Type: application/json'"
    raise ApiError(415, message, code="unsupported_content_type", headers={"Accept": "application/json"})


JSON_TYPE = re.compile(r"application/(?:json|[a-z0-9.!#$&^_-]+\+json)")


class Origins(CORSMiddleware):
    """Middleware for CORS, which answers preflight requests of browsers for pages of other origins.

    Args:
        app: next layer of the application.
        config: configuration of the server, with the permitted origins.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        local = LOCAL_ORIGINS if "localhost" in config.cors_origin else None
        origins, credentials = list(config.cors_origin), config.cors_credentials
        super().__init__(app, allow_origins=origins, allow_origin_regex=local, allow_credentials=credentials, **CORS)
        self._always = config.any_model

    def preflight_response(self, request_headers: Headers) -> Response:
        """Reply with the methods and headers that a page may send; as llama-server (`any_model`) always with 200."""
        answer = super().preflight_response(request_headers)
        if self._always:
            answer.status_code = 200
        return answer


class Spelled(bytes):
    """Name of a header that uvicorn writes unchanged, because its `lower` does nothing."""

    def lower(self) -> Spelled:
        return self


class SpelledHeaders:
    """Middleware that capitalises names of headers as llama-server does, for scripts that compare them exactly."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        async def spelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name if name in PROTOCOL else Spelled(name.title()), value) for name, value in message["headers"]
                ]
            await send(message)

        return self._app(scope, receive, spelled)


class AcceptedKeys:
    """Valid API keys of a server, at least one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def owner(self, scope: Scope) -> str | None:
        """Hash of the valid key of a request, or None if it has no valid key."""
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:  # of Anthropic's clients, which may send both
            given.append(headers[b"x-api-key"])
        digests = [hashlib.sha256(key.strip()).digest() for key in given]
        # Every key is compared, as a digest, so that the time reveals neither which key matches nor how much of it.
        matches = [known.hex() for digest in digests for known in self._digests if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)
