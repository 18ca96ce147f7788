"""Cost of a request in llama-server's form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sametoken.engine.request import Request


def timings(request: Request) -> dict[str, Any]:
    """Numbers of tokens, and times in milliseconds, of a request so far; the prompt's time includes the first token."""
    now = time.perf_counter()
    seated, first, end = request.seated, request.first_token, request.finished or now
    read = 0 if seated is None else max(0, min(request.committed, len(request.prompt_ids)) - request.cached_tokens)
    read = max(1, len(request.prompt_ids) - request.cached_tokens) if first is not None else read
    prompt_ms = 0.0 if seated is None else max(0.0, 1e3 * ((first or end) - seated))
    predicted = len(request.tokens) - len(request.prompt_ids)
    predicted_ms = 0.0 if first is None else max(0.0, 1e3 * (end - first))
    steps = max(0, predicted - 1)
    found: dict[str, Any] = {
        "cache_n": request.cached_tokens,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": 1e3 * read / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": 1e3 * steps / predicted_ms if steps and predicted_ms else 0.0,
    }
    if request.stats.drafted:
        found |= {"draft_n": request.stats.drafted, "draft_n_accepted": request.stats.accepted}
    return found


class PromptProgress:
    """Progress of reading the prompts of a stream; each state is reported once.

    Args:
        requests: requests of the stream.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._processed: dict[int, int] = {}  # tokens in the last state, by place of the request

    def news(self, place: int, read: bool) -> list[dict[str, Any]]:
        """States of a prompt since the previous call; the first state has the cached tokens alone.

        Args:
            place: position of the request in the stream's requests.
            read: True if the whole prompt is read.
        """
        request = self._requests[place]
        total, cached, known = len(request.prompt_ids), request.cached_tokens, self._processed.get(place)
        if not read and request.seated is None:
            return []
        now = total if read else request.committed if request.committed < total else 0
        new = [cached] if known is None else []
        new += [now] if now > max(cached, known or 0) or read else []
        end = request.first_token if read and request.first_token is not None else time.perf_counter()
        milliseconds = int(1e3 * max(0.0, end - request.arrived))
        self._processed[place] = max([known or 0, *new])
        return [
            {"total": total, "cache": cached, "processed": tokens, "time_ms": 0 if tokens == cached else milliseconds}
            for tokens in new
        ]
