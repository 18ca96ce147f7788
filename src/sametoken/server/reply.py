"""Answers to requests for text, as events or whole; a client that goes away ends its request within a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sametoken.engine.completion import Completion
from sametoken.server.errors import worded
from sametoken.server.http import DONE, part_of, when_gone
from sametoken.server.words import Event, Words
from sametoken.server.worker import Job

READING_S = 0.1  # between two looks at how far a prompt is read


class EventStream(Response):
    """A reply in server-sent events; an error is an event too, since the status is out.

    Args:
        job: what the engine does for it. `words`: how that is said.
        fields: what the client calls each field that an error may name.
        anthropic: errors have Anthropic's envelope, and no mark ends a stream.
        marked: whether OpenAI's mark ends the stream of others.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, words: Words, fields: Mapping[str, str], anthropic: bool, marked: bool = True) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job, self._words, self._fields, self._anthropic = job, words, fields, anthropic
        self._mark = DONE if marked and not anthropic else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events of a chunk as soon as it is there."""
        job, words, done = self._job, self._words, list[Completion]()
        telling: asyncio.Future[None] | None = None
        try:
            with when_gone(receive, job.close):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    await send(part_of(words.first()))
                    telling = asyncio.ensure_future(_tell(words.reading, send)) if words.reading else None
                    async for chunk in job.chunks:
                        if telling is not None:
                            telling.cancel()
                        job.saw(chunk)
                        await send(part_of(words.delta(chunk)))
                        done += [chunk.completion] if chunk.completion is not None else []
                    last = words.last(done) if len(done) == len(job.requests) else []
                except Exception as error:
                    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                        raise  # the connection, not the engine
                    refusal = worded(error, self._fields, job.worker.config.request_timeout)
                    job.worker.count(refusal)
                    last = [refusal.anthropic if self._anthropic else refusal.body]
                job.close()  # before the end is out: whoever has it may ask for what was counted
                await send(part_of(last, self._mark, more=False))
        finally:
            if telling is not None:
                telling.cancel()
            job.close()


async def _tell(reading: Callable[[], list[Event]], send: Send) -> None:
    """Send events about a prompt while it is read, until cancelled; the reply too meets a connection that is lost.

    Args:
        reading: returns the events since its previous call.
    """
    with suppress(OSError):
        while True:
            await asyncio.sleep(READING_S)
            if events := reading():
                await send(part_of(events))


async def completions(job: Job, receive: Receive) -> list[Completion]:
    """Completions of a request, by prompt, then by choice; fewer if the client disconnects before the end."""
    done: list[Completion] = []
    try:
        with when_gone(receive, job.close):
            async for chunk in job.chunks:
                job.saw(chunk)
                done += [chunk.completion] if chunk.completion is not None else []
    finally:
        job.close()
    return sorted(done, key=lambda completion: (completion.index, completion.choice))
