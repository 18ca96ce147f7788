"""Rank 0's side: starts the other ranks, tells them what to load, and ends them.

Everything above the models (requests, schedule, verification, clocks) is on rank 0 alone.
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

from sametoken.errors import ConfigError, EngineError
from sametoken.parallel.group import ENDED, RankGroup
from sametoken.parallel.host import own_cores
from sametoken.parallel.key import KEY
from sametoken.parallel.meeting import facts
from sametoken.parallel.messages import Cache, End, Models
from sametoken.parallel.place import RankPlace, place_of
from sametoken.parallel.sending import LeadingRank, Sending

LOG = logging.getLogger("sametoken")
TURN_S, LAST_S = 1.0, 5.0  # until the forward that runs has ended, and that the others have to end
LOAD_S = 3600.0
CLOSING: list[Callable[[], object]] = []  # what lets the other ranks of this process's targets end


class Lead:
    """The other ranks of a target, as rank 0 has them.

    Args:
        place: of this process, rank 0.
        check: compare a digest of each forward over the ranks.

    Attributes:
        target, draft: what the models join, the draft model if it is cut too.

    Raises:
        SametokenError: a rank did not come, or is another version.
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
            digests: of the models' files here.

        Raises:
            ConfigError: a rank has other files.
        """
        self.group.send(models)
        for key, wanted, digest in zip(models._fields, models, digests, strict=False):
            for rank in range(1, self.place.size):
                if wanted and (found := self.group.hear(key, rank, LOAD_S)) not in (digest, ""):
                    raise ConfigError(
                        f"rank {rank} has other files of {wanted.model} than rank 0 (digests {found[:12]} and "
                        f"{digest[:12]}); copy the same checkpoint to all hosts"
                    )

    def loaded(self) -> None:
        """Wait until all ranks have their weights. Raises ConfigError with what one of them says."""
        for rank in range(1, self.place.size):
            if words := self.group.hear("loaded", rank, LOAD_S):
                raise ConfigError(f"rank {rank}: {words}")

    def hold(self, cache: Cache) -> None:
        """The others make their caches."""
        self.group.send(cache)


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
    """Start a rank on this host. What it prints goes to standard error, since rank 0's output is the result."""
    own = [str(number) for number in (rank, place.size, group.port)]
    arguments = [sys.executable, "-P", "-m", "sametoken.parallel", *own]
    threads = {
        "SAMETOKEN_RANK_THREADS": str(max(1, torch.get_num_threads() // place.size)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        KEY: group.key,
    }
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, **threads})


def _lost(processes: Mapping[int, subprocess.Popen[bytes]]) -> str | None:
    """Words for the process that has ended."""
    for rank, process in processes.items():
        if (code := process.poll()) is not None:
            how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
            return f"rank {rank} of {len(processes) + 1} has ended {how}; its own messages say why"
    return None


def _close(
    group: RankGroup, processes: Mapping[int, subprocess.Popen[bytes]], turn: threading.Lock, threads: int
) -> None:
    """End the other ranks, kill those that this process started and that do not end, and restore this process's
    threads.
    """
    idle = turn.acquire(timeout=TURN_S)
    if idle and group.failure is None and group.connected:
        group.lost = lambda: None  # they end because they were told to
        with suppress(EngineError, RuntimeError):
            group.say(ENDED, "")
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
