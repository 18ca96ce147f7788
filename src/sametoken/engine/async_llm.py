"""`AsyncLLM`: many callers on an event loop, one engine thread that batches their requests.

Only the engine's own thread steps the engine. Callers send requests and cancellations through a queue, and receive
chunks on their own event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

from sametoken.checkpoint.chat import Message
from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.llm import LLM
from sametoken.engine.llm_requests import Prompt
from sametoken.engine.report import StepReport
from sametoken.engine.request import Emission, Request
from sametoken.errors import EngineError, SametokenError
from sametoken.options.sampling import SamplingParams
from sametoken.options.speculation import NO_DRAFT

T = TypeVar("T")
IDLE_S = 600.0  # seconds without a request after which the memory of the KV cache is returned to the system
LONGEST_HOLD = 0.05  # seconds that a token may wait for later ones in its chunk: hardly visible to a reader


class _Stream(NamedTuple):
    """Queue from the engine's thread to the event loop of one call; None in the queue ends the call."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Chunk | Exception | None]


class Chunks:
    """Async iterator over the chunks of some requests; closing it cancels unfinished requests.

    The requests are sent to the engine when the first chunk is awaited. Closing also ends a pending wait for a chunk.

    Args:
        engine: engine of the requests.
        requests: requests from `LLM.requests`.
        timeout: seconds after the first wait until iteration ends with `TimeoutError`; None for never.

    Attributes:
        left: number of unfinished requests; 0 after closing.
    """

    def __init__(self, engine: AsyncLLM, requests: Sequence[Request], timeout: float | None = None) -> None:
        self._engine, self._requests, self._timeout, self.left = engine, requests, timeout, len(requests)
        self._stream: _Stream | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> Chunk:
        if not self.left:
            raise StopAsyncIteration
        if (stream := self._stream) is None:
            self._stream = stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
            self._engine.send(_Add(self._requests, stream))
            if self._timeout is not None:
                over = TimeoutError(f"{self._timeout:g} s are over")
                self._timer = stream.loop.call_later(self._timeout, stream.items.put_nowait, over)
        try:
            item = await stream.items.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(item, Chunk):
            self.left -= item.completion is not None
            if not self.left:
                self.close()
            return item
        self.close()
        if item is None:
            raise StopAsyncIteration
        raise copy.copy(item)  # one error object in many streams would collect all their tracebacks

    def close(self) -> None:
        """Cancel unfinished requests; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self.left and self._stream is not None:
            self._engine.send(_Abort(self._requests))
            self._stream.items.put_nowait(None)
        self.left = 0

    async def aclose(self) -> None:
        """Close; see `close`. The name is that of async generators."""
        self.close()

    def __del__(self) -> None:
        self.close()  # a caller may leave its loop over the chunks without closing


def _deliver(items: Sequence[tuple[_Stream, Chunk | Exception]]) -> None:
    """Put chunks on the loops of their callers, with one wake-up per loop; closed loops are skipped.

    Runs on the engine's thread.
    """
    for loop in {stream.loop for stream, _ in items}:
        own = [each for each in items if each[0].loop is loop]
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_put, own)


def _put(items: Sequence[tuple[_Stream, Chunk | Exception]]) -> None:
    """Put chunks into the queues of one loop; runs on that loop."""
    for stream, item in items:
        stream.items.put_nowait(item)


def _run_call(call: _Call) -> None:
    if not call.result.set_running_or_notify_cancel():
        return
    try:
        call.result.set_result(call.function())
    except Exception as error:
        call.result.set_exception(error)


class _Add(NamedTuple):
    requests: Sequence[Request]
    stream: _Stream


class _Abort(NamedTuple):
    requests: Sequence[Request]


class _Call(NamedTuple):
    function: Callable[[], object]
    result: Future[Any]


@dataclass(slots=True)
class _Listener:
    """Stream of one request, with its unsent output.

    Attributes:
        stream: stream of the request.
        news: output since the last chunk; None without any.
        due: earliest time of the next chunk, in seconds of `time.perf_counter`.
    """

    stream: _Stream
    news: Emission | None = None
    due: float = 0.0


class AsyncLLM:
    """`LLM` for concurrent callers. As a context manager, it stops the engine and frees its memory at the end.

    Args:
        llm: model and engine, owned by this object from now on.
        max_chunks_per_second: limit of the chunks of all streams together; None for one chunk per step. Tokens wait for
            the next chunk of their request for at most `LONGEST_HOLD`; first and last chunks never wait.

    Attributes:
        llm: as given.
        failure: error that ended the engine, an `EngineError` if the engine failed; None while it runs.
        on_failure: called on the engine's thread when the engine fails.
    """

    def __init__(self, llm: LLM, max_chunks_per_second: float | None = None) -> None:
        self.llm, self._pause = llm, 0.0 if max_chunks_per_second is None else 1 / max_chunks_per_second
        self.failure: SametokenError | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Call | EngineError | None] = queue.SimpleQueue()
        self._listeners: dict[int, _Listener] = {}
        if llm.ranks is not None:  # a rank may end while nothing is computed
            llm.ranks.group.on_failure = self._inbox.put
            if llm.ranks.group.failure is not None:
                self._inbox.put(llm.ranks.group.failure)
        self._thread = threading.Thread(target=self._serve, name="sametoken-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete prompts as `LLM.generate`; cancelling the task cancels the requests."""
        done = [c.completion async for c in self.run(self.llm.requests(prompts, params)) if c.completion]
        return sorted(done, key=lambda completion: (completion.index, completion.choice))

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> list[Completion]:
        """Generate the assistant's next turn of one conversation."""
        return await self.generate(self.llm.render_chat(messages), params)

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """Stream completions as `LLM.stream`; closing the iterator cancels unfinished requests.

        Raises:
            RequestError: a request is not valid; raised by the call, not by the iteration.
        """
        return self.run(self.llm.requests(prompts, params))

    def run(self, requests: Sequence[Request], timeout: float | None = None) -> Chunks:
        """Chunks of requests made by `LLM.requests`; see `Chunks`."""
        return Chunks(self, requests, timeout)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps and return its result; streams wait meanwhile.

        Raises:
            SametokenError: the engine has ended.
            Exception: any error of the function.
        """
        result: Future[T] = Future()
        self.send(_Call(function, result))
        return await asyncio.wrap_future(result)

    @property
    def alive(self) -> bool:
        """True while the engine has neither failed nor been closed."""
        return self.failure is None

    def send(self, message: _Add | _Abort | _Call) -> None:
        """Send a message to the engine's thread.

        Raises:
            SametokenError: the engine has ended; an `EngineError` if it failed.
        """
        self._inbox.put(message)
        # Checked after the message is queued: either the engine thread handles it, or the failure is raised here.
        if self.failure is not None and not isinstance(message, _Abort):
            raise type(self.failure)(f"{self.failure}; start a new one")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        self.llm.close()

    async def close(self) -> None:
        """Stop the engine after its current step; unfinished streams end with an error."""
        self._inbox.put(None)
        with ThreadPoolExecutor(1) as own:  # the loop's own executor may be busy for long
            await asyncio.get_running_loop().run_in_executor(own, self._thread.join)

    def _serve(self) -> None:
        """Run the loop of the engine's thread: handle messages between steps; without requests, wait for one."""
        engine = self.llm.engine
        try:
            if self.llm.speculative.adaptive and self.llm.method != NO_DRAFT:
                engine.calibrate(lambda: not self._inbox.empty())
                engine.give_back()  # pages of the KV cache that the measured steps wrote to
            while True:
                while not (engine.busy and self._inbox.empty()):
                    match self._next():
                        case None:
                            self._fail(SametokenError("the engine has stopped"))
                            return
                        case EngineError() as error:
                            raise error  # noqa: TRY301
                        case _Call() as call:
                            _run_call(call)
                        case _Add(requests, stream):
                            for request in requests:
                                self._listeners[request.id] = _Listener(stream)
                                engine.add(request)
                        case _Abort(requests):
                            for request in requests:
                                self._listeners.pop(request.id, None)
                                engine.abort(request.id)
                self._hand_out(engine.step())
        except BaseException as error:
            self._fail(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            self.on_failure()
            raise

    def _next(self) -> _Add | _Abort | _Call | EngineError | None:
        """Wait for the next message; after `IDLE_S` without one, free the engine's memory."""
        if not self.llm.engine.busy:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=IDLE_S)
            self.llm.engine.give_back()
        return self._inbox.get()

    def _hand_out(self, report: StepReport) -> None:
        """Send every stream the chunks that are due after a step."""
        for emission in report.emissions:
            each = self._listeners.get(emission.request.id)
            if each is not None:
                each.news = emission if each.news is None else each.news.then(emission)
        now, pause = time.perf_counter(), min(LONGEST_HOLD, len(self._listeners) * self._pause)
        due: list[tuple[_Stream, Chunk]] = []
        for number, each in list(self._listeners.items()):
            if each.news is None or (now < each.due and not each.news.finished):
                continue
            if each.news.finished:
                del self._listeners[number]
            due.append((each.stream, Chunk.of(each.news)))
            each.news, each.due = None, now + pause
        _deliver(due)

    def _fail(self, error: SametokenError) -> None:
        self.failure = error
        _deliver([(stream, error) for stream in {each.stream for each in self._listeners.values()}])
        for request_id in self._listeners:
            self.llm.engine.abort(request_id)
        self._listeners.clear()
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Add):
                _deliver([(message.stream, error)])
            elif isinstance(message, _Call):
                message.result.set_exception(error)
