"""Rank 0: starts the other ranks, sends them the models to load, and ends them.

All layers above the models (requests, schedule, verification, clocks) are on rank 0 alone.
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
TURN_S, LAST_S = 1.0, 5.0  # for the running forward, and for the other ranks to end
LOAD_S = 3600.0
CLOSING: list[Callable[[], object]] = []  # functions that end the other ranks of this process's targets


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
