"""Parser of server-sent events from arbitrarily split bytes.

Lines end with LF, CR or CRLF only: `str.splitlines` would also split at U+2028, a valid character of JSON texts.
"""

from __future__ import annotations

import re

_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)")


class EventParser:
    """Incremental parser from received bytes to the data of completed events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._started = False

    def feed(self, received: bytes) -> list[str]:
        """Data of the events that end in these bytes; lines of one event are joined by LF.

        Raises:
            UnicodeDecodeError: the data of an event is not UTF-8.
        """
        self._rest += received
        found, end = [], 0
        for line in _LINE.finditer(self._rest):
            # A CR at the end may be the first half of a CRLF.
            if line[2] == b"\r" and line.end() == len(self._rest):
                break
            end = line.end()
            found += self._take(line[1])
        self._rest = self._rest[end:]
        return found

    def close(self) -> list[str]:
        """Data of a last event without a final empty line, which some servers omit."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return [*(self._take(rest) if rest else []), *self._take(b"")]

    def _take(self, line: bytes) -> list[str]:
        """Handle one line; an empty one completes an event."""
        if not self._started:
            line, self._started = line.removeprefix(b"\xef\xbb\xbf"), True
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        if line or not self._data:
            return []
        data, self._data = b"\n".join(self._data), []
        return [data.decode("utf-8")]
