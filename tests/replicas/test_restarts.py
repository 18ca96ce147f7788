"""A replica that ends again and again is started a few times only, and without any replica the server ends."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from sametoken.errors import EngineError
from sametoken.options.server import ServerConfig
from sametoken.replicas import replicas
from sametoken.replicas.process import Replica, Work
from sametoken.replicas.replicas import MOST_RESTARTS, Replicas

WORKS = [Work(lambda number: None, number, "", ServerConfig(), {}) for number in range(2)]  # type: ignore[arg-type,return-value]


class Short(Replica):
    """Ends as soon as it serves; the one with `lasting` in its class does not."""

    lasting: int | None = None
    starts = 0

    async def start(self) -> None:
        self.starts += 1
        self.status, self.said = "ready", {"method": "none"}

    async def ended(self) -> str:
        if self.number == self.lasting:
            await asyncio.sleep(60)
        return f"replica {self.number} has ended by signal 9"


async def watched(kind: type[Short]) -> Replicas:
    """Replicas after all restarts that there will be."""
    found = Replicas(WORKS, drain_seconds=0.0)
    failed = asyncio.Event()
    found.on_failure = lambda error: failed.set()
    await found.start()
    if kind.lasting is None:
        await asyncio.wait_for(failed.wait(), 10)
    else:
        await asyncio.wait({found._watches[1 - kind.lasting]}, timeout=10)
    await found.close()
    return found


@pytest.mark.parametrize("lasting", [None, 1])
def test_restarts_are_bounded(monkeypatch: pytest.MonkeyPatch, lasting: int | None) -> None:
    kind: Any = type("Kind", (Short,), {"lasting": lasting})
    monkeypatch.setattr(replicas, "Replica", kind)
    monkeypatch.setattr(replicas, "PAUSE_S", 0.0)
    found = asyncio.run(watched(kind))
    short = found._all[0]
    assert isinstance(short, Short)
    assert short.starts == 1 + MOST_RESTARTS
    assert (short.status, short.restarts) == ("ended", MOST_RESTARTS)
    if lasting is None:
        assert isinstance(found.failure, EngineError)
        assert "no replica is left" in str(found.failure)
    else:
        assert found.failure is None
        assert [state.status for state in found.states] == ["ended", "ready"]


def test_a_replica_that_cannot_be_started_again_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unstartable(Short):
        async def start(self) -> None:
            if self.starts:
                self.starts += 1
                self.status = "ended"
                raise EngineError("replica cannot be started: no process can be made")
            await super().start()

    monkeypatch.setattr(replicas, "Replica", Unstartable)
    monkeypatch.setattr(replicas, "PAUSE_S", 0.0)
    found = asyncio.run(watched(Unstartable))
    assert [each.starts for each in found._all if isinstance(each, Short)] == [1 + MOST_RESTARTS] * 2
    assert found.failure is not None


def test_a_replica_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[signal.Signals] = []

    class Deaf(Short):
        async def ended(self) -> str:
            while signal.SIGKILL not in sent:
                await asyncio.sleep(0.01)
            return ""

        def send(self, number: signal.Signals) -> None:
            sent.append(number)

    monkeypatch.setattr(replicas, "Replica", Deaf)
    monkeypatch.setattr(replicas, "LAST_S", 0.05)
    asyncio.run(Replicas(WORKS, drain_seconds=0.0).drain(asyncio.Event()))
    assert sent == [signal.SIGTERM] * 4 + [signal.SIGKILL] * 2
