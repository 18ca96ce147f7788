"""The ranks of one target as each sees the others: who they are, what rank 0 sends, what all sum, and who is gone.

A sum is made of the parts of all ranks, added in the order of the ranks: a number depends on its own parts alone, not
on how many rows stand beside it. Source of the pattern: Megatron-LM.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import ConfigError, EngineError, SametokenError
from sametoken.kernels.cpu.library import library, status
from sametoken.parallel.gloo import DIST, FOREVER, JOIN_S, Gloo, Transport, first_line
from sametoken.parallel.host import own_cores, reachable, shares_cores
from sametoken.parallel.key import check_proof, own_key, proof
from sametoken.parallel.messages import read
from sametoken.parallel.place import HERE, RankPlace
from sametoken.parallel.shared import MEMORY_SWITCH, SharedMemory
from sametoken.runtime.ranks import NativeExchange

LOG = logging.getLogger("sametoken")
MEET_S = 25.0  # until all ranks have come
PARTING_S = JOIN_S + 2.0  # that rank 0 waits at most for the last words of the others
BEAT_S, SILENT_S = 0.5, 6.0  # between signs of life; without one a rank is taken to hang
LAST_WORDS_S = 1.5  # for whoever waits for a rank that hangs
ENDED = "ended"  # what rank 0 says when it ends
HEADER, SMALL = 8, 4096  # bytes of a message's length, and of a message that needs one transfer


class RankGroup:
    """The ranks of one target.

    Args:
        place: of this process.
        facts: what must be equal on all ranks, by a name that an error may say.
        check: compare a digest of each forward over the ranks; what rank 0 says holds for all.

    Attributes:
        failure: why this group has ended, None while it works.
        on_failure: called once, by whichever thread finds it.
        key: that the others must have too, "" for none.
        sharing: ranks that share cores with this one, itself among them; known when all have come.

    Raises:
        SametokenError: a rank did not come in time.
        ConfigError: the ranks differ in their facts, or one does not have the key of the others.
    """

    def __init__(self, place: RankPlace, facts: dict[str, str], *, check: bool = False) -> None:
        self.place, self._check, self.key = place, check, own_key(place)
        self.failure: EngineError | None = None
        self.on_failure: Callable[[EngineError], object] = lambda error: None
        self.end_rank: Callable[[int], object] = lambda rank: None  # ends the process of a rank that hangs
        self.lost: Callable[[], str | None] = lambda: None  # says which process of ours has ended
        self._server: Any = self._meet()
        self.port = self._server.port
        self._store: Any = DIST.PrefixStore(f"sametoken{place.attempt}", self._server)
        self._facts, self._forwards, self._closing = facts, 0, threading.Event()
        self._gloo: Gloo | None = None
        self._memory: SharedMemory | None = None
        self._small = torch.zeros(SMALL, dtype=torch.uint8)
        self._failing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._waiting = False  # for other ranks, in a collective
        self.sharing, self._one_host = place.here, False
        self._beats: list[bytes] = [b""] * place.size
        self._beats_store = self._store.clone()

    @property
    def connected(self) -> bool:
        """Whether all ranks have come."""
        return self._gloo is not None

    @property
    def transport(self) -> Transport:
        """How the ranks exchange what they compute, once they are connected."""
        found = self._memory or self._gloo
        assert found is not None
        return found

    @property
    def native(self) -> NativeExchange | None:
        """See `Transport`."""
        return self.transport.native

    def _meet(self) -> Any:
        """The store of all ranks, which lives in rank 0's process or in its launcher's."""
        place = self.place
        serves, listening = place.rank == 0 and not place.shared_store, None
        try:
            if not serves:
                place = self.place = reachable(place, MEET_S)
            if serves and place.host == HERE:  # not on every interface of the machine, as the store would
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

    def connect(self) -> None:
        """Waits for all ranks, compares their facts, and opens the connections. Raises as the class says."""
        try:
            self._introduce()
            self._open()
        except SametokenError:
            self._part()
            raise
        except RuntimeError as error:  # of the store
            raise EngineError("rank 0 has ended; its own messages say why") from error

    def _part(self) -> None:
        """As rank 0, which has the store, waits until each of the others has found its own words."""
        end = time.monotonic() + PARTING_S
        with suppress(RuntimeError):
            self._store.set(f"over/{self.place.rank}", "")
            here = [rank for rank in range(self.place.size) if self._store.check([f"about/{rank}"])]
            while self.place.rank == 0 and self.lost() is None and time.monotonic() < end:
                if self._store.check([f"over/{rank}" for rank in here]):
                    return
                time.sleep(0.02)

    def _introduce(self) -> None:
        """Tells the others what this rank is, and hears what they are."""
        place, store = self.place, self._store
        if place.rank == 0:
            store.set("challenge/0", secrets.token_hex(16))
        challenge = self.hear("challenge", 0, MEET_S)
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

    def _open(self) -> None:
        """Opens the connections to the others, and begins to look for signs of life."""
        self._waiting = True
        self._gloo = Gloo(self.place, self._store)
        self._waiting = False
        if self._one_host:
            self._share()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._poll, self._watch)]
        for thread in self._threads:
            thread.start()

    def _share(self) -> None:
        """Shares memory between the ranks of one host, if all of them can."""
        kernels, rank, made = library(), self.place.rank, None
        description = self.hear("memory", 0, MEET_S) if rank else None
        reason = "" if description != "" else "rank 0 has none"
        try:
            if not reason and kernels is not None and os.environ.get(MEMORY_SWITCH) != "off":
                made = SharedMemory(self.place, kernels, description)
            else:
                reason = reason or "it is turned off, or there are no compiled kernels"
        except OSError as error:
            reason = str(error)
        if rank:
            self.say("mapped", reason)
            if self.hear("shared", 0, MEET_S):
                self._memory = made
            return
        self.say("memory", "" if made is None else made.description)
        found = [reason, *(self.hear("mapped", other, MEET_S) for other in range(1, self.place.size))]
        self.say("shared", "" if any(found) else "yes")
        if made is not None:
            made.mapped()
            self._memory = None if any(found) else made
        why = next(filter(None, found), None)
        LOG.info("ranks exchange sums through %s", "memory" if why is None else f"the network (shared memory: {why})")

    # What ranks say to each other beside forwards: rare, and through the store.

    def say(self, key: str, text: str) -> None:
        """Tells all ranks a text."""
        self._store.set(f"{key}/{self.place.rank}", text)

    def said(self, key: str) -> dict[int, str]:
        """What ranks have said by now. Raises EngineError if rank 0 has ended and took the store with it."""
        try:
            found = [rank for rank in range(self.place.size) if self._store.check([f"{key}/{rank}"])]
            return {rank: self._store.get(f"{key}/{rank}").decode() for rank in found}
        except RuntimeError as error:
            raise EngineError("rank 0 has ended") from error

    def store(self, name: str) -> Any:
        """A store for torch.distributed that all ranks share, by a connection of its own."""
        return DIST.PrefixStore(name, self._store.clone())

    def hear(self, key: str, rank: int, seconds: float = FOREVER.total_seconds()) -> str:
        """What a rank said; waits for it. Raises EngineError if the rank is gone, SametokenError after `seconds`."""
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

    # Messages of rank 0.

    def send(self, message: object) -> None:
        """Rank 0 tells the others. Raises EngineError if one is gone."""
        data = torch.frombuffer(bytearray(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
        size = data.numel()
        self._small[:HEADER] = torch.tensor([size]).view(torch.uint8)
        if size <= SMALL - HEADER:
            self._small[HEADER : HEADER + size] = data
        self._collective(lambda way: way.send(self._small))
        if size > SMALL - HEADER:
            self._collective(lambda way: way.send(data))
        if self.failure is not None:
            raise self.failure

    def receive(self) -> Any:
        """What rank 0 sends next; waits for it. Raises EngineError if a rank is gone."""
        self._collective(lambda way: way.send(self._small))
        size = int(self._small[:HEADER].clone().view(torch.int64))
        data = self._small[HEADER : HEADER + size]
        if size > SMALL - HEADER:
            data = torch.empty(size, dtype=torch.uint8)
            self._collective(lambda way: way.send(data))
        if self.failure is not None:
            raise self.failure
        try:
            return read(data.numpy().tobytes())
        except pickle.UnpicklingError as error:
            raise EngineError(f"what came from rank 0 is no message of a rank: {error}") from error

    # A forward.

    def sum(self, partial: Tensor) -> None:
        """See `Ranks`."""
        self._collective(lambda way: way.sum(partial.view(-1)))

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """See `Ranks`."""
        found: list[Tensor] = []
        self._collective(lambda way: found.append(way.gather(own, begins, everywhere=False)))
        if self.failure is not None:
            raise self.failure
        return found[0]

    def share(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """See `Ranks`."""
        found = [own.new_zeros(own.shape[0], begins[-1])]  # where a rank is gone
        self._collective(lambda way: found.append(way.gather(own, begins, everywhere=True)))
        return found[-1]

    def end(self, last: Tensor) -> None:
        """See `Ranks`."""
        self._forwards += 1
        if self._check and self.failure is None:
            self._compare(last)
        if self.failure is not None:
            raise self.failure

    def _compare(self, last: Tensor) -> None:
        digest = torch.tensor([zlib.crc32(last.contiguous().view(torch.uint8).numpy().tobytes())])
        found: list[Tensor] = []
        self._collective(lambda way: found.extend(self._gloo.all(digest) if self._gloo is not None else ()))
        for rank, own in enumerate(found):
            if self.failure is None and not torch.equal(own, found[0]):
                self._fail(
                    f"rank {rank} computed other hidden states than rank 0 in forward {self._forwards}; check that"
                    " both have the same files and kernels"
                )

    def _collective(self, call: Callable[[Transport], object]) -> None:
        """Exchanges something with all ranks; what fails is noted."""
        if self.failure is not None:
            return
        self._waiting = True
        try:
            call(self.transport)
        except RuntimeError as error:
            self._fail(self._reason(error))
        self._waiting = False

    # Who is gone.

    def _fail(self, reason: str) -> None:
        with self._failing:
            if self.failure is not None or self._closing.is_set():
                self.failure = self.failure or EngineError(reason)
                return
            self.failure = EngineError(reason)
        self._stop(hangs=False)
        self.on_failure(self.failure)

    def _reason(self, error: RuntimeError) -> str:
        """Why a collective failed: the process that has ended, or the rank whose signs of life end now."""
        for _ in range(int((SILENT_S + 2) / BEAT_S)):
            if (lost := self.lost()) is not None:
                return lost
            if self.failure is not None:
                return str(self.failure)
            if self._closing.is_set():
                break
            time.sleep(BEAT_S / 2)
        return f"the connection to another rank ended: {first_line(error)}"

    def _poll(self) -> None:
        """Gives signs of life, and reads those of the others; waits where the store does not answer."""
        names = [f"beat/{rank}" for rank in range(self.place.size)]
        while not self._closing.wait(BEAT_S) and self.failure is None:
            try:
                self._beats_store.set(names[self.place.rank], str(time.monotonic_ns()))
                self._beats = [
                    self._beats_store.get(each) if self._beats_store.check([each]) else b"" for each in names
                ]
            except RuntimeError:
                self._fail("rank 0 has ended" if self.place.rank else "the launcher's store has ended")

    def _watch(self) -> None:
        """Looks for signs of life. The store is in rank 0: if one does not answer, nor does the other."""
        last, silent, before = self._beats, [0.0] * self.place.size, time.monotonic()
        while not self._closing.wait(BEAT_S) and self.failure is None:
            if (lost := self.lost()) is not None:
                self._fail(lost)
                return
            # Time in which this process itself was held up counts little: the others may have been held up too.
            now, found = time.monotonic(), self._beats
            passed, before = min(now - before, 2 * BEAT_S), now
            for rank in range(self.place.size):
                moved = found[rank] != last[rank] if found is not last else rank > 0
                silent[rank] = 0.0 if moved or rank == self.place.rank else silent[rank] + passed
            last = found
            gone = next((rank for rank, seconds in enumerate(silent) if seconds > SILENT_S), None)
            if gone is not None:
                self._hangs(gone)

    def _hangs(self, rank: int) -> None:
        """A rank does not answer: ends what waits for it, if need be with this process."""
        self._fail(f"rank {rank} of {self.place.size} has given no sign of life for {SILENT_S:g} s")
        self.end_rank(rank)
        self._stop(hangs=True)
        if self._waiting and not self._closing.wait(LAST_WORDS_S) and self._waiting:
            print(f"error: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)

    def _stop(self, *, hangs: bool) -> None:
        """Ends what waits for a rank that is gone."""
        for way in (self._memory, self._gloo):
            if way is not None:
                way.stop(hangs=hangs)

    def close(self) -> None:
        """Lets go of the others and of the connections; what the others send is not waited for.

        Threads of torch that are there when the interpreter ends would abort the process.
        """
        self._closing.set()
        self._stop(hangs=False)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(BEAT_S)
        self._gloo = self._beats_store = self._store = self._server = None


def facts() -> dict[str, str]:
    """What all ranks must have alike."""
    kernels = status().variant or "none"
    return {"sametoken": version("sametoken"), "torch": torch.__version__, "compiled kernels": kernels}
