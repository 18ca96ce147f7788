"""Processes of a run: connection, check of equal settings, and detection of failed processes.

A process that fails publishes its error; a process that is killed or hangs stops sending heartbeats. In both cases the
others end within seconds, with an error that names the process.
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

LOOKS_S = 0.25  # polling interval
FOUND_S = 9.0  # time limit to find the reason of a failed collective; longer than the timeout of heartbeats
RAISES_S = 2.0  # time for a computation to end by itself after another process has ended
LEAVES_S = 5.0  # time that rank 0, which may host the store, waits for the others to read its error
ENDED, LEARNED = "ended", "learned"


class Processes:
    """Processes started by torchrun, accelerate or mpirun; initialises torch.distributed.

    Args:
        place: place of this process.
        device: device of this process.
        alike: values that must be equal in all processes, by a name for error messages.

    Raises:
        SametokenError: a process did not connect in time, or cannot be reached.
        ConfigError: the processes have different values.
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
            os.environ[INTERFACES] = name  # torch.distributed would choose the interface of the host's name
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        torch.distributed.init_process_group(
            backend, store=self._group.store("run"), rank=place.rank, world_size=place.size, timeout=FOREVER
        )

    def require_equal(self, name: str, value: str) -> None:
        """Raise ConfigError in every process unless all pass the same value."""
        found: list[str] = [""] * self.place.size
        torch.distributed.all_gather_object(found, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ConfigError(f"rank {rank} has {name} {other} and rank 0 has {found[0]}; give all ranks the same")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of collective work; an error in one process ends the others.

        Raises:
            SametokenError: another process has ended; the message includes its error.
        """
        try:
            yield
        except BaseException as error:
            self._ending.set()
            failed = isinstance(error, RuntimeError)  # raised by failed collectives
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
        """Message about the process that has ended, found within a time limit; None if none has ended."""
        end = time.monotonic() + FOUND_S
        while (words := self._gone()) is None and time.monotonic() < end:
            time.sleep(LOOKS_S)
        return words

    def _gone(self) -> str | None:
        """Message about a process that has ended, None if none is known; a lost store counts as an ended process."""
        if self._group.failure is not None:
            return _named(self._group.failure)
        try:
            for rank, reason in self._group.published(ENDED).items():
                if rank != self.place.rank:
                    return f"rank {rank} of {self.place.size} has ended: {reason}"
        except EngineError as error:
            return _named(error)
        return None

    def _watch(self) -> None:
        """Poll for messages of ended processes."""
        while not self._ending.wait(LOOKS_S):
            if (words := self._gone()) is not None:
                self._end(words, awaited=self._group.failure is None)

    def _end(self, words: str, *, awaited: bool = False) -> None:
        """End this process, whose computation waits for an ended one; `awaited`: acknowledge its message first."""
        if self._ending.wait(RAISES_S):
            return
        print(f"error: {words}", file=sys.stderr, flush=True)
        if awaited:
            self._tell(LEARNED, words)
        os._exit(2)  # the exit code of errors

    def _tell(self, key: str, words: str) -> None:
        with suppress(RuntimeError):  # the store is lost
            self._group.publish(key, words)

    def _leave(self) -> None:
        """Close the connections; on rank 0 after a limited wait for the others to read an error."""
        self._watcher.join()
        end = time.monotonic() + LEAVES_S
        with suppress(SametokenError):
            while self.place.rank == 0 and time.monotonic() < end and self._group.published(ENDED):
                if len({*self._group.published(ENDED), *self._group.published(LEARNED)}) == self.place.size:
                    break
                time.sleep(LOOKS_S)
        self._group.close()


def _named(error: Exception) -> str:
    return f"{error}; its own messages say why"
