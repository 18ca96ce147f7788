"""Heartbeats of the ranks: each increments a counter in the store and checks those of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sametoken.parallel.place import RankPlace

BEAT_S, SILENT_S = 0.5, 6.0  # between heartbeats; limit without one, after which a rank counts as hanging


class Heartbeats:
    """Two threads of a rank: one exchanges heartbeats, which may block on the store, and the other checks them.

    Args:
        place: place of this rank.
        store: store of all ranks, on a separate connection.
        lost: function for a message about an own process that has ended, None for none.
        fail: called with the reason why the ranks end.
        hangs: called with the rank without heartbeats.
    """

    def __init__(
        self,
        place: RankPlace,
        store: Any,
        lost: Callable[[], str | None],
        fail: Callable[[str], object],
        hangs: Callable[[int], object],
    ) -> None:
        self._place, self._store, self._lost, self._fail, self._hangs = place, store, lost, fail, hangs
        self._beats: list[bytes] = [b""] * place.size
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._poll, self._watch)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the threads, except the calling one."""
        self._ending.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(BEAT_S)

    def _poll(self) -> None:
        """Publish heartbeats and read those of the others; blocks if the store does not answer."""
        names = [f"beat/{rank}" for rank in range(self._place.size)]
        while not self._ending.wait(BEAT_S):
            try:
                self._store.set(names[self._place.rank], str(time.monotonic_ns()))
                self._beats = [self._store.get(each) if self._store.check([each]) else b"" for each in names]
            except RuntimeError:
                self._fail("rank 0 has ended" if self._place.rank else "the launcher's store has ended")
                return

    def _watch(self) -> None:
        """Check heartbeats. The store is in rank 0: if the store does not answer, rank 0 is hanging."""
        last, silent, before = self._beats, [0.0] * self._place.size, time.monotonic()
        while not self._ending.wait(BEAT_S):
            if (lost := self._lost()) is not None:
                self._fail(lost)
                return
            # Time in which this process itself was suspended counts little: the others may have been suspended too.
            now, found = time.monotonic(), self._beats
            passed, before = min(now - before, 2 * BEAT_S), now
            for rank in range(self._place.size):
                moved = found[rank] != last[rank] if found is not last else rank > 0
                silent[rank] = 0.0 if moved or rank == self._place.rank else silent[rank] + passed
            last = found
            gone = next((rank for rank, seconds in enumerate(silent) if seconds > SILENT_S), None)
            if gone is not None:
                self._hangs(gone)
                return
