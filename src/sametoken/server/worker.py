"""Connection of the endpoints to the engine: admission, time limits, metrics, and the end of requests.

This module runs on the event loop; the engine has a thread of its own behind `AsyncLLM`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.completion import Chunk
from sametoken.engine.engine import EngineLoad
from sametoken.engine.llm import LLM
from sametoken.engine.request import Request
from sametoken.engine.stats import SpeculationStats
from sametoken.options.server import ServerConfig
from sametoken.server.errors import QUEUE_FULL, ApiError, stopping
from sametoken.server.exchange import CURRENT
from sametoken.server.metrics import Metrics
from sametoken.server.stored import ResponseStore
from sametoken.server.tally import Totals

DOZE_S = 1.0  # seconds between two checks for open requests, at most
_RECENT = 0.9  # weight of the past in the average time of a request


class Worker:
    """Interface of the endpoints to the engine.

    Args:
        engine: the engine.
        config: configuration of the server, with its limits.
        metrics: metrics of the server.
    """

    def __init__(self, engine: AsyncLLM, config: ServerConfig, metrics: Metrics) -> None:
        self.engine, self.config, self.metrics = engine, config, metrics
        self.draining, self.stored = False, ResponseStore(config.max_stored_responses)
        self.background: set[asyncio.Task[None]] = set()  # tasks for which no client waits
        self._jobs: set[Job] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._done = Totals(SpeculationStats(""), 0, 0, 0)
        self._seconds = 1.0  # average duration of a request
        self.longest = 0  # largest number of tokens, prompt and output, of a request that ended
        self._counted: tuple[float, ...] = ()
        self.sleeping = False
        self._used = time.monotonic()
        if config.sleep_idle_seconds is not None:
            self._doze(config.sleep_idle_seconds)
        metrics.watch(self)
        metrics.watch_engine(engine.llm.engine, engine.llm.max_seq_len)

    def wake(self) -> None:
        """Record the use of the model by a request, which ends the sleep of an idle server."""
        self._used, self.sleeping = time.monotonic(), False

    def _doze(self, seconds: float) -> None:
        """Release the engine's memory after `seconds` without open requests, and schedule the next check."""
        if self._jobs:
            self._used = time.monotonic()
        left = self._used + seconds - time.monotonic()
        if left <= 0 and not self.sleeping and self.ready:
            self.sleeping = True
            given = asyncio.ensure_future(self.engine.call(lambda: self.llm.engine.give_back(files=True)))
            given.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next request reports it
        asyncio.get_running_loop().call_later(max(left, min(seconds, DOZE_S)), self._doze, seconds)

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    @property
    def ready(self) -> bool:
        """True if new requests are accepted."""
        return self.engine.alive and not self.draining

    @property
    def capacity(self) -> int:
        """Number of sequences that may run and wait, at most."""
        return self.llm.engine.max_batch_size + self.config.max_queue

    def admit(self, sequences: int) -> None:
        """Check that so many sequences can be served now.

        Raises:
            ApiError: the server stops, or its queue is full or too short.
        """
        if not self.ready:
            raise stopping()
        if sequences > self.capacity:
            raise ApiError(
                400,
                f"the request has {sequences} sequences (prompts times n or best_of), the server holds at most "
                f"{self.capacity}; send fewer",
                param="n",
            )
        present = sum(job.chunks.left for job in self._jobs)
        if present + sequences > self.capacity:
            waiting = present - self.llm.engine.max_batch_size
            seconds = math.ceil(self._seconds * max(1, waiting) / self.llm.engine.max_batch_size)
            raise ApiError(
                429,
                f"{present} sequences are being served or waiting, {sequences} more would exceed {self.capacity}; "
                "try again later",
                "rate_limit_error",
                code=QUEUE_FULL,
                headers={"Retry-After": str(min(max(1, seconds), 60))},
            )

    def take(self, requests: Sequence[Request]) -> Job:
        """Submit a client's requests to the engine; the caller must close the returned job.

        Raises:
            ApiError: the queue became full since `admit`, or the server stops.
        """
        self.admit(len(requests))
        if (exchange := CURRENT.get()) is not None:
            exchange.sequences.extend(requests)
            for request in requests:
                request.owner = "" if self.config.share_between_keys else exchange.owner
        job = Job(self, requests)
        self._jobs.add(job)
        self._idle.clear()
        return job

    def finish(self, job: Job) -> None:
        """Record the end of a job."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self.wake()
        self._done = _sum(self._done, job.requests)
        self.metrics.saw_end(job.requests)
        self.longest = max(self.longest, *(len(request.tokens) for request in job.requests))
        self._seconds = _RECENT * self._seconds + (1 - _RECENT) * (time.perf_counter() - job.requests[0].arrived)
        if not self._jobs:
            self._idle.set()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Refuse new requests and wait for the end of open ones.

        After the deadline, or when `hurry` is set, open requests end with an error.
        """
        self.draining = True
        waits = {asyncio.ensure_future(event.wait()) for event in (self._idle, hurry)}
        _, pending = await asyncio.wait(waits, timeout=self.config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        await self.engine.close()

    def totals(self) -> Totals:
        return _sum(self._done, [request for job in self._jobs for request in job.requests])

    def since(self, *sums: float) -> list[float]:
        """Increase of each sum since the previous call, for the speeds in llama-server's metrics."""
        before, self._counted = self._counted or (0.0,) * len(sums), sums
        return [now - then for now, then in zip(sums, before, strict=True)]

    def load(self) -> EngineLoad:
        return self.llm.engine.load

    @property
    def requests(self) -> list[Request]:
        """Sequences that run or wait."""
        return [request for job in self._jobs for request in job.requests if request.finished is None]

    @property
    def open_requests(self) -> int:
        """Number of clients' requests that run or wait."""
        return len(self._jobs)

    def count(self, error: ApiError) -> None:
        """Count an error in the metrics."""
        self.metrics.saw_error(error.status, error.body["error"]["code"])


class Job:
    """One client's request in the engine, which must be closed at its end.

    Attributes:
        requests: engine requests, one for each choice of each prompt, ordered by prompt.
        chunks: iterator of the engine's chunks for the requests; `errors.worded` converts its exceptions.
    """

    def __init__(self, worker: Worker, requests: Sequence[Request]) -> None:
        self.worker, self.requests = worker, requests
        self.chunks = worker.engine.run(requests, worker.config.request_timeout)
        self._choices = requests[0].params.n
        self._emitted: dict[int, float] = {}  # time of the last emission of each sequence

    def saw(self, chunk: Chunk) -> None:
        """Count a chunk in the metrics; must be called for every chunk.

        Raises:
            SametokenError: the engine ended the sequence with this error.
        """
        if chunk.token_ids:
            place, now = chunk.index * self._choices + chunk.choice, time.perf_counter()
            if place in self._emitted:
                self.worker.metrics.saw_emission(now - self._emitted[place], len(chunk.token_ids))
            else:
                self.worker.metrics.saw_first(self.requests[place])
            self._emitted[place] = now
        if chunk.completion is not None and chunk.completion.error is not None:
            raise chunk.completion.error

    def close(self) -> None:
        """Cancel the sequences that have not ended, and report the end of the job to the worker."""
        self.chunks.close()
        self.worker.finish(self)


def _sum(done: Totals, requests: Sequence[Request]) -> Totals:
    """New totals, with these requests added."""
    stats = SpeculationStats("")
    for each in (done.speculation, *(request.stats for request in requests)):
        stats.add(each)
    return Totals(
        stats,
        done.prompt_tokens + sum(len(request.prompt_ids) for request in requests if request.choice == 0),
        done.cached_tokens + sum(request.cached_tokens for request in requests if request.choice == 0),
        done.generated + sum(len(request.tokens) - len(request.prompt_ids) for request in requests),
    )
