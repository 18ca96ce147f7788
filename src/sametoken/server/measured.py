"""Timing metrics in a reply, as with vLLM's --enable-per-request-metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import Request
from sametoken.server.words import Event, Words


class RequestMetrics(TypedDict):
    """Milliseconds: before the request had a place, from there to its first token, from that to its last one, and
    between two tokens; and all of its tokens by the seconds from its place to the last one."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    mean_itl_ms: NotRequired[float]
    tokens_per_second: float


def metrics(request: Request) -> RequestMetrics | None:
    """Of a request that is done; None where it has no token."""
    seated, first, last = request.seated, request.first_token, request.finished
    if seated is None or first is None or last is None:
        return None
    tokens, seconds = len(request.tokens) - len(request.prompt_ids), max(last - seated, 1e-9)
    between = 1e3 * max(0.0, last - first)  # the end of a single token is noted before its beginning
    said: RequestMetrics = {
        "queue_time_ms": 1e3 * (seated - request.arrived),
        "time_to_first_token_ms": 1e3 * (first - seated),
        "generation_time_ms": between,
        "tokens_per_second": tokens / seconds,
    }
    if tokens > 1:
        said["mean_itl_ms"] = between / (tokens - 1)
    return said


class MeasuredWords(Words):
    """The words of a reply to one request with its metrics, at the end of a stream only where usage is."""

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

    def _with_metrics(self, said: Mapping[str, Any]) -> Mapping[str, Any]:
        found = metrics(self._request)
        return said if found is None else {**said, "metrics": found}
