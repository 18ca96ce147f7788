"""One streamed request to an OpenAI-compatible server: when which text came, and how many tokens by the server's count.

Chunks are never counted as tokens: a server that drafts sends several in one.
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
        due: when it was to be sent, on the clock of `time.perf_counter`.
        chunks: seconds since then, characters of each chunk with text, and the tokens emitted until then where the
            server says so in every chunk.
        tokens: by the server's `usage`, None if there was none.
        failure: why it failed, None if it did not.
    """

    due: float
    text: str = ""
    chunks: list[tuple[float, int, int | None]] = field(default_factory=list)
    tokens: int | None = None
    ended: float = 0.0
    failure: str | None = None

    def add(self, delta: Delta) -> None:
        """Take up one event of the stream."""
        if delta.tokens is not None:
            self.tokens = delta.tokens
        if text := delta.content or delta.reasoning:
            self.text += text
            self.chunks.append((delta.at - self.due, len(text), delta.tokens))

    @property
    def latency(self) -> float:
        """Seconds from when it was due to its last byte."""
        return self.ended - self.due

    @property
    def ttft(self) -> float:
        """Seconds to the first text, or to the end where there was none."""
        return self.chunks[0][0] if self.chunks else self.latency

    @property
    def counted(self) -> bool:
        """True if the server counted the tokens of every chunk."""
        return bool(self.chunks) and all(count is not None for _, _, count in self.chunks)

    def emissions(self) -> list[tuple[float, int]]:
        """Seconds and tokens of each chunk: the server's counts, or its total shared by characters."""
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
    """Send a request and read its stream; whatever goes wrong with it is in the answer.

    Args:
        path: "chat/completions" or "completions".
        due: when it was to be sent; it is sent then, or now if that is past.
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
