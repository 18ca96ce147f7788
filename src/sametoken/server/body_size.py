"""Limits on the size of a body and on its number of values, checked before the body is parsed.

Time and memory of parsing, validation and their errors depend on the number of values, not of bytes: 8 MB may be one
text, or 3.9 million numbers. pydantic has Python's global lock while it parses a body or lists its errors, so that
threads do not help. With these limits no call takes longer than 0.1 s.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from sametoken.server.errors import CLIENT_GONE, ApiError

MOST_KEYS = 2**15  # keys of all objects together; each may be an error of its own
MOST_OBJECTS = 2**15  # objects: messages, parts of messages, tools and their schemas
MOST_VALUES = 2**20  # values of all lists and objects together, which may be token ids
MOST_DROPPED = 2**26  # bytes of a too large body that are received before the connection is closed
LONG_BODY = 2**14  # bytes above which a body is parsed in a thread
PIECE = 2**16  # bytes that are counted in one call, so that other threads run between calls


class BodyCounts(NamedTuple):
    """Numbers of keys, objects and values in a JSON body, counted outside of strings."""

    keys: int
    objects: int
    values: int


def counted(body: bytes) -> BodyCounts:
    """Counts of a body, exact if the body is valid JSON."""
    keys = objects = values = 0
    inside = False  # True if the piece begins within a string
    rest = b""
    for start in range(0, len(body), PIECE):
        piece = rest + body[start : start + PIECE]
        # A backslash at the end of a piece escapes the first character of the next one.
        trailing = len(piece) - len(piece.rstrip(b"\\"))
        rest = piece[len(piece) - trailing % 2 :]
        piece = piece[: len(piece) - trailing % 2].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b" ".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        keys += outside.count(b":")
        objects += outside.count(b"{")
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    return BodyCounts(keys, objects, values)


def check(body: bytes) -> None:
    """Refuse a body with too many keys, objects or values.

    Raises:
        ApiError: the body exceeds one of the limits.
    """
    found = counted(body)
    for name, count, most in zip(found._fields, found, (MOST_KEYS, MOST_OBJECTS, MOST_VALUES), strict=True):
        if count > most:
            message = f"the body has {count} {name}, this server takes at most {most}; send fewer, or several requests"
            raise ApiError(413, message, code="body_too_large")


async def read_body(request: Request, most: int) -> bytes:
    """Receive the bytes of a body.

    A body that is too large is received too, up to `MOST_DROPPED` bytes, and dropped. A connection that is closed with
    unread bytes is reset, and its client might not receive the error.

    Raises:
        ApiError: the body has more than `most` bytes, or the client disconnected.
    """
    stated = request.headers.get("content-length", "")
    size = int(stated[:20]) if stated.isascii() and stated.isdigit() else 0
    got = f"{size} bytes" if size else "more than that"
    expects = "expect" in request.headers  # the client waits for status 100 before it sends the body
    if size > MOST_DROPPED or (size > most and expects):
        raise _too_large(got, most)
    received, count = bytearray(), 0
    try:
        async for piece in request.stream():
            count += len(piece)
            if count > MOST_DROPPED:
                break
            if count <= most:
                received += piece
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "the client went away within its request", code="client_gone") from error
    if count > most:
        raise _too_large(got, most)
    return bytes(received)


def _too_large(got: str, most: int) -> ApiError:
    message = f"the body has {got}, this server takes at most {most} bytes (max_body); send less"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
