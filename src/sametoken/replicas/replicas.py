"""All replicas of a server: choice for a request, restarts, and shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sametoken.errors import EngineError, SametokenError
from sametoken.replicas.merging import ReplicaState
from sametoken.replicas.process import Replica, Work
from sametoken.replicas.routing import RoutedPrompt, choose

LOG = logging.getLogger("sametoken.server")
MOST_RESTARTS, WITHIN_S = 3, 600.0  # of one replica; after more, it stays ended
PAUSE_S = 1.0  # before a restart
LAST_S = 10.0  # for processes to end, in addition to the time of open requests


class Replicas:
    """Replicas of a server.

    Args:
        works: task of each replica.
        drain_seconds: time for open requests when the server stops.

    Attributes:
        stopping: true if no new requests are accepted.
        failure: reason why the server must stop.
        on_failure: called with `failure`.
    """

    def __init__(self, works: Sequence[Work], drain_seconds: float) -> None:
        self._all = [Replica(work) for work in works]
        self._drain_s = drain_seconds
        self._watches: list[asyncio.Task[None]] = []
        self.stopping = False
        self.failure: EngineError | None = None
        self.on_failure: Callable[[EngineError], object] = lambda error: None

    async def start(self) -> str:
        """Start all replicas concurrently; return their speculation method.

        Raises:
            EngineError: a replica cannot start; the others were ended.
        """
        starts = [asyncio.ensure_future(replica.start()) for replica in self._all]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await self.close()
            raise
        self._watches = [asyncio.ensure_future(self._watch(replica)) for replica in self._all]
        return str(self._all[0].said["method"])

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self._all]

    def ready(self) -> list[Replica]:
        """Replicas that accept requests."""
        return [replica for replica in self._all if replica.status == "ready"]

    def choose(self, prompt: RoutedPrompt, without: Collection[Replica] = ()) -> Replica | None:
        """Replica for a request, None if none accepts it. `without`: replicas that were tried."""
        candidates = [replica.candidate(prompt) for replica in self.ready() if replica not in without]
        return self._all[choose(candidates, prompt.size)] if candidates else None

    async def _watch(self, replica: Replica) -> None:
        """Restart a replica when it has ended, up to a number of restarts."""
        exits: deque[float] = deque(maxlen=MOST_RESTARTS)
        while True:
            how = await replica.ended()
            replica.status = "ended"
            if self.stopping:
                return
            now = time.monotonic()
            if len(exits) == MOST_RESTARTS and now - exits[0] < WITHIN_S:
                LOG.critical("%s, for the %dth time in %g s; it is left out", how, MOST_RESTARTS + 1, WITHIN_S)
                break
            exits.append(now)
            LOG.error("%s; its open requests got an error, and it is started again", how)
            replica.restarts += 1
            await asyncio.sleep(PAUSE_S)
            await self._start_again(replica)
        if all(watch.done() or watch is asyncio.current_task() for watch in self._watches):
            self.failure = EngineError(f"no replica is left: {how} too often; its own messages say why")
            self.on_failure(self.failure)

    async def _start_again(self, replica: Replica) -> None:
        if self.stopping:
            return
        try:
            await replica.start()
        except SametokenError as error:
            LOG.critical("replica %d is not ready again: %s", replica.number, error)
        else:
            LOG.info("replica %d is ready again", replica.number)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Wait until all replicas have finished their open requests and ended; with `hurry`, these end with an error.

        Processes that do not end are killed.
        """
        self.stopping = True
        self._signal()
        ended: asyncio.Future[Any] = asyncio.gather(*(replica.ended() for replica in self._all))
        hurried: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({ended, hurried}, timeout=self._drain_s + LAST_S, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            self._signal()
            await asyncio.wait({ended}, timeout=LAST_S)
        if not ended.done():  # answers that wait for one of these end with an error
            self._signal(signal.SIGKILL)
            await asyncio.wait({ended}, timeout=LAST_S)
        ended.cancel()

    def _signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        for replica in self._all:
            replica.send(number)

    async def close(self) -> None:
        """End all remaining processes."""
        self.stopping = True
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*(replica.close() for replica in self._all))
