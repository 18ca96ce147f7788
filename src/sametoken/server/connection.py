"""One connection: uvicorn's protocol on httptools, with limits to the head of a request and to how long it may take.

httptools keeps whatever a client sends as a head, and uvicorn waits for the rest of a request for ever.
"""

from __future__ import annotations

import asyncio
import json
import re

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sametoken.server.errors import ApiError

MOST_HEAD = 64 * 2**10  # bytes of a request's first line and headers
REQUEST_SECONDS = 60.0  # for a request to come, from its first byte or the connection's begin to the last of its body
MOST_AHEAD = 8  # requests that may come before the one in front of them is answered; reading stops at more
STALL_SECONDS = 60.0  # for a client to read some of what waits for it; meanwhile its request keeps a place
UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)
LINGER_SECONDS = 2.0  # for a refused client to read why, while what it still sends is dropped


class Connection(HttpToolsProtocol):
    """Refuses requests that are broken, too slow or have too large a head; ends where nobody reads the answers."""

    _head = 0  # bytes of the head that is coming
    _in_head = True
    _began = False  # whether a head did in the data at hand
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
        before, self._began = self._in_head, False
        super().data_received(_without_upgrade(data) if before else data)
        # Where a head began within the data, some of it was another request's.
        if before and self._in_head and not self._began:
            self._head += len(data)
            if self._head > MOST_HEAD:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head, self._began = True, 0, True
        self._expect()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEAD:
            self._refuse_head()
        else:
            super().on_headers_complete()
            if 0 < len(self.pipeline) <= MOST_AHEAD:
                self.flow.resume_reading()  # or nobody would notice that the client has gone

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

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
        """What is no HTTP; called by uvicorn."""
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
            content = json.dumps(error.body).encode()
            about = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + about.encode() + content)
            # To close with bytes unread would reset the connection, and the client might never see the answer.
            self._refused = True
            self.flow.resume_reading()
            self.transport.write_eof()
            self._came()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """A head that asks for another protocol, as one that does not: httptools would take its body for that protocol.

    Java's client asks for HTTP/2 with its first request; a server may ignore that (RFC 9110, section 7.8).
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"\nIgnored:", head) + end + rest
