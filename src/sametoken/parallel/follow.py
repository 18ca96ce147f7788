"""A rank that follows: loads its part of the target, and computes it in every forward that rank 0 begins.

It draws nothing and knows no requests: what the ranks must agree on is decided in one place.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.memory import check_memory, times_held
from sametoken.checkpoint.places import target_directory
from sametoken.errors import EngineError, SametokenError
from sametoken.kernels.cpu.library import serial_torch
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.parallel.group import RankGroup, facts
from sametoken.parallel.messages import Cache, Forward, Scores, TargetToLoad, tensors, unpacked
from sametoken.parallel.place import RankPlace, place_of
from sametoken.runtime.cache import KVCache, PageTable, View
from sametoken.runtime.kv_format import FORMATS
from sametoken.runtime.ranks import RankPart

NOT_STARTED = "rank 0 ended before the model was ready; its own messages say why"


class FollowingRank:
    """A rank's part of the target; as `Ranks` it begins nothing of its own."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.sum, self.end, self.gather = group.sum, group.end, group.gather

    @property
    def native_sum(self) -> tuple[int, int] | None:
        """See `Ranks`."""
        return self.group.native_sum

    def begin(self, tokens: Tensor, view: View) -> None:
        """Rank 0 has begun it."""

    def score(self, last: Tensor) -> None:
        """Rank 0 has sent them."""

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Rank 0's next forward says what was committed."""

    def run(self) -> None:
        """Computes until rank 0 ends. Raises EngineError if a rank is gone, SametokenError if loading fails."""
        wanted = self.group.receive()
        if not isinstance(wanted, TargetToLoad):
            raise SametokenError(NOT_STARTED)
        decoder = self._load(wanted)
        size = self.group.receive()
        if not isinstance(size, Cache):
            raise SametokenError(NOT_STARTED)
        cache = self._cache(size, decoder)
        with nullcontext() if decoder.native is None else serial_torch():
            while isinstance(message := self.group.receive(), Forward | Scores):
                if isinstance(message, Forward):
                    self._forward(message, decoder, cache)
                else:
                    last = torch.frombuffer(bytearray(message.last), dtype=decoder.dtype)
                    decoder.logits(last.view(-1, decoder.config.hidden_size))

    def _load(self, wanted: TargetToLoad) -> Decoder:
        """The decoder of this rank; what goes wrong is told to rank 0 too."""
        group, place = self.group, self.group.place
        try:
            directory = target_directory(wanted.model, wanted.revision, lambda found: None)
            group.say("model", model_digest(directory))
            dtype, device = getattr(torch, wanted.dtype), torch.device("cpu")
            stated, scheme = ModelConfig.from_hf(read_config(directory)), stored_scheme(directory)
            limit, quantization = wanted.max_seq_len, wanted.quantization
            share = times_held(stated, place.size) / place.size
            check_memory(wanted.model, stated, limit, dtype, device, quantization, scheme, share)
            decoder = load_decoder(directory, dtype, "cpu", limit, quantization, RankPart(place.rank, place.size))
        except SametokenError as error:
            group.say("model", "")
            group.say("loaded", str(error))
            raise
        decoder.set_deterministic(wanted.deterministic)
        decoder.join(self)
        group.say("loaded", "")
        return decoder

    def _cache(self, size: Cache, decoder: Decoder) -> KVCache:
        table = PageTable(size.rows, size.pages, size.pages_per_row, size.page_size, "cpu")
        return KVCache.of(decoder.config, table, decoder.dtype, "cpu", FORMATS[size.form])

    def _forward(self, message: Forward, decoder: Decoder, cache: KVCache) -> None:
        for moved in message.moved:
            cache.commit(*tensors(moved))
        for row, pages in message.pages.items():
            cache.table.clear(row)
            cache.table.extend(row, pages)
        spans = [unpacked(span) for span in message.spans]
        decoder(torch.tensor(message.tokens, dtype=torch.int64), cache, cache.view(spans))


def join(environment: Mapping[str, str], count: int) -> None:
    """Returns on rank 0; another rank, which a launcher has started, computes until rank 0 ends and ends its process.

    Raises:
        ConfigError: the launcher started another number of processes, or says too little.
    """
    if count == 1:  # a launcher may have started processes for another purpose
        return
    place = place_of(environment, count)
    if place.rank:
        code = follow(place)
        sys.stdout.flush()
        os._exit(code)  # threads of gloo may still hold Python objects


def follow(place: RankPlace) -> int:
    """The whole life of a rank that follows; returns the exit code of its process.

    Signals are rank 0's to answer: it ends open requests first, and the others end with it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    try:
        group = RankGroup(place, facts())
        group.on_failure = lambda error: _end(place, error)
        group.connect()
        if place.launcher:
            torch.set_num_threads(max(1, torch.get_num_threads() // group.sharing))
        FollowingRank(group).run()
    except SametokenError as error:
        _say(place, error)
        return 1
    return 0


def _say(place: RankPlace, error: SametokenError) -> None:
    print(f"error: rank {place.rank} of {place.size} ends: {error}", file=sys.stderr, flush=True)


def _end(place: RankPlace, error: EngineError) -> None:
    """Ends the process at once: its own thread may wait for a rank that never comes."""
    _say(place, error)
    os._exit(1)
