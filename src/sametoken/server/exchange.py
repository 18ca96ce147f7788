"""Records of requests: each gets an id, a line in the access log, a trace, and a reply even if the server ends.

The id is the client's X-Request-Id, or a new one; every log line of the request and the header of the reply have it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sametoken.options.server import ServerConfig
from sametoken.server.errors import CLIENT_GONE, reply, stopping

if TYPE_CHECKING:
    from sametoken.engine.request import Request

ACCESS = logging.getLogger("sametoken.access")
ID_HEADER = b"x-request-id"
VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # one printable word
PROBES = ("/health", "/live", "/load", "/metrics", "/ping", "/version")  # paths that monitoring requests repeatedly


@dataclass(slots=True)
class Exchange:
    """Record of a request until its reply is complete.

    Attributes:
        id: id of the request, see the module.
        client: address of the client, as host:port.
        version: version of HTTP.
        headers: headers of the request.
        began: time of arrival, in seconds of `time.perf_counter`.
        ended: time of the end of the reply, in seconds of `time.perf_counter`; 0.0 before it.
        status: status of the reply; 0 before it begins.
        sequences: engine requests that serve this request.
        owner: name of the API key of the request, a hash; "" without a key.
    """

    id: str
    client: str
    method: str
    path: str
    version: str
    headers: list[tuple[bytes, bytes]]
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    status: int = 0
    sequences: list[Request] = field(default_factory=list)
    owner: str = ""

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """Record of a request at its arrival."""
        given = next((value for name, value in scope["headers"] if name == ID_HEADER), b"")
        return cls(
            given.decode("ascii") if VALID_ID.fullmatch(given) else new_id(),
            named_client(scope["client"]),
            scope["method"],
            scope["path"],
            scope["http_version"],
            scope["headers"],
        )

    @property
    def probe(self) -> bool:
        """True if this is a health probe that succeeded: a status below 400 at a path of `PROBES`."""
        return self.path in PROBES and self.status < 400


CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


class Recorder(Protocol):
    """Recorder of every exchange that is complete."""

    def record(self, exchange: Exchange) -> None: ...


class Exchanges:
    """Outermost middleware of the application, which makes an `Exchange` for every request.

    Args:
        app: application that answers requests.
        config: supplies `root_path`, which is removed from paths, and `enable_request_id_headers`.
        traces: recorder of complete exchanges, or None.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, traces: Recorder | None = None) -> None:
        self._app, self._root, self._traces = app, config.root_path, traces
        self._named = config.enable_request_id_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        without_root(scope, self._root)
        exchange = Exchange.of(scope)
        CURRENT.set(exchange)  # each request has a task with a context of its own

        async def noted(message: Message) -> None:
            if not exchange.status:
                exchange.status = message["status"]
                if self._named:
                    message["headers"] = [*message["headers"], (ID_HEADER, exchange.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:  # the server ends
            if not exchange.status:
                await reply(stopping())(scope, receive, noted)
        finally:
            self._complete(exchange)

    def _complete(self, exchange: Exchange) -> None:
        exchange.ended, exchange.status = time.perf_counter(), exchange.status or CLIENT_GONE
        log_access(exchange)
        if self._traces is not None and not exchange.probe:
            self._traces.record(exchange)


def without_root(scope: Scope, root: str) -> None:
    """Remove the prefix under which a proxy offers the server from a request's path."""
    if root and f"{scope['path']}/".startswith(f"{root}/"):
        scope["path"] = scope["path"].removeprefix(root) or "/"


def new_id() -> str:
    """New id for a request without X-Request-Id."""
    return f"req-{secrets.token_hex(14)}"


def named_client(address: tuple[str, int] | None) -> str:
    """Address of a client as host:port; the host is escaped, because a proxy may have set it to any text."""
    return "-" if address is None else f"{quote(address[0], safe=':.%')}:{address[1]}"


def log_access(exchange: Exchange) -> None:
    """Write a line to the access log; successful probes are logged at level debug."""
    level = logging.DEBUG if exchange.probe else logging.INFO
    if not ACCESS.isEnabledFor(level):
        return
    seconds, path = exchange.ended - exchange.began, quote(exchange.path)
    fields = {
        "client": exchange.client,
        "method": exchange.method,
        "path": path,
        "http_version": exchange.version,
        "status": exchange.status,
        "seconds": round(seconds, 6),
    }
    tokens = ""
    if exchange.sequences:
        read = sum(len(each.prompt_ids) for each in exchange.sequences if each.choice == 0)
        made = sum(len(each.tokens) - len(each.prompt_ids) for each in exchange.sequences)
        fields |= {"prompt_tokens": read, "completion_tokens": made}
        tokens = f", {read} + {made} tokens"
    line = '%s "%s %s HTTP/%s" %d in %.3f s%s'
    values = (exchange.client, exchange.method, path, exchange.version, exchange.status, seconds, tokens)
    ACCESS.log(level, line, *values, extra={"fields": fields})
