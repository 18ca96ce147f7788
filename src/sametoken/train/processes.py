"""The processes of a run: how they meet, the check that they were started alike, and the end of one of them.

A process that ends with an error tells the others why. One that is killed or hangs shows no sign of life. Either way
the others end within seconds, with an error that names it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version

import torch

from sametoken.errors import ConfigError, EngineError, SametokenError
from sametoken.parallel.gloo import FOREVER, INTERFACES
from sametoken.parallel.group import RankGroup
from sametoken.parallel.host import interface_of, own_address
from sametoken.parallel.place import RankPlace

LOOKS_S = 0.25  # between looks at the others
FOUND_S = 9.0  # in which the reason of a failed collective is known: longer than a silent process is waited for
RAISES_S = 2.0  # that a computation has to end by itself, since it knows that another process has ended
LEAVES_S = 5.0  # that rank 0, which may have the store, waits for the others to learn why it ends
ENDED, LEARNED = "ended", "learned"


class Processes:
    """The processes that torchrun, accelerate or mpirun started; torch.distributed works among them afterwards.

    Args:
        place: of this process.
        device: where it computes.
        alike: what must be equal in all of them, by a name that an error may say.

    Raises:
        SametokenError: a process did not come in time, or is not reached.
        ConfigError: the processes differ.
    """

    def __init__(self, place: RankPlace, device: torch.device, alike: Mapping[str, str]) -> None:
        versions = {"sametoken": version("sametoken"), "torch": torch.__version__, "device": device.type}
        self.place, self._group = place, RankGroup(place, {**versions, **alike})
        self._group.connect()
        self._ending = threading.Event()
        self._group.on_failure = lambda error: self._end(_named(error))
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        if INTERFACES not in os.environ and (name := interface_of(own_address(self._group.place))):
            os.environ[INTERFACES] = name  # torch.distributed would take the interface of the host's name
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        torch.distributed.init_process_group(
            backend, store=self._group.store("run"), rank=place.rank, world_size=place.size, timeout=FOREVER
        )

    def require_equal(self, name: str, value: str) -> None:
        """Raise ConfigError in every process if they do not all give the same value."""
        found: list[str] = [""] * self.place.size
        torch.distributed.all_gather_object(found, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ConfigError(f"rank {rank} has {name} {other} and rank 0 has {found[0]}; give all ranks the same")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of work that all processes share; an error in one ends the others.

        Raises:
            SametokenError: another process has ended; its own error is part of the message.
        """
        try:
            yield
        except BaseException as error:
            self._ending.set()
            failed = isinstance(error, RuntimeError)  # as collectives fail
            words = self._found() if failed else None
            self._tell(LEARNED if words else ENDED, str(error) or type(error).__name__)
            self._leave()
            if words:
                raise SametokenError(words) from error
            raise
        torch.distributed.barrier()
        self._ending.set()
        torch.distributed.destroy_process_group()
        self._leave()

    def _found(self) -> str | None:
        """Process that has ended, after some time in which that is found out; None if none has."""
        end = time.monotonic() + FOUND_S
        while (words := self._gone()) is None and time.monotonic() < end:
            time.sleep(LOOKS_S)
        return words

    def _gone(self) -> str | None:
        """Process that has ended as far as is known, and why; the store does not answer where a network is gone."""
        if self._group.failure is not None:
            return _named(self._group.failure)
        try:
            for rank, reason in self._group.said(ENDED).items():
                if rank != self.place.rank:
                    return f"rank {rank} of {self.place.size} has ended: {reason}"
        except EngineError as error:
            return _named(error)
        return None

    def _watch(self) -> None:
        """Look for what the others say when they end."""
        while not self._ending.wait(LOOKS_S):
            if (words := self._gone()) is not None:
                self._end(words, awaited=self._group.failure is None)

    def _end(self, words: str, *, awaited: bool = False) -> None:
        """End this process, whose computation waits for one that is gone. `awaited`: that one waits for it."""
        if self._ending.wait(RAISES_S):
            return
        print(f"error: {words}", file=sys.stderr, flush=True)
        if awaited:
            self._tell(LEARNED, words)
        os._exit(2)  # as an error that this process had met itself

    def _tell(self, key: str, words: str) -> None:
        with suppress(RuntimeError):  # the store is gone
            self._group.say(key, words)

    def _leave(self) -> None:
        """Close the connections, on rank 0 after a limited wait until the other processes have read of an error."""
        self._watcher.join()
        end = time.monotonic() + LEAVES_S
        with suppress(SametokenError):
            while self.place.rank == 0 and time.monotonic() < end and self._group.said(ENDED):
                if len({*self._group.said(ENDED), *self._group.said(LEARNED)}) == self.place.size:
                    break
                time.sleep(LOOKS_S)
        self._group.close()


def _named(error: Exception) -> str:
    return f"{error}; its own messages say why"
