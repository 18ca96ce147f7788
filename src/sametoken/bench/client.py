"""One streamed request to an OpenAI-compatible server: arrival times of its text, and tokens counted by the server.

Chunks are not counted as tokens: with speculation a chunk may have several tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sametoken.client.client import Client, Delta, RemoteError

NO_USAGE = "no usage in the stream"


@dataclass
class TimedAnswer:
    """Answer to a request with its times.

    Attributes:
        due: due time of the request, on the clock of `time.perf_counter`.
        text: text so far.
        chunks: for each chunk with text: seconds since `due`, number of characters, and number of tokens emitted so
            far, None if the chunk has no count.
        tokens: number of tokens by the server's `usage`; None without `usage`.
        ended: time of the end, on the clock of `time.perf_counter`.
        failure: reason of a failure, or None.
    """

    due: float
    text: str = ""
    chunks: list[tuple[float, int, int | None]] = field(default_factory=list)
    tokens: int | None = None
    ended: float = 0.0
    failure: str | None = None

    def add(self, delta: Delta) -> None:
        """Add one event of the stream."""
        if delta.tokens is not None:
            self.tokens = delta.tokens
        if text := delta.content or delta.reasoning:
            self.text += text
            self.chunks.append((delta.at - self.due, len(text), delta.tokens))

    @property
    def latency(self) -> float:
        """Seconds from `due` to the last byte."""
        return self.ended - self.due

    @property
    def ttft(self) -> float:
        """Seconds from `due` to the first text, or to the end without text."""
        return self.chunks[0][0] if self.chunks else self.latency

    @property
    def counted(self) -> bool:
        """True if every chunk has a token count."""
        return bool(self.chunks) and all(count is not None for _, _, count in self.chunks)

    def emissions(self) -> list[tuple[float, int]]:
        """Seconds and tokens of each chunk: counts of the server, or its total divided in proportion to characters."""
        if self.counted:
            totals = [count or 0 for _, _, count in self.chunks]
        else:
            characters, total, seen = sum(length for _, length, _ in self.chunks), self.tokens or 0, 0
            totals = []
            for _, length, _ in self.chunks:
                seen += length
                totals.append(round(total * seen / characters))
        before = [0, *totals]
        return [(at, n - b) for (at, _, _), n, b in zip(self.chunks, totals, before, strict=False) if n > b]


async def ask(client: Client, path: str, body: Mapping[str, Any], due: float) -> TimedAnswer:
    """Send a request when it is due, and read its stream; an error becomes the failure of the answer.

    Args:
        client: client of the server.
        path: "chat/completions" or "completions".
        body: JSON body.
        due: due time on the clock of `time.perf_counter`; a request that is overdue is sent immediately.
    """
    answer = TimedAnswer(due)
    if (early := due - time.perf_counter()) > 0:
        await asyncio.sleep(early)
    try:
        async with aclosing(client.stream(path, body)) as deltas:
            async for delta in deltas:
                answer.add(delta)
    except RemoteError as error:
        answer.failure = str(error)
    answer.ended = time.perf_counter()
    if answer.failure is None and not answer.tokens:
        answer.failure = NO_USAGE if answer.tokens is None else "no tokens"
    return answer
