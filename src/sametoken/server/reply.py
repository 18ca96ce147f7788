"""Replies to requests for text, as events or whole; if the client disconnects, its request ends within a step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sametoken.engine.completion import Completion
from sametoken.server.errors import worded
from sametoken.server.http import DONE, part_of, when_gone
from sametoken.server.scored_reply import scored, written
from sametoken.server.words import Event, Words
from sametoken.server.worker import Job

READING_S = 0.1  # seconds between two events about a prompt that is being read


class EventStream(Response):
    """Reply in server-sent events; an error is an event too, because the status was sent before.

    Args:
        job: job of the engine for the request.
        words: writer of the events.
        fields: names of the body's fields, by the names in the engine's errors.
        anthropic: True if errors have Anthropic's envelope, and no mark ends the stream.
        marked: True if OpenAI's mark ends the stream, unless `anthropic` is set.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, words: Words, fields: Mapping[str, str], anthropic: bool, marked: bool = True) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job, self._words, self._fields, self._anthropic = job, words, fields, anthropic
        self._mark = DONE if marked and not anthropic else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events of each chunk as soon as the engine emits it."""
        job, words, done, scores = self._job, self._words, list[Completion](), scored(self._job.requests)
        progress: asyncio.Future[None] | None = None
        try:
            with when_gone(receive, job.close):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    await send(part_of(words.first()))
                    progress = asyncio.ensure_future(_send_progress(words.reading, send)) if words.reading else None
                    async for chunk in job.chunks:
                        if progress is not None:
                            progress.cancel()
                        job.saw(chunk)
                        if scores:
                            await send(await self._written(partial(words.delta, chunk), len(chunk.token_ids)))
                        elif events := words.delta(chunk):
                            await send(part_of(events))
                        done += [chunk.completion] if chunk.completion is not None else []
                    complete = len(done) == len(job.requests)  # else there are no further events
                    if scores and complete:
                        tokens = sum(len(each.token_ids) for each in done)
                        last = await self._written(partial(words.last, done), tokens, self._mark, more=False)
                    else:
                        last = part_of(words.last(done) if complete else [], self._mark, more=False)
                except Exception as error:
                    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                        raise  # the connection, not the engine
                    refusal = worded(error, self._fields, job.worker.config.request_timeout)
                    job.worker.count(refusal)
                    last = part_of([refusal.anthropic if self._anthropic else refusal.body], self._mark, more=False)
                job.close()  # before the last event, after which a client may read the metrics
                await send(last)
        finally:
            if progress is not None:
                progress.cancel()
            job.close()

    def _written(
        self, events: Callable[[], list[Event]], tokens: int, mark: bytes = b"", more: bool = True
    ) -> Awaitable[Message]:
        """Part of a reply with the log-probabilities of so many tokens."""
        return written(self._job.requests, tokens, lambda encode: part_of(events(), mark, more, encode))


async def _send_progress(reading: Callable[[], list[Event]], send: Send) -> None:
    """Send events about a prompt while it is read, until cancelled.

    A lost connection is no error here, because the reply meets it too.

    Args:
        reading: function that returns the events since its previous call.
    """
    with suppress(OSError):
        while True:
            await asyncio.sleep(READING_S)
            if events := reading():
                await send(part_of(events))


async def completions(job: Job, receive: Receive) -> list[Completion]:
    """Completions of a request, ordered by prompt and choice; fewer if the client disconnects before the end."""
    done: list[Completion] = []
    try:
        with when_gone(receive, job.close):
            async for chunk in job.chunks:
                job.saw(chunk)
                done += [chunk.completion] if chunk.completion is not None else []
    finally:
        job.close()
    return sorted(done, key=lambda completion: (completion.index, completion.choice))
