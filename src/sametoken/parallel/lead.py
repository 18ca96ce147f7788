"""Rank 0: starts the other ranks, sends them the models to load and a message before each computation, and ends them.

A message has tokens, places, and changes of the caches since the last one. The other ranks have no other state of the
engine, so that states cannot diverge. All layers above the models (requests, schedule, verification, clocks) are on
rank 0 alone.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from sametoken.errors import ConfigError, EngineError
from sametoken.parallel.group import ENDED, RankGroup
from sametoken.parallel.host import own_cores
from sametoken.parallel.meeting import KEY, facts
from sametoken.parallel.messages import (
    Cache,
    ChainsOfGuesses,
    Changes,
    End,
    Forward,
    Models,
    Moved,
    Scores,
    draws_of,
    packed,
)
from sametoken.parallel.place import RankPlace, place_of
from sametoken.runtime.cache import PageTable, View
from sametoken.runtime.ranks import NativeExchange
from sametoken.speculation.rows import Sampling

LOG = logging.getLogger("sametoken")
TURN_S, LAST_S = 1.0, 5.0  # for the running forward, and for the other ranks to end
LOAD_S = 3600.0
CLOSING: list[Callable[[], object]] = []  # functions that end the other ranks of this process's targets


class Sending:
    """Sender shared by the models of rank 0, which compute one at a time with one page table.

    Attributes:
        turn: lock held during a computation.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group, self.turn = group, threading.Lock()
        self.moved: list[Moved] = []
        self._pages: dict[int, list[int]] = {}  # pages of rows in the other ranks

    def enter(self) -> None:
        """Acquire the turn, which excludes other computations until its release.

        An interrupted forward or message never releases the turn, since the ranks are no longer in step.
        """
        if not self.turn.acquire(blocking=False):
            words = "a forward was interrupted, after which the ranks cannot go on; make a new LLM"
            raise self.group.failure or EngineError(words)

    def changes(self, table: PageTable, rows: Iterable[int]) -> Changes:
        """Unsent changes of the caches for `rows` of the next computation."""
        pages = {row: list(table.owned(row)) for row in rows}
        changed = {row: owned for row, owned in pages.items() if self._pages.get(row, []) != owned}
        self._pages.update(changed)
        moved, self.moved = self.moved, []
        return Changes(moved, changed)


