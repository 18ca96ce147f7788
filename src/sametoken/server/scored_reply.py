"""Writer of replies with many log-probabilities, which take seconds, in a thread.

The log-probabilities of a whole vocabulary for 20 tokens, written on the event loop, kept every stream waiting for 8 s.
A thread alone is not enough: Python's JSON encoder runs to its end without letting another thread run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from sametoken.engine.request import Request
from sametoken.server.http import Encode
from sametoken.server.threads import SideWork, aside

T = TypeVar("T")
MANY = 2**12  # log-probabilities that the event loop writes at most
PIECE = 256  # items that one call of the JSON encoder writes at most

encoded: Encode = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encoded_in_pieces(value: Any) -> str:
    """JSON of a value, as `encoded`, made in many short calls."""
    return "".join(_pieces(value))


def _pieces(value: Any) -> Iterator[str]:
    if not isinstance(value, dict | list) or not value:
        yield encoded(value)
        return
    begin, end = "{}" if isinstance(value, dict) else "[]"
    yield begin
    if len(value) > PIECE:
        items = list(value.items()) if isinstance(value, dict) else value
        parts = (items[at : at + PIECE] for at in range(0, len(items), PIECE))
        yield ",".join(encoded(dict(part) if isinstance(value, dict) else part)[1:-1] for part in parts)
    else:
        comma = ""
        for item in value:
            yield comma + (f"{encoded(item)}:" if isinstance(value, dict) else "")
            yield from _pieces(value[item] if isinstance(value, dict) else item)
            comma = ","
    yield end


def scored(requests: Sequence[Request]) -> bool:
    """True if the reply to engine requests has log-probabilities, so that `written` writes it."""
    return any(request.params.logprobs or request.params.prompt_logprobs for request in requests)


async def written(requests: Sequence[Request], tokens: int, write: Callable[[Encode], T]) -> T:
    """Call `write` with an encoder of JSON and return its result: in a thread if it has many log-probabilities.

    Args:
        requests: engine requests of one reply.
        tokens: number of generated tokens in the reply, or in a part of it.
    """
    params = requests[0].params
    scores = tokens * (params.logprobs or 0)
    if params.prompt_logprobs:
        scores += params.prompt_logprobs * sum(len(request.prompt_ids) for request in requests)
    if scores <= MANY:
        return write(encoded)
    return await aside(SideWork.SCORES, write, encoded_in_pieces)
