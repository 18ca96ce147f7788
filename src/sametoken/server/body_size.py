"""Limits on the size of a body and on its number of values, checked before the body is parsed.

Parsing, validation and their errors take time and memory by the number of values, not by the bytes: 8 MB may be one
text, or 3.9 million numbers. pydantic holds the lock of Python while it parses a body or lists what is wrong with it,
so that no thread helps: only fewer values do. With these limits no call takes longer than 0.1 s.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from sametoken.server.errors import CLIENT_GONE, ApiError

MOST_KEYS = 2**15  # of all objects together; each may be an error of its own
MOST_OBJECTS = 2**15  # messages, parts of messages, tools and what is in them
MOST_VALUES = 2**20  # of all lists and objects together, which may be token ids
MOST_DROPPED = 2**26  # bytes of a body that is too large, which are read all the same
LONG_BODY = 2**14  # bytes from which a body is read in a thread
PIECE = 2**16  # bytes that are counted at once, so that other threads run


class BodyCounts(NamedTuple):
    """Numbers of keys, objects and values in a body, counted outside of its texts."""

    keys: int
    objects: int
    values: int


def counted(body: bytes) -> BodyCounts:
    """The counts of a body, exact if it is valid JSON."""
    keys = objects = values = 0
    inside = False  # whether the piece begins within a text
    rest = b""
    for start in range(0, len(body), PIECE):
        piece = rest + body[start : start + PIECE]
        # A backslash at the end belongs to what follows.
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
    """Refuse a body that holds too much.

    Raises:
        ApiError: which limit it exceeds.
    """
    found = counted(body)
    for name, count, most in zip(found._fields, found, (MOST_KEYS, MOST_OBJECTS, MOST_VALUES), strict=True):
        if count > most:
            message = f"the body has {count} {name}, this server takes at most {most}; send fewer, or several requests"
            raise ApiError(413, message, code="body_too_large")


async def read_body(request: Request, most: int) -> bytes:
    """The bytes of a body.

    One that is too large is read all the same, up to a limit, and dropped: a connection that is closed with bytes
    unread is reset, and its client might never see why.

    Raises:
        ApiError: it has more than `most` bytes, or the client went away.
    """
    stated = request.headers.get("content-length", "")
    size = int(stated[:20]) if stated.isascii() and stated.isdigit() else 0
    got = f"{size} bytes" if size else "more than that"
    asks = "expect" in request.headers  # before it sends the body
    if size > MOST_DROPPED or (size > most and asks):
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
