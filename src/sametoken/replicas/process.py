"""Replica: its process, from start to end, and its open requests.

The process reads its task from standard input, which stays open: end of file means that the front has ended. The
process prints one line of JSON: either that it serves, or its error.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sametoken.errors import EngineError
from sametoken.options.server import ServerConfig
from sametoken.replicas.merging import ReplicaState
from sametoken.replicas.routing import Candidate, PrefixMemory, RoutedPrompt

if TYPE_CHECKING:
    from sametoken.engine.llm import LLM

CLOSE_S = 2.0  # for a process to end after the front has closed its input


class Work(NamedTuple):
    """Task of a new process.

    Attributes:
        open: function that opens the engine of the replica with a given number; pickled by name.
        number: number of the replica.
        socket: path of the socket at which it listens.
        config, info: arguments of `server.run.serve`.
    """

    open: Callable[[int], LLM]
    number: int
    socket: str
    config: ServerConfig
    info: Mapping[str, Any]


class Replica:
    """Handle of the front on a replica.

    Args:
        work: task of its process.

    Attributes:
        status: "ready" (accepts requests), "starting" (loads) or "ended" (has no process).
        said: report of the process when it was ready: method, cache_tokens.
        restarts: number of restarts.
        sequences: number of open sequences.
        unread: bytes of their prompts that are not in the KV cache yet.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self.number, self.socket = work.number, work.socket
        self.status: Literal["ready", "starting", "ended"] = "ended"
        self.said: dict[str, Any] = {}
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._memory = PrefixMemory(0)
        self.sequences = self.unread = 0

    async def start(self) -> None:
        """Start a process and wait until it serves.

        Raises:
            EngineError: the process failed; the message has the reason.
        """
        self.status = "starting"
        try:
            self.said = await self._begin()
        except (OSError, TypeError, ValueError) as why:  # no process, or its report is no line of JSON
            self.send(signal.SIGKILL)
            self.said = {"error": f"replica {self.number} cannot be started: {why}"}
        if error := self.said.get("error"):
            self.status = "ended"
            raise EngineError(error)
        reused = self._work.info["kv_cache"]["enable_block_reuse"]
        self._memory = PrefixMemory(self.said["cache_tokens"] if reused else 0)
        self.status = "ready"

    async def _begin(self) -> dict[str, Any]:
        """Start a process and return its report. Raises OSError, TypeError, ValueError."""
        pipe = asyncio.subprocess.PIPE
        # A new session: the front forwards signals of the terminal.
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "sametoken.replicas", stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):  # the process has ended; the reason is read below
            process.stdin.write(pickle.dumps(self._work))
            await process.stdin.drain()
        line = await process.stdout.readline()
        said = json.loads(line) if line else {"error": f"{await self.ended()}; its own messages say why"}
        if not isinstance(said, dict):
            raise TypeError(f"its process said {line[:80]!r}, expected an object of JSON")
        return said

    async def ended(self) -> str:
        """Wait for the end of the process; return a message with the cause."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return f"replica {self.number} has ended {how}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def close(self) -> None:
        """End the process now, with the ranks of its model."""
        if self._process is None:
            return
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
        self.send(signal.SIGKILL)
        await self._process.wait()

    @property
    def state(self) -> ReplicaState:
        return ReplicaState(self.number, self.status, self.restarts, self.sequences)

    def candidate(self, prompt: RoutedPrompt) -> Candidate:
        """State of this replica for routing."""
        known = self._memory.known(prompt.blocks)
        return Candidate(self.number, self.sequences, self.unread, known, len(self._memory))

    def take(self, prompt: RoutedPrompt) -> OpenRequest:
        """Count a request of this replica as open until its `close`."""
        known = self._memory.known(prompt.blocks)
        return OpenRequest(self, prompt.sequences, max(0, prompt.size - known))

    def remember(self, prompt: RoutedPrompt) -> None:
        """Record that the process has received this prompt."""
        self._memory.add(prompt.blocks)


class OpenRequest:
    """Load of one open request of a replica."""

    def __init__(self, replica: Replica, sequences: int, unread: int) -> None:
        self._replica, self._sequences, self._unread = replica, sequences, unread
        replica.sequences += sequences
        replica.unread += unread

    def read(self) -> None:
        """Remove the prompt from the load: prefill is done."""
        self._replica.unread -= self._unread
        self._unread = 0

    def close(self) -> None:
        """Remove the request from the load."""
        self.read()
        self._replica.sequences -= self._sequences
        self._sequences = 0


def leave(socket: str) -> None:
    """Remove the socket of a replica, and after the last one the directory."""
    with suppress(OSError):
        Path(socket).unlink(missing_ok=True)
        Path(socket).parent.rmdir()
