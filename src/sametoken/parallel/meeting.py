"""Rendezvous of the ranks through a store: discovery, check of equal facts, and rare messages.

The store is in the process of rank 0 or of the launcher. A rank proves that it has the shared secret without sending
it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch

from sametoken.errors import ConfigError, EngineError, SametokenError
from sametoken.kernels.cpu.variant import status
from sametoken.parallel.gloo import DIST, FOREVER, JOIN_S, first_line
from sametoken.parallel.host import own_cores, reachable, shares_cores
from sametoken.parallel.place import HERE, RankPlace

KEY = "SAMETOKEN_RANK_KEY"  # environment variable, since command lines are public
MEET_S = 25.0  # until all ranks have connected
PARTING_S = JOIN_S + 2.0  # time limit of rank 0 for the last messages of the others


def own_key(place: RankPlace) -> str:
    """Key of this rank: from the environment, or a new one for a rank 0 that starts the others."""
    stated = os.environ.get(KEY, "")
    return stated or (secrets.token_hex(16) if place.rank == 0 and not place.launcher else "")


def proof(key: str, challenge: str, rank: int) -> str:
    """Proof that a rank has the key, valid for this rank and run only."""
    return hmac.new(key.encode(), f"{challenge}/{rank}".encode(), hashlib.sha256).hexdigest()


def check_proof(key: str, challenge: str, rank: int, found: object) -> None:
    """Raise ConfigError if a rank has another key or none."""
    if not isinstance(found, str) or not hmac.compare_digest(found.encode(), proof(key, challenge, rank).encode()):
        raise ConfigError(
            f"rank {rank} has another {KEY} than this rank, or one of them has none; set it to the same secret for all "
            f"ranks, with mpirun by -x {KEY}, or for none of them"
        )


class Rendezvous:
    """Ranks of one target during and after their rendezvous.

    Args:
        place: place of this process.
        facts: values that must be equal on all ranks, by a name for error messages.
        check: compare a digest of each forward over the ranks; the value of rank 0 applies to all.

    Attributes:
        failure: error that has ended these ranks, None while they work.
        key: shared secret of all ranks, "" for none.
        port: port of the store.
        sharing: number of ranks that share cores with this one, itself included; set when all are connected.

    Raises:
        SametokenError: a rank did not connect in time.
    """

    def __init__(self, place: RankPlace, facts: dict[str, str], *, check: bool = False) -> None:
        self.place, self._facts, self._check, self.key = place, facts, check, own_key(place)
        self.failure: EngineError | None = None
        self.lost: Callable[[], str | None] = lambda: None  # message about an own process that has ended
        self._server: Any = self._meet()
        self.port = self._server.port
        self._store: Any = DIST.PrefixStore(f"sametoken{place.attempt}", self._server)
        self.sharing, self._one_host = place.here, False

    def _meet(self) -> Any:
        """Connect to the store of all ranks, in the process of rank 0 or of the launcher."""
        place = self.place
        serves, listening = place.rank == 0 and not place.shared_store, None
        try:
            if not serves:
                place = self.place = reachable(place, MEET_S)
            if serves and place.host == HERE:  # not on every interface of the machine, the store's default
                with socket.create_server((place.host, place.port)) as bound:
                    listening, place = bound.dup().detach(), place._replace(port=bound.getsockname()[1])
            return DIST.TCPStore(
                place.host, place.port, None, serves, timeout=timedelta(seconds=MEET_S), wait_for_workers=False,
                master_listen_fd=listening,
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            if place.rank == 0 and not place.shared_store:
                raise SametokenError(
                    f"rank 0 cannot listen on port {place.port} of {place.host} ({first_line(error)}); set MASTER_PORT"
                    " to a free port, and MASTER_ADDR to an address of rank 0's host"
                ) from error
            raise SametokenError(
                f"rank {place.rank} does not reach rank 0 at {place.host}:{place.port} within {MEET_S:g} s; check "
                "that rank 0 has started, and that MASTER_ADDR and MASTER_PORT name its host and a port that is open"
            ) from error

    def _introduce(self) -> None:
        """Publish the facts of this rank and read those of the others."""
        place, store = self.place, self._store
        if place.rank == 0:
            store.set("challenge/0", secrets.token_hex(16))
        challenge = self.wait_for("challenge", 0, MEET_S)
        about = self._facts, self._check, own_cores(), proof(self.key, challenge, place.rank)
        store.set(f"about/{place.rank}", json.dumps(about))
        for rank in range(place.size):
            self._wait(f"about/{rank}", rank, MEET_S, "did not come")
        known = [json.loads(store.get(f"about/{rank}")) for rank in range(place.size)]
        (first, self._check, *_), *_ = known
        for rank, (own, _, _, found) in enumerate(known):
            check_proof(self.key, challenge, rank, found)
            for name, value in first.items():
                if own.get(name) != value:
                    raise ConfigError(
                        f"rank {rank} has {name} {own.get(name)} and rank 0 has {value}; start all ranks with the same"
                    )
        self.sharing = sum(shares_cores(known[place.rank][2], cores) for _, _, cores, _ in known)
        self._one_host = len({host for _, _, (host, _), _ in known}) == 1

    def _part(self) -> None:
        """On rank 0, which hosts the store, wait until each other rank has read its message."""
        end = time.monotonic() + PARTING_S
        with suppress(RuntimeError):
            self._store.set(f"over/{self.place.rank}", "")
            here = [rank for rank in range(self.place.size) if self._store.check([f"about/{rank}"])]
            while self.place.rank == 0 and self.lost() is None and time.monotonic() < end:
                if self._store.check([f"over/{rank}" for rank in here]):
                    return
                time.sleep(0.02)

    # Messages other than forwards, which are rare.

    def publish(self, key: str, text: str) -> None:
        """Publish a text under a key, for all ranks."""
        self._store.set(f"{key}/{self.place.rank}", text)

    def published(self, key: str) -> dict[int, str]:
        """Texts that ranks have published so far. Raises EngineError if rank 0 has ended and the store with it."""
        try:
            found = [rank for rank in range(self.place.size) if self._store.check([f"{key}/{rank}"])]
            return {rank: self._store.get(f"{key}/{rank}").decode() for rank in found}
        except RuntimeError as error:
            raise EngineError("rank 0 has ended") from error

    def store(self, name: str) -> Any:
        """Store for torch.distributed that all ranks share, on a separate connection."""
        return DIST.PrefixStore(name, self._store.clone())

    def wait_for(self, key: str, rank: int, seconds: float = FOREVER.total_seconds()) -> str:
        """Wait for the text of a rank. Raises EngineError if the rank is lost, SametokenError after `seconds`."""
        self._wait(f"{key}/{rank}", rank, seconds, f"did not answer ({key})")
        return str(self._store.get(f"{key}/{rank}").decode())

    def _wait(self, key: str, rank: int, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while True:
            if self.failure is not None:
                raise self.failure
            if (lost := self.lost()) is not None:
                raise EngineError(lost)
            try:
                if self._store.check([key]):
                    return
            except RuntimeError as error:
                raise EngineError("rank 0 has ended") from error
            if time.monotonic() > end:
                raise SametokenError(
                    f"rank {rank} of {self.place.size} {what} within {seconds:g} s; look at its own messages"
                )
            time.sleep(0.02)


def facts() -> dict[str, str]:
    """Facts that must be equal on all ranks."""
    kernels = status().variant or "none"
    return {"sametoken": version("sametoken"), "torch": torch.__version__, "compiled kernels": kernels}
