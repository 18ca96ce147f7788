"""Log lines as text or as JSON, each with the id of its request; no text of a client can begin a line.

Characters of a message that are not printable are escaped, and the lines of a traceback are indented.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from sametoken.server.exchange import CURRENT


class TextFormatter(logging.Formatter):
    """Formatter of lines `2026-11-22 12:00:00,000 INFO [request id] message`; a replica's number precedes the id."""

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
    """Formatter of one JSON object per line: time (UTC), level, logger, message, request_id, and extra fields."""

    def __init__(self, replica: int | None = None) -> None:
        super().__init__()
        self._about = {} if replica is None else {"replica": replica}

    def format(self, record: logging.LogRecord) -> str:
        exchange = CURRENT.get()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._about,
        }
        if exchange is not None:
            line["request_id"] = exchange.id
        line |= getattr(record, "fields", {})
        if details := trace_of(self, record):
            line["exception"] = details
        return json.dumps(line, default=str)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


def configure(level: str, form: Literal["text", "json"], replica: int | None = None) -> None:
    """Log to stderr, unless the process has a log handler; `replica` is the number of a replica, or None."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS[form](replica))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def printable(text: str) -> str:
    """Text with escapes for line breaks, control characters and all other characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Traceback of a record, or ""."""
    return formatter.formatException(record.exc_info) if record.exc_info else ""
