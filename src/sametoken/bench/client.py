"""One streamed request to an OpenAI-compatible server: when which text came, and how many tokens by the server's count.

Chunks are never counted as tokens: a server that drafts sends several in one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sametoken.bench.sse import EventParser
from sametoken.data.remote import error_message, error_words

if TYPE_CHECKING:
    import httpx

DONE = "[DONE]"
NO_USAGE = "no usage in the stream"


@dataclass
class Answer:
    """What came of a request.

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
    done: bool = False

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
        """Whether the server counted the tokens of every chunk."""
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


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], due: float) -> Answer:
    """Sends a request and reads its stream; whatever goes wrong with it is in the answer.

    Args:
        path: "chat/completions" or "completions" under the client's base URL.
        due: when it was to be sent; it is sent then, or now if that is past.
    """
    import httpx

    answer = Answer(due)
    if (early := due - time.perf_counter()) > 0:
        await asyncio.sleep(early)
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer.failure = f"HTTP {response.status_code}: {error_words(await response.aread())}"
            else:
                await _read(response, answer)
    except httpx.TimeoutException as error:
        answer.failure = f"stalled ({type(error).__name__})"
    except httpx.HTTPError as error:
        answer.failure = f"connection lost ({type(error).__name__})"
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        answer.failure = f"not an OpenAI stream ({type(error).__name__})"
    answer.ended = time.perf_counter()
    if answer.failure is None and not answer.done:
        answer.failure = "stream ended early"
    elif answer.failure is None and not answer.tokens:
        answer.failure = NO_USAGE if answer.tokens is None else "no tokens"
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    parser = EventParser()
    async for received in response.aiter_bytes():
        now = time.perf_counter() - answer.due
        for data in parser.feed(received):
            _note(answer, data, now)
    for data in parser.close():
        _note(answer, data, time.perf_counter() - answer.due)


def _note(answer: Answer, data: str, now: float) -> None:
    """Adds one event to the answer."""
    if data.strip() == DONE:
        answer.done = True
        return
    event = json.loads(data)
    if event.get("error"):
        answer.failure = f"error in the stream: {error_message(event)}"
        return
    usage = event.get("usage") or {}
    counted = usage.get("completion_tokens")
    if counted is not None:
        answer.tokens = int(counted)
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        if choice.get("finish_reason"):
            answer.done = True  # some servers leave out the closing [DONE]
        if text:
            answer.text += text
            answer.chunks.append((now, len(text), None if counted is None else int(counted)))
