"""One connection: uvicorn's protocol on httptools, with limits for headers and for the time that a request may take.

Without them, httptools keeps headers of any size, and uvicorn waits for the rest of a request for ever.
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
REQUEST_SECONDS = 60.0  # for a request to come, from its first byte or the connection's begin to the last of its body
MOST_AHEAD = 8  # requests that may come before the one in front of them is answered; reading stops at more
STALL_SECONDS = 60.0  # for a client to read some of what waits for it; meanwhile its request keeps a place
END_OF_HEAD = b"\r\n\r\n"
UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)
LINGER_SECONDS = 2.0  # for a refused client to read why, while what it still sends is dropped


class Connection(HttpToolsProtocol):
    """Connection that refuses broken or slow requests and too large heads, and ends if nobody reads its replies."""

    _head = 0  # bytes of the head that is coming
    _tail = b""  # its last ones, in which its end may have begun
    _in_head = True
    _refused = False
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None  # the request that is worked on; `cycle` is the last that came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        self._moves()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._moves()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._moves()

    def _moves(self) -> None:
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
        self._expect()

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        # Of a head that came behind another request's body nothing has been counted yet.
        lines = sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if len(self.url) + lines > MOST_HEAD:
            self._refuse_head()
        else:
            super().on_headers_complete()
            if 0 < len(self.pipeline) <= MOST_AHEAD:
                self.flow.resume_reading()  # or nobody would notice that the client has gone

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._came()
        super().on_message_complete()

    def _expect(self) -> None:
        self._came()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._late)

    def _came(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self.flow.read_paused:  # the rest waits for us
            self._expect()
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
        """Answers, unless an answer is under way, and closes; who worked on the request hears that it is gone."""
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
            # To close with bytes unread would reset the connection, and the client might never see the answer.
            self._refused = True
            self.flow.resume_reading()
            if self.transport.can_write_eof():  # TLS cannot
                self.transport.write_eof()
            self._came()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


def _unchunked(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """An application for a client of HTTP/1.0, to which a body of unknown length ends with the connection."""

    async def answered(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        known = True  # the length of the body, from its headers

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
    """A head that asks for another protocol, as one that does not: httptools would take its body for that protocol.

    Java's client asks for HTTP/2 with its first request; a server may ignore that (RFC 9110, section 7.8).
    """
    head, end, rest = data.partition(END_OF_HEAD)
    return UPGRADE.sub(b"\nIgnored:", head) + end + rest
