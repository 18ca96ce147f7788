"""What answers a request for text: one path for whole replies and streams of events, in all four forms."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sametoken.engine.completion import Completion
from sametoken.server.errors import ApiError, worded
from sametoken.server.http import DONE, part_of, unless_gone
from sametoken.server.words import Words
from sametoken.server.worker import Job


class Reply(Response):
    """The answer to one request; a client that goes away ends it within a step of the engine.

    Args:
        job: what the engine does for it. `words`: how that is said.
        streams: whether it is said in events; then an error is an event too, since the status is out.
        fields: what the client calls each field that an error may name.
        anthropic: errors have Anthropic's envelope, and no mark ends a stream.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, words: Words, streams: bool, fields: Mapping[str, str], anthropic: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job, self._words, self._streams, self._fields, self._anthropic = job, words, streams, fields, anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._stream(send) if self._streams else self._whole(scope, receive, send))
        finally:
            self._job.close()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        done: list[Completion] = []
        try:
            async for chunk in self._job.chunks:
                self._job.saw(chunk)
                done += [chunk.completion] if chunk.completion is not None else []
        except Exception as error:
            raise self._worded(error) from error
        self._job.close()
        done.sort(key=lambda completion: (completion.index, completion.choice))
        await JSONResponse(self._words.whole(done))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Sends the events of a chunk as soon as it is there."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        done: list[Completion] = []
        try:
            await send(part_of(self._words.first()))
            async for chunk in self._job.chunks:
                self._job.saw(chunk)
                await send(part_of(self._words.delta(chunk)))
                done += [chunk.completion] if chunk.completion is not None else []
            self._job.close()
            last = self._words.last(done)
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise  # the connection, not the engine
            told = self._worded(error)
            self._job.worker.count(told)
            last = [told.anthropic if self._anthropic else told.body]
        await send(part_of(last, b"" if self._anthropic else DONE, more=False))

    def _worded(self, error: Exception) -> ApiError:
        return worded(error, self._fields, self._job.worker.config.request_timeout)
