"""Cost of a request in llama-server's form."""

from __future__ import annotations

import time
from typing import Any

from sametoken.engine.request import Request


def timings(request: Request) -> dict[str, Any]:
    """Tokens and milliseconds of a request so far; the first token comes from the prompt's last step."""
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


def progress(request: Request, read: bool) -> dict[str, Any]:
    """Progress of reading a prompt: cached tokens while `read` is false, all tokens once it is true; time in ms."""
    total, cached = len(request.prompt_ids), request.cached_tokens
    milliseconds = int(1e3 * ((request.first_token or request.arrived) - request.arrived)) if read else 0
    return {"total": total, "cache": cached, "processed": total if read else cached, "time_ms": milliseconds}
