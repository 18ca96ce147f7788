"""Uvicorn's HTTP protocol on httptools, with limits for the size of headers and for the time to receive a request.

Without these limits, httptools keeps headers of any size, and uvicorn waits for the end of a request without limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sametoken.server.errors import ApiError
from sametoken.server.exchange import ID_HEADER, named_client, new_id

LOG = logging.getLogger("sametoken.server")
MOST_HEAD = 64 * 2**10  # bytes of a request's first line and headers
REQUEST_SECONDS = 60.0  # time to receive a request, from its first byte or the connection's beginning to its last byte
MOST_AHEAD = 8  # pipelined requests that wait for the reply to an earlier one; with more, reading stops
STALL_SECONDS = 60.0  # time in which a client must read a part of the buffered reply; its request occupies a slot
END_OF_HEAD = b"\r\n\r\n"
UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)
LINGER_SECONDS = 2.0  # time for a refused client to read the error, while further bytes from it are dropped


class Connection(HttpToolsProtocol):
    """Connection that refuses invalid or slow requests and too large heads, and ends if its client reads no reply.

    The head of a request is its first line and its headers.
    """

    _head = 0  # bytes received of the current head
    _tail = b""  # last bytes of the current head, which may be the beginning of its end mark
    _in_head = True
    _refused = False
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None  # request that is being answered; `cycle` is the last received one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._received()
        self._end_stall()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._in_head:
            super().data_received(data)
            return
        seen = self._tail + data
        end = seen.find(END_OF_HEAD)
        size = len(data) if end < 0 else end + len(END_OF_HEAD) - len(self._tail)
        self._head += size
        if self._head > MOST_HEAD:
            self._refuse_head()
            return
        super().data_received(_without_upgrade(data))
        self._tail = seen[1 - len(END_OF_HEAD) :] if self._in_head else b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        # The bytes of a head that came in one piece with another request's body were not counted.
        lines = sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if len(self.url) + lines > MOST_HEAD:
            self._refuse_head()
        else:
            super().on_headers_complete()
            if 0 < len(self.pipeline) <= MOST_AHEAD:
                self.flow.resume_reading()  # otherwise a disconnect of the client would not be noticed

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._received()
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._received()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._timed_out)

    def _received(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        if self.flow.read_paused:  # the server has not read the rest of the request yet
            self._start_timer()
            return
        message = f"the request did not come within {REQUEST_SECONDS:g} s; send it faster, or less"
        self._refuse(ApiError(408, message, "timeout_error", code="request_too_slow"))

    def _refuse_head(self) -> None:
        message = f"the first line and the headers have more than {MOST_HEAD} bytes; send fewer and shorter headers"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not valid HTTP with status 400; called by uvicorn."""
        self._refuse(ApiError(400, f"{msg.rstrip('.')}; send HTTP/1.1", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless a reply has begun, and close; the request's endpoint receives a disconnect event."""
        if self._refused or self.transport.is_closing():
            return
        under_way = bool(self.pipeline)
        if self.cycle is not None:
            under_way |= self.cycle.response_started and not self.cycle.response_complete
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not under_way:
            content, identity = json.dumps(error.body).encode(), new_id()
            about = (
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
                f"{ID_HEADER.decode()}: {identity}\r\nconnection: close\r\n\r\n"
            )
            LOG.info("%s: refused request %s with %d: %s", named_client(self.client), identity, error.status, error)
            self.transport.write(STATUS_LINE[error.status] + about.encode() + content)
            # A close with unread bytes would reset the connection, and the client might not receive the error.
            self._refused = True
            self.flow.resume_reading()
            if self.transport.can_write_eof():  # not with TLS
                self.transport.write_eof()
            self._received()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


def _unchunked(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Application for a client of HTTP/1.0: a body of unknown length has no chunks and ends with the connection."""

    async def answered(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        known = True  # True if the headers state the length of the body

        async def plainly(message: ASGISendEvent) -> None:
            nonlocal known
            if message["type"] == "http.response.start":
                known = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not known:
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif message["type"] == "http.response.body" and not known and not message.get("more_body"):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plainly)

    return answered


def _without_upgrade(data: bytes) -> bytes:
    """Rename the header Upgrade of a head, with which httptools would treat the body as data of another protocol.

    Java's client sends it for HTTP/2 with its first request; a server may ignore it (RFC 9110, section 7.8).
    """
    head, end, rest = data.partition(END_OF_HEAD)
    return UPGRADE.sub(b"\nIgnored:", head) + end + rest
