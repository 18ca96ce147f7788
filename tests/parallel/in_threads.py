"""Ranks as threads of one process: their parts are summed as processes sum them, without starting any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from sametoken.checkpoint.load import load_decoder
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, PageTable, Span, View
from sametoken.runtime.ranks import RankPart
from sametoken.speculation.draft import chain_mask


class Threads:
    """What the ranks of one decoder share; each of them is one of `each`."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)
        self.sums = 0
        self.each = [Rank(self, rank) for rank in range(size)]


class Rank:
    """One rank; see `sametoken.runtime.ranks.Ranks`."""

    native = None

    def __init__(self, shared: Threads, rank: int) -> None:
        self.shared, self.rank = shared, rank

    def begin(self, tokens: Tensor, view: View) -> None: ...

    def end(self, last: Tensor) -> None: ...

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None: ...

    def begin_chains(self, *chains: object) -> None: ...

    def score(self, last: Tensor) -> None: ...

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        shared = self.shared
        shared.parts[self.rank] = own.clone()
        shared.barrier.wait()
        found = torch.cat(shared.parts, 1)
        shared.barrier.wait()
        assert found.shape[1] == begins[-1]
        return found

    share = gather

    def sum(self, partial: Tensor) -> None:
        shared = self.shared
        shared.parts[self.rank] = partial.clone()
        shared.sums += not self.rank
        shared.barrier.wait()
        total = shared.parts[0].clone()
        for part in shared.parts[1:]:
            total += part
        shared.barrier.wait()
        partial.copy_(total)


def load_parts(directory: Path, size: int, dtype: torch.dtype, quantization: str = "none") -> list[Decoder]:
    """The parts of a decoder, joined."""
    shared = Threads(size)
    parts = [load_decoder(directory, dtype, "cpu", 96, quantization, RankPart(rank, size)) for rank in range(size)]
    for part, rank in zip(parts, shared.each, strict=True):
        part.join(rank)
    return parts


def at_once(calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Runs a call in a thread for each rank."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def last_states(decoder: Decoder, pieces: Sequence[Sequence[int]]) -> Tensor:
    """[T, H] of the tokens of one row, read in pieces one after the other."""
    config, count = decoder.config, sum(map(len, pieces))
    table = PageTable(1, 16, 12, 8, "cpu")
    table.extend(0, range(1, 13))
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, decoder.dtype, "cpu")
    found, start = [], 0
    for piece in pieces:
        width = len(piece)
        span = Span(torch.tensor([0]), [0], torch.tensor([start]), chain_mask(1, width), width, start + width)
        found.append(decoder.run(torch.tensor(piece), cache, [span]).last)
        start += width
    assert start == count
    return torch.cat(found)
