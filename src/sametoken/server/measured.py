"""Timing metrics in replies, as with vLLM's --enable-per-request-metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import Request
from sametoken.server.words import Event, Words


class RequestMetrics(TypedDict):
    """Times of a request in milliseconds, and its speed.

    `queue_time_ms` ends when the request gets a place in the batch, `time_to_first_token_ms` runs from there to the
    first token, and `generation_time_ms` from the first token to the last; `mean_itl_ms` is the mean time between two
    tokens. `tokens_per_second` covers the time from the place in the batch to the last token.
    """

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    mean_itl_ms: NotRequired[float]
    tokens_per_second: float


def metrics(request: Request) -> RequestMetrics | None:
    """Metrics of a request that has ended; None if it has no token."""
    seated, first, last = request.seated, request.first_token, request.finished
    if seated is None or first is None or last is None:
        return None
    tokens, seconds = len(request.tokens) - len(request.prompt_ids), max(last - seated, 1e-9)
    between = 1e3 * max(0.0, last - first)  # the end of a single token is noted before its beginning
    found: RequestMetrics = {
        "queue_time_ms": 1e3 * (seated - request.arrived),
        "time_to_first_token_ms": 1e3 * (first - seated),
        "generation_time_ms": between,
        "tokens_per_second": tokens / seconds,
    }
    if tokens > 1:
        found["mean_itl_ms"] = between / (tokens - 1)
    return found


class MeasuredWords(Words):
    """Replies to one request with its metrics; a stream has them in the event with the usage, if there is one."""

    def __init__(self, words: Words, request: Request) -> None:
        self._words, self._request, self.reading = words, request, words.reading

    def first(self) -> list[Event]:
        return self._words.first()

    def delta(self, chunk: Chunk) -> list[Event]:
        return self._words.delta(chunk)

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        return [self._with_metrics(event) for event in self._words.last(completions)]

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        return self._with_metrics(self._words.whole(completions))

    def _with_metrics(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        found = metrics(self._request)
        return reply if found is None else {**reply, "metrics": found}
