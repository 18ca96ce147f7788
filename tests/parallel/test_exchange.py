"""What ranks exchange, through the memory of one host and over the network: the same bits on both ways."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from sametoken.errors import ConfigError
from sametoken.kernels.cpu.variant import library
from sametoken.parallel.gloo import Gloo
from sametoken.parallel.group import RankGroup
from sametoken.parallel.meeting import KEY, own_key
from sametoken.parallel.place import HERE, RankPlace
from sametoken.parallel.shared import MEMORY_SWITCH, SLOT, SharedMemory

RANKS = 3
SIZES = (1, 15, 4096, SLOT // 4 + 19)  # the last one needs two rounds
T = TypeVar("T")


def at_once(call: Callable[[int], T]) -> list[T]:
    """Calls it in a thread for each rank."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(call, range(RANKS)))


def free_port() -> int:
    with socket.create_server((HERE, 0)) as free:
        return int(free.getsockname()[1])


def groups() -> list[RankGroup]:
    """The ranks of one host as threads of one process."""
    port = free_port()

    def connected(rank: int) -> RankGroup:
        group = RankGroup(RankPlace(rank, RANKS, RANKS, HERE, port), {"version": "1"})
        group.connect()
        return group

    return at_once(connected)


@pytest.fixture(params=["on", "off"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankGroup]]:
    monkeypatch.setenv(MEMORY_SWITCH, request.param)
    monkeypatch.setenv(KEY, "the key of these threads")
    found = groups()
    shared = request.param == "on" and library() is not None and hasattr(os, "memfd_create")
    assert {type(group.transport) for group in found} == {SharedMemory if shared else Gloo}
    yield found
    for group in found:
        group.close()


def test_parts_are_added_in_the_order_of_the_ranks(ranks: list[RankGroup]) -> None:
    """Numbers of very different sizes, so that another order gives other bits."""
    for size in SIZES:
        torch.manual_seed(size)
        parts = [torch.randn(size) * scale for scale in (1e6, -1e6, 1e-2)]
        expected = parts[0] + parts[1] + parts[2]
        found = [part.clone() for part in parts]
        at_once(lambda rank, found=found: ranks[rank].sum(found[rank]))  # type: ignore[misc]
        assert all(torch.equal(each, expected) for each in found)
    assert not torch.equal(parts[2] + parts[1] + parts[0], expected)


def test_messages_arrive_whatever_their_size(ranks: list[RankGroup]) -> None:
    for message in ([], ["a"] * 20_000, [7.5] * 1_000_000):

        def exchange(rank: int, message: object = message) -> object:
            return ranks[rank].send(message) if rank == 0 else ranks[rank].receive()

        assert at_once(exchange)[1:] == [message] * (RANKS - 1)


def test_columns_of_all_ranks_stand_side_by_side_on_rank_0(ranks: list[RankGroup]) -> None:
    """Few columns, and more than a slot holds of one rank."""
    for rows, begins in ((5, [0, 16, 48, 50]), (3, [0, SLOT // 4 + 5, SLOT // 4 + 21, SLOT // 2])):
        whole = torch.randn(rows, begins[-1])

        def gather(rank: int, whole: Tensor = whole, begins: list[int] = begins) -> Tensor:
            return ranks[rank].gather(whole[:, begins[rank] : begins[rank + 1]].contiguous(), begins)

        assert torch.equal(at_once(gather)[0], whole)


@pytest.mark.parametrize("keys", [("one", "other", "one"), ("one", "one", ""), ("", "", "one")])
def test_a_rank_without_the_key_is_refused_by_all(keys: tuple[str, str, str]) -> None:
    port = free_port()

    def refused(rank: int) -> str:
        group = RankGroup(RankPlace(rank, RANKS, RANKS, HERE, port), {})
        group.key = keys[rank]
        with pytest.raises(ConfigError, match=f"rank . has another {KEY} than this rank.*-x {KEY}") as error:
            group.connect()
        return str(error.value)

    said = at_once(refused)
    stranger = next(rank for rank in range(RANKS) if keys.count(keys[rank]) == 1)
    assert all(each.startswith(f"rank {stranger}") for rank, each in enumerate(said) if rank != stranger)


def test_a_key_is_made_for_ranks_that_rank_0_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    place = RankPlace(0, 2, 2, HERE, 0)
    assert len({own_key(place), own_key(place)}) == 2
    assert own_key(place._replace(launcher="mpirun")) == own_key(place._replace(rank=1)) == ""
    monkeypatch.setenv(KEY, "stated")
    assert own_key(place) == "stated"


@pytest.mark.skipif(library() is None or not hasattr(os, "memfd_create"), reason="ranks share no memory here")
def test_memory_has_no_name_and_is_gone_with_its_ranks() -> None:
    kernels, place = library(), RankPlace(0, 2, 2, HERE, 0)
    assert kernels is not None
    before = set(Path("/dev/shm").iterdir())
    first = SharedMemory(place, kernels)
    second = SharedMemory(place._replace(rank=1), kernels, first.description)
    assert set(Path("/dev/shm").iterdir()) == before
    process, number, token = json.loads(first.description)
    with pytest.raises(OSError, match="another process"):
        SharedMemory(place, kernels, json.dumps([process, number, "0" * len(token)]))
    first.mapped()
    with pytest.raises(OSError, match="No such file"):
        SharedMemory(place, kernels, first.description)
    assert first.native[:2] == second.native[:2]