class LeadingRank:
    """`Ranks` of a model on rank 0.

    Args:
        sending: sender of all models.
        model: number of the model, see `Models`.
    """

    def __init__(self, sending: Sending, model: int) -> None:
        self._sending, self._group, self._model = sending, sending.group, model
        self.sum, self.share = self._group.sum, self._group.share

    @property
    def native(self) -> NativeExchange | None:
        """Implement `Ranks.native`."""
        return self._group.native

    def begin(self, tokens: Tensor, view: View) -> None:
        """Send the inputs of the forward."""
        self._sending.enter()
        rows = [span.rows.tolist() for span in view.spans]
        changes = self._sending.changes(view.table, (row for each in rows for row in each))
        spans = [packed(span, own) for span, own in zip(view.spans, rows, strict=True)]
        self._group.send(Forward(self._model, changes, tokens.tolist(), spans))

    def begin_chains(
        self, table: PageTable, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]],
        skipped: Sequence[int], levels: int, sampling: Sampling,
    ) -> None:  # fmt: skip
        """Send the inputs of the drafting."""
        self._sending.enter()
        changes, read = self._sending.changes(table, rows), [list(each) for each in tokens]
        self._group.send(
            ChainsOfGuesses(
                self._model, changes, list(rows), list(starts), read, list(skipped), levels, draws_of(sampling)
            )
        )

    def end(self, last: Tensor) -> None:
        """Raise the error of a failed forward."""
        self._sending.turn.release()
        self._group.end(last)

    def score(self, last: Tensor) -> None:
        """Send the hidden states."""
        self._sending.enter()
        self._group.send(Scores(self._model, last.contiguous().view(torch.uint8).numpy().tobytes()))

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """Implement `Ranks.gather`."""
        found = self._group.gather(own, begins)
        self._sending.turn.release()
        return found

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Queue the committed nodes for the next message."""
        self._sending.moved.append(Moved(self._model, rows.tolist(), starts.tolist(), path.tolist()))


class Lead:
    """Handle of rank 0 on the other ranks of a target.

    Args:
        place: place of this process, rank 0.
        check: compare a digest of each forward over the ranks.

    Attributes:
        target, draft: `Ranks` for the target, and for a draft model that is divided too.

    Raises:
        SametokenError: a rank did not connect, or has another version.
    """

    def __init__(self, place: RankPlace, *, check: bool) -> None:
        self.place = place
        threads = torch.get_num_threads()
        self.group = RankGroup(place, facts(), check=check)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        if not place.launcher:
            self.processes = {rank: _start(place, rank, self.group) for rank in range(1, place.size)}
        processes = self.processes
        self.group.lost = lambda: _lost(processes)
        self.group.end_rank = lambda rank: processes[rank].kill() if rank in processes else None
        sending = Sending(self.group)
        self.target, self.draft = LeadingRank(sending, 0), LeadingRank(sending, 1)
        self.close = weakref.finalize(self, _close, self.group, self.processes, sending.turn, threads)
        CLOSING.append(self.close)
        self.group.connect()
        torch.set_num_threads(max(1, threads // self.group.sharing))
        if words := place.bound(os.environ, len(own_cores()[1])):
            LOG.warning(words)

    def load(self, models: Models, digests: Sequence[str]) -> None:
        """Send the models to load to the other ranks, and check that their files are equal.

        Args:
            digests: digests of the models' files on this host.

        Raises:
            ConfigError: a rank has other files.
        """
        self.group.send(models)
        for key, wanted, digest in zip(models._fields, models, digests, strict=False):
            for rank in range(1, self.place.size):
                if wanted and (found := self.group.wait_for(key, rank, LOAD_S)) not in (digest, ""):
                    raise ConfigError(
                        f"rank {rank} has other files of {wanted.model} than rank 0 (digests {found[:12]} and "
                        f"{digest[:12]}); copy the same checkpoint to all hosts"
                    )

    def loaded(self) -> None:
        """Wait until all ranks have loaded their weights. Raises ConfigError with the error of a rank."""
        for rank in range(1, self.place.size):
            if words := self.group.wait_for("loaded", rank, LOAD_S):
                raise ConfigError(f"rank {rank}: {words}")

    def hold(self, cache: Cache) -> None:
        """Make the other ranks allocate their KV caches."""
        self.group.send(cache)


def lead(environment: Mapping[str, str], count: int, *, check: bool) -> Lead:
    """Connect the other ranks, starting them unless a launcher has; call `join` first.

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
    """Start a rank on this host. Its output goes to standard error, since rank 0's standard output is the result."""
    own = [str(number) for number in (rank, place.size, group.port)]
    arguments = [sys.executable, "-P", "-m", "sametoken.parallel", *own]
    threads = {
        "SAMETOKEN_RANK_THREADS": str(max(1, torch.get_num_threads() // place.size)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        KEY: group.key,
    }
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, **threads})


def _lost(processes: Mapping[int, subprocess.Popen[bytes]]) -> str | None:
    """Message about a process that has ended, None if none has."""
    for rank, process in processes.items():
        if (code := process.poll()) is not None:
            how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
            return f"rank {rank} of {len(processes) + 1} has ended {how}; its own messages say why"
    return None


def _close(
    group: RankGroup, processes: Mapping[int, subprocess.Popen[bytes]], turn: threading.Lock, threads: int
) -> None:
    """End the other ranks, kill own ones that do not end, and restore the number of threads of this process."""
    idle = turn.acquire(timeout=TURN_S)
    if idle and group.failure is None and group.connected:
        group.lost = lambda: None  # their end is expected
        with suppress(EngineError, RuntimeError):
            group.publish(ENDED, "")
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
