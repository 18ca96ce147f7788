"""Signs of life of the ranks: each counts on in the store, and looks whether the others do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sametoken.parallel.place import RankPlace

BEAT_S, SILENT_S = 0.5, 6.0  # between signs of life; without one a rank is taken to hang


class SignsOfLife:
    """Two threads of a rank: one gives and reads signs, which may wait for the store; the other looks at them.

    Args:
        place: of this rank.
        store: of all ranks, by a connection of its own.
        lost: says which process of this one has ended, None for none.
        fail: is told why the ranks end.
        hangs: is told which rank gives no sign.
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
        self._signs: list[bytes] = [b""] * place.size
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._poll, self._watch)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the threads, but for the one that calls."""
        self._ending.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(BEAT_S)

    def _poll(self) -> None:
        """Publish signs of life and read those of the others; waits if the store does not answer."""
        names = [f"beat/{rank}" for rank in range(self._place.size)]
        while not self._ending.wait(BEAT_S):
            try:
                self._store.set(names[self._place.rank], str(time.monotonic_ns()))
                self._signs = [self._store.get(each) if self._store.check([each]) else b"" for each in names]
            except RuntimeError:
                self._fail("rank 0 has ended" if self._place.rank else "the launcher's store has ended")
                return

    def _watch(self) -> None:
        """Look for signs of life. The store is in rank 0: if one does not answer, nor does the other."""
        last, silent, before = self._signs, [0.0] * self._place.size, time.monotonic()
        while not self._ending.wait(BEAT_S):
            if (lost := self._lost()) is not None:
                self._fail(lost)
                return
            # Time in which this process itself was held up counts little: the others may have been held up too.
            now, found = time.monotonic(), self._signs
            passed, before = min(now - before, 2 * BEAT_S), now
            for rank in range(self._place.size):
                moved = found[rank] != last[rank] if found is not last else rank > 0
                silent[rank] = 0.0 if moved or rank == self._place.rank else silent[rank] + passed
            last = found
            gone = next((rank for rank, seconds in enumerate(silent) if seconds > SILENT_S), None)
            if gone is not None:
                self._hangs(gone)
                return
