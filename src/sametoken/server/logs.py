"""Log lines as text or as JSON, each with the id of its request; no text of a client can begin a line.

What is not printable in a message is escaped, and the lines of a traceback are indented.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from sametoken.server.exchange import CURRENT


class TextFormatter(logging.Formatter):
    """`2026-11-22 12:00:00,000 INFO [request id] message`; a replica says its number before the id."""

    def __init__(self, replica: int | None = None) -> None:
        super().__init__()
        self._replica = "" if replica is None else f"[replica {replica}] "

    def format(self, record: logging.LogRecord) -> str:
        exchange = CURRENT.get()
        about = self._replica + (f"[{exchange.id}] " if exchange is not None else "")
        line = f"{self.formatTime(record)} {record.levelname} {about}{printable(record.getMessage())}"
        details = trace_of(self, record)
        return "\n".join([line, *(f"    {printable(each)}" for each in details.splitlines())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, and what the line has besides."""

    def __init__(self, replica: int | None = None) -> None:
        super().__init__()
        self._about = {} if replica is None else {"replica": replica}

    def format(self, record: logging.LogRecord) -> str:
        exchange = CURRENT.get()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._about,
        }
        if exchange is not None:
            said["request_id"] = exchange.id
        said |= getattr(record, "fields", {})
        if details := trace_of(self, record):
            said["exception"] = details
        return json.dumps(said, default=str)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


def configure(level: str, form: Literal["text", "json"], replica: int | None = None) -> None:
    """Log to stderr from here on, unless the process logs already; `replica` is the number of one of several."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS[form](replica))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def printable(text: str) -> str:
    """The text with escapes for line breaks, control characters and whatever else is not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback of a record, "" for none."""
    return formatter.formatException(record.exc_info) if record.exc_info else ""
