"""Rank 0's side: starts the other ranks, tells them what to load, and begins every forward in all of them.

Everything above the target (drafts, draws, requests, clocks) is on rank 0 alone. A forward is sent as what it reads:
its tokens and places. Nothing else of the engine's state is anywhere else, so that nothing can differ.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from sametoken.errors import ConfigError, EngineError
from sametoken.parallel.group import RankGroup, facts
from sametoken.parallel.host import own_cores
from sametoken.parallel.key import KEY
from sametoken.parallel.messages import Cache, End, Forward, Moved, Scores, TargetToLoad, packed
from sametoken.parallel.place import RankPlace, place_of
from sametoken.runtime.cache import View

LOG = logging.getLogger("sametoken")
TURN_S, LAST_S = 1.0, 5.0  # until the forward that runs has ended, and that the others have to end
LOAD_S = 3600.0
CLOSING: list[Callable[[], object]] = []  # what lets the other ranks of this process's targets end


class Lead:
    """The other ranks of a target, as rank 0 has them.

    Args:
        place: of this process, rank 0.
        check: compare a digest of each forward over the ranks.

    Raises:
        SametokenError: a rank did not come, or is another version.
    """

    def __init__(self, place: RankPlace, *, check: bool) -> None:
        self.place = place
        threads = torch.get_num_threads()
        self.group = RankGroup(place, facts(), check=check)
        self.sum = self.group.sum
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        if not place.launcher:
            self.processes = {rank: _start(place, rank, self.group) for rank in range(1, place.size)}
        processes = self.processes
        self.group.lost = lambda: _lost(processes)
        self.group.end_rank = lambda rank: processes[rank].kill() if rank in processes else None
        self._turn = threading.Lock()  # held while a forward runs
        self._moved: list[Moved] = []
        self._pages: dict[int, list[int]] = {}  # of rows, as the others have them
        self.close = weakref.finalize(self, _close, self.group, self.processes, self._turn, threads)
        CLOSING.append(self.close)
        self.group.connect()
        torch.set_num_threads(max(1, threads // self.group.sharing))
        if words := place.bound(os.environ, len(own_cores()[1])):
            LOG.warning(words)

    def load(self, wanted: TargetToLoad, digest: str) -> None:
        """Tells the others what to load, and makes sure that it is the same there.

        Raises:
            ConfigError: a rank has other files.
        """
        self.group.send(wanted)
        for rank in range(1, self.place.size):
            if (found := self.group.hear("model", rank, LOAD_S)) not in (digest, ""):
                raise ConfigError(
                    f"rank {rank} has other files of {wanted.model} than rank 0 (digests {found[:12]} and "
                    f"{digest[:12]}); copy the same checkpoint to all hosts"
                )

    def loaded(self) -> None:
        """Waits until all ranks have their weights. Raises ConfigError with what one of them says."""
        for rank in range(1, self.place.size):
            if words := self.group.hear("loaded", rank, LOAD_S):
                raise ConfigError(f"rank {rank}: {words}")

    def hold(self, cache: Cache) -> None:
        """The others make their caches."""
        self.group.send(cache)

    # What the decoder asks, see `Ranks`.

    @property
    def native_sum(self) -> tuple[int, int] | None:
        """See `Ranks`."""
        return self.group.native_sum

    def begin(self, tokens: Tensor, view: View) -> None:
        """Sends what the forward reads."""
        self._enter()
        table = view.table
        rows = [span.rows.tolist() for span in view.spans]
        pages = {row: list(table.owned(row)) for each in rows for row in each}
        changed = {row: owned for row, owned in pages.items() if self._pages.get(row, []) != owned}
        self._pages.update(changed)
        spans = [packed(span, own) for span, own in zip(view.spans, rows, strict=True)]
        moved, self._moved = self._moved, []
        self.group.send(Forward(moved, changed, tokens.tolist(), spans))

    def end(self, last: Tensor) -> None:
        """Raises what failed in the forward."""
        self._turn.release()
        self.group.end(last)

    def score(self, last: Tensor) -> None:
        """Sends the hidden states."""
        self._enter()
        self.group.send(Scores(last.contiguous().view(torch.uint8).numpy().tobytes()))

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """See `Ranks`."""
        found = self.group.gather(own, begins)
        self._turn.release()
        return found

    def _enter(self) -> None:
        """Nothing else is computed until the turn is given back.

        It is kept for good where a forward or its message was interrupted: then ranks are no longer at the same place.
        """
        if not self._turn.acquire(blocking=False):
            words = "a forward was interrupted, after which the ranks cannot go on; make a new LLM"
            raise self.group.failure or EngineError(words)

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Goes with the next forward."""
        self._moved.append(Moved(rows.tolist(), starts.tolist(), path.tolist()))


def lead(environment: Mapping[str, str], count: int, *, check: bool) -> Lead:
    """The other ranks, started here unless a launcher has started them; see `join`, which comes first.

    Raises:
        ConfigError: ranks that a launcher started have already been used for another target.
    """
    place = place_of(environment, count)
    if place.launcher and CLOSING:
        raise ConfigError(
            f"{place.launcher} started {place.size} ranks, which compute one target, and this process has made one "
            "already; start a second target as a second job, or start this program without a launcher"
        )
    return Lead(place, check=check)


def _start(place: RankPlace, rank: int, group: RankGroup) -> subprocess.Popen[bytes]:
    """Starts a rank on this host. What it prints goes to standard error, since rank 0's output is the result."""
    own = [str(number) for number in (rank, place.size, group.port)]
    arguments = [sys.executable, "-P", "-m", "sametoken.parallel", *own]
    threads = {
        "SAMETOKEN_RANK_THREADS": str(max(1, torch.get_num_threads() // place.size)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        KEY: group.key,
    }
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, **threads})


def _lost(processes: Mapping[int, subprocess.Popen[bytes]]) -> str | None:
    """Which process has ended, in words."""
    for rank, process in processes.items():
        if (code := process.poll()) is not None:
            how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
            return f"rank {rank} of {len(processes) + 1} has ended {how}; its own messages say why"
    return None


def _close(
    group: RankGroup, processes: Mapping[int, subprocess.Popen[bytes]], turn: threading.Lock, threads: int
) -> None:
    """Lets the other ranks end, ends those that this process started and that do not, and takes their threads back."""
    idle = turn.acquire(timeout=TURN_S)
    if idle and group.failure is None and group.connected:
        group.lost = lambda: None  # they end because they were told to
        with suppress(EngineError):
            group.send(End())
    group.close()
    end = time.monotonic() + (LAST_S if idle and group.connected else 0.0)
    for process in processes.values():
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    torch.set_num_threads(threads)
