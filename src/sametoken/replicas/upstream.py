"""Request to a replica over its Unix socket, with a streamed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from httptools import HttpParserError, HttpResponseParser

Headers = Sequence[tuple[bytes, bytes]]
CHUNK = 2**16  # bytes read at once
# Hop-by-hop headers, which are not forwarded.
OF_CONNECTION = frozenset((b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"date"))


class ReplicaLostError(Exception):
    """Error: the connection ended before the end of the answer."""


class NotAskedError(Exception):
    """Error: the replica accepts no requests; another replica may be tried."""


class ReplicaAnswer:
    """Answer of a replica; `close` ends it early, and the replica cancels the request.

    Attributes:
        status: HTTP status, set by `begin`.
        headers: headers without those of the connection, set by `begin`.
        complete: true if the answer was received completely.
        closed: true after `close`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bodyless: bool) -> None:
        self._reader, self._writer, self._bodyless = reader, writer, bodyless
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._begun = self.complete = self.closed = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    # Called by httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) not in OF_CONNECTION:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._begun, self.complete = True, self._bodyless
        self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self.complete = True

    # Called by the front.

    async def begin(self) -> None:
        """Wait for status and headers. Raises ReplicaLostError."""
        while not self._begun:
            await self._more()

    async def part(self) -> bytes:
        """Bytes of the body received since the last part, b"" at its end. Raises ReplicaLostError."""
        while not self._parts and not self.complete:
            await self._more()
        part = b"".join(self._parts)
        self._parts.clear()
        return part

    async def whole(self) -> bytes:
        """Remaining bytes of the body. Raises ReplicaLostError."""
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts)

    async def held(self) -> bytes:
        """Wait for the whole body, which `part` still returns afterwards. Raises ReplicaLostError."""
        while not self.complete:
            await self._more()
        return b"".join(self._parts)

    async def _more(self) -> None:
        try:
            data = await self._reader.read(CHUNK)
            if not data:
                raise ReplicaLostError
            self._parser.feed_data(data)
        except (OSError, HttpParserError) as error:
            raise ReplicaLostError from error

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._writer.close()


async def ask(
    socket: str, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes = b""
) -> ReplicaAnswer:
    """Send a request. Raises NotAskedError.

    Args:
        socket: path of the replica's socket.
        target: path and query, unchanged.
        headers: headers of the client; those of the connection are replaced.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(socket, limit=CHUNK)
    except OSError as error:
        raise NotAskedError from error
    kept = [each for each in headers if each[0] not in OF_CONNECTION | {b"connection", b"content-length"}]
    lines = b"".join(b"%s: %s\r\n" % each for each in (*kept, (b"content-length", str(len(body)).encode())))
    writer.write(b"%s %s HTTP/1.1\r\n%s\r\n" % (method.encode(), target, lines) + body)
    return ReplicaAnswer(reader, writer, method == "HEAD")
