"""Communication of the ranks of one target: messages of rank 0, collectives, and the failure that ends all ranks.

The parts of a sum are added in the order of the ranks, so a number does not depend on the number of rows. Source of the
pattern: Megatron-LM.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import EngineError, SametokenError
from sametoken.kernels.cpu.variant import library
from sametoken.parallel.gloo import Gloo, Transport, first_line
from sametoken.parallel.heartbeats import BEAT_S, SILENT_S, Heartbeats
from sametoken.parallel.meeting import MEET_S, Rendezvous
from sametoken.parallel.messages import read
from sametoken.parallel.place import RankPlace
from sametoken.parallel.shared import MEMORY_SWITCH, SharedMemory
from sametoken.runtime.ranks import NativeExchange

LOG = logging.getLogger("sametoken")
LAST_WORDS_S = 1.5  # time limit for calls that wait for a hanging rank
ENDED = "ended"  # key of rank 0's end message
HEADER, SMALL = 8, 4096  # bytes of the length of a message, and of a message that takes one transfer


class RankGroup(Rendezvous):
    """Connected ranks of one target, see `Rendezvous`.

    Attributes:
        on_failure: called once, by the thread that detects the failure of the group.

    Raises:
        SametokenError: a rank did not connect in time.
        ConfigError: the facts of the ranks differ, or a rank has another key.
    """

    def __init__(self, place: RankPlace, facts: dict[str, str], *, check: bool = False) -> None:
        super().__init__(place, facts, check=check)
        self.on_failure: Callable[[EngineError], object] = lambda error: None
        self.end_rank: Callable[[int], object] = lambda rank: None  # ends the process of a hanging rank
        self._forwards, self._closing = 0, threading.Event()
        self._gloo: Gloo | None = None
        self._memory: SharedMemory | None = None
        self._heartbeats: Heartbeats | None = None
        self._small = torch.zeros(SMALL, dtype=torch.uint8)
        self._failing = threading.Lock()
        self._waiting = False  # time waited for other ranks in collectives

    @property
    def connected(self) -> bool:
        """True if all ranks have connected."""
        return self._gloo is not None

    @property
    def transport(self) -> Transport:
        """Transport of the connected ranks."""
        found = self._memory or self._gloo
        assert found is not None
        return found

    @property
    def native(self) -> NativeExchange | None:
        """Implement `Transport.native`."""
        return self.transport.native

    def connect(self) -> None:
        """Wait for all ranks, compare their facts, and open the connections. Raises the errors of the class."""
        try:
            self._introduce()
            self._open()
        except SametokenError:
            self._part()
            raise
        except RuntimeError as error:  # errors of the store
            raise EngineError("rank 0 has ended; its own messages say why") from error

    def _open(self) -> None:
        """Open the connections to the other ranks, and start the heartbeats."""
        self._waiting = True
        self._gloo = Gloo(self.place, self._store)
        self._waiting = False
        if self._one_host:
            self._share()
        self._heartbeats = Heartbeats(self.place, self._store.clone(), lambda: self.lost(), self._fail, self._hangs)

    def _share(self) -> None:
        """Set up shared memory between the ranks of one host, if all ranks support it."""
        kernels, rank, made = library(), self.place.rank, None
        description = self.wait_for("memory", 0, MEET_S) if rank else None
        reason = "" if description != "" else "rank 0 has none"
        try:
            if not reason and kernels is not None and os.environ.get(MEMORY_SWITCH) != "off":
                made = SharedMemory(self.place, kernels, description)
            else:
                reason = reason or "it is turned off, or there are no compiled kernels"
        except OSError as error:
            reason = str(error)
        if rank:
            self.publish("mapped", reason)
            if self.wait_for("shared", 0, MEET_S):
                self._memory = made
            return
        self.publish("memory", "" if made is None else made.description)
        found = [reason, *(self.wait_for("mapped", other, MEET_S) for other in range(1, self.place.size))]
        self.publish("shared", "" if any(found) else "yes")
        if made is not None:
            made.mapped()
            self._memory = None if any(found) else made
        why = next(filter(None, found), None)
        LOG.info("ranks exchange sums through %s", "memory" if why is None else f"the network (shared memory: {why})")

    # Messages of rank 0.

    def send(self, message: object) -> None:
        """Send a message of rank 0 to the other ranks. Raises EngineError if a rank is lost."""
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
        """Wait for the next message of rank 0. Raises EngineError if a rank is lost."""
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
        """Implement `Ranks.sum`."""
        self._collective(lambda way: way.sum(partial.view(-1)))

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """Implement `Ranks.gather`."""
        found: list[Tensor] = []
        self._collective(lambda way: found.append(way.gather(own, begins, everywhere=False)))
        if self.failure is not None:
            raise self.failure
        return found[0]

    def share(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """Implement `Ranks.share`."""
        found = [own.new_zeros(own.shape[0], begins[-1])]  # if a rank is lost
        self._collective(lambda way: found.append(way.gather(own, begins, everywhere=True)))
        return found[-1]

    def end(self, last: Tensor) -> None:
        """Implement `Ranks.end`."""
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
        """Perform a collective call; record a failure."""
        if self.failure is not None:
            return
        self._waiting = True
        try:
            call(self.transport)
        except RuntimeError as error:
            self._fail(self._reason(error))
        self._waiting = False

    # Lost ranks.

    def _fail(self, reason: str) -> None:
        with self._failing:
            if self.failure is not None or self._closing.is_set():
                self.failure = self.failure or EngineError(reason)
                return
            self.failure = EngineError(reason)
        self._stop(hangs=False)
        self.on_failure(self.failure)

    def _reason(self, error: RuntimeError) -> str:
        """Reason for a failed collective: the process that has ended, or the rank whose heartbeats stop."""
        for _ in range(int((SILENT_S + 2) / BEAT_S)):
            if (lost := self.lost()) is not None:
                return lost
            if self.failure is not None:
                return str(self.failure)
            if self._closing.is_set():
                break
            time.sleep(BEAT_S / 2)
        return f"the connection to another rank ended: {first_line(error)}"

    def _hangs(self, rank: int) -> None:
        """Abort calls that wait for a hanging rank, if necessary by ending this process."""
        self._fail(f"rank {rank} of {self.place.size} has given no sign of life for {SILENT_S:g} s")
        self.end_rank(rank)
        self._stop(hangs=True)
        if self._waiting and not self._closing.wait(LAST_WORDS_S) and self._waiting:
            print(f"error: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)

    def _stop(self, *, hangs: bool) -> None:
        """Abort calls that wait for a lost rank."""
        for way in (self._memory, self._gloo):
            if way is not None:
                way.stop(hangs=hangs)

    def close(self) -> None:
        """Close the connections to the other ranks, without waiting for their messages.

        Running threads of torch would abort the process at the end of the interpreter.
        """
        self._closing.set()
        self._stop(hangs=False)
        if self._heartbeats is not None:
            self._heartbeats.end()
        self._gloo = self._heartbeats = self._store = self._server = None
