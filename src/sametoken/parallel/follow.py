"""Following ranks: load a part of the target and of a draft model, and take part in every forward of rank 0.

Following ranks have no requests, and draw only the tokens of draft chains, so that all decisions are made on rank 0.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.memory import check_memory, times_held
from sametoken.checkpoint.places import draft_directory, target_directory
from sametoken.errors import EngineError, SametokenError
from sametoken.kernels.cpu.threads import serial_torch
from sametoken.model.compiled_guesses import Committed
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.parallel.group import ENDED, RankGroup
from sametoken.parallel.meeting import facts
from sametoken.parallel.messages import (
    Cache,
    ChainsOfGuesses,
    Changes,
    Forward,
    Models,
    ModelToLoad,
    Scores,
    sampling_of,
    tensors,
    unpacked,
)
from sametoken.parallel.place import RankPlace, place_of
from sametoken.runtime.cache import KVCache, PageTable, View
from sametoken.runtime.kv_format import FORMATS
from sametoken.runtime.ranks import NativeExchange, RankPart
from sametoken.speculation.rows import Sampling

NOT_STARTED = "rank 0 ended before the model was ready; its own messages say why"
REPEAT_S = 15.0  # time for rank 0 to report the reason why another rank ends


class RefusedError(SametokenError):
    """Error that ends this rank before any computation; rank 0 reports it."""


class FollowingRank:
    """Part of each model in a following rank; implements `Ranks`, but only rank 0 begins computations."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.sum, self.end, self.gather, self.share = group.sum, group.end, group.gather, group.share

    @property
    def native(self) -> NativeExchange | None:
        """Collectives for compiled code, see `Ranks`."""
        return self.group.native

    def begin(self, tokens: Tensor, view: View) -> None:
        """Do nothing: rank 0 begins forwards."""

    def begin_chains(
        self, table: PageTable, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]],
        skipped: Sequence[int], levels: int, sampling: Sampling,
    ) -> None:  # fmt: skip
        """Do nothing: rank 0 begins drafting."""

    def score(self, last: Tensor) -> None:
        """Do nothing: rank 0 sends the hidden states."""

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Do nothing: the next message of rank 0 has the committed nodes."""

    def run(self) -> None:
        """Compute until rank 0 ends.

        Raises:
            EngineError: a rank is lost.
            RefusedError: the part of this rank cannot be loaded.
        """
        wanted = self.group.receive()
        decoders = self._load(wanted) if isinstance(wanted, Models) else []
        size = self.group.receive() if decoders else None
        if not isinstance(size, Cache):  # rank 0 has ended and has printed the reason
            raise RefusedError(NOT_STARTED)
        table = PageTable(size.rows, size.pages, size.pages_per_row, size.page_size, "cpu", size.short_pages)
        pages, kv_format = [size.pages, table.all_pages], FORMATS[size.form]  # of the target, and of a draft model
        caches = [
            KVCache.of(each.config, table, each.dtype, "cpu", kv_format, count)
            for each, count in zip(decoders, pages, strict=False)
        ]
        with nullcontext() if decoders[0].native is None else serial_torch():
            while isinstance(message := self.group.receive(), Forward | ChainsOfGuesses | Scores):
                if not isinstance(message, Scores):
                    _apply(message.changes, caches, table)
                _compute(message, decoders[message.model], caches[message.model])

    def _load(self, wanted: Models) -> list[Decoder]:
        """Load the parts of this rank; errors are sent to rank 0."""
        group, found = self.group, []
        try:
            for name, model in wanted._asdict().items():
                if model is not None:
                    directory = _directory(name, model)
                    group.publish(name, model_digest(directory))
                    found.append(_load(model, directory, group.place))
        except SametokenError as error:
            for name in wanted._fields:
                group.publish(name, "")
            group.publish("loaded", str(error))
            raise RefusedError(str(error)) from error
        for decoder in found:
            decoder.join(self)
        group.publish("loaded", "")
        return found


def _directory(name: str, model: ModelToLoad) -> Path:
    if name == "target":
        return target_directory(model.model, model.revision, lambda found: None)
    return draft_directory(model.model, model.revision)


def _load(wanted: ModelToLoad, directory: Path, place: RankPlace) -> Decoder:
    dtype, limit, quantization = getattr(torch, wanted.dtype), wanted.max_seq_len, wanted.quantization
    stated, scheme = ModelConfig.from_hf(read_config(directory), None, wanted.rope_scaling), stored_scheme(directory)
    share = times_held(stated, place.size) / place.size
    check_memory(wanted.model, stated, limit, dtype, torch.device("cpu"), quantization, scheme, share)
    part = RankPart(place.rank, place.size)
    decoder = load_decoder(directory, dtype, "cpu", limit, quantization, part, rope_scaling=wanted.rope_scaling)
    decoder.set_deterministic(wanted.deterministic)
    return decoder


def _apply(changes: Changes, caches: Sequence[KVCache], table: PageTable) -> None:
    for moved in changes.moved:
        caches[moved.model].commit(*tensors(moved))
    for row, pages in changes.pages.items():
        table.clear(row)
        table.extend(row, pages)


def _compute(message: Forward | ChainsOfGuesses | Scores, decoder: Decoder, cache: KVCache) -> None:
    """Compute this rank's part of the computation that rank 0 has begun."""
    if isinstance(message, Forward):
        spans = [unpacked(span) for span in message.spans]
        decoder(torch.tensor(message.tokens, dtype=torch.int64), cache, cache.view(spans))
    elif isinstance(message, ChainsOfGuesses):
        read = Committed(message.rows, message.starts, message.tokens, skipped=message.skipped)
        decoder.guess(read, cache, [message.levels], sampling_of(message.draws))
    else:
        last = torch.frombuffer(bytearray(message.last), dtype=decoder.dtype)
        decoder.logits(last.view(-1, decoder.config.hidden_size))


def join(environment: Mapping[str, str], count: int) -> None:
    """Return on rank 0; on another rank of a launcher, compute until rank 0 ends, then exit.

    Raises:
        ConfigError: the launcher started another number of processes, or set too few variables.
    """
    if count == 1:  # a launcher may have started processes for another purpose
        return
    place = place_of(environment, count)
    if place.rank:
        code = follow(place)
        sys.stdout.flush()
        os._exit(code)  # threads of gloo may still hold Python objects


def follow(place: RankPlace) -> int:
    """Run a following rank to its end; return the exit code of the process.

    Rank 0 alone handles signals: it ends open requests first, and then the other ranks.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    try:
        group = RankGroup(place, facts())
        group.on_failure = lambda error: _end(place, error)
        group.connect()
        if place.launcher:
            torch.set_num_threads(max(1, torch.get_num_threads() // group.sharing))
        FollowingRank(group).run()
    except RefusedError as error:
        if not _ended_by_rank_0(group) or place.own_terminal:
            _say(place, error)
        return 1
    except SametokenError as error:
        _say(place, error)
        return 1
    return 0


def _ended_by_rank_0(group: RankGroup) -> bool:
    """Wait until rank 0, which prints the reason, has ended; return True if rank 0 published an end message.

    If this rank ended first, the launcher might kill rank 0 before it prints.
    """
    try:
        group.wait_for(ENDED, 0, REPEAT_S)
        group.receive()
    except EngineError:  # rank 0 has ended
        return True
    except SametokenError:
        return False
    return True


def _say(place: RankPlace, error: SametokenError) -> None:
    print(f"error: rank {place.rank} of {place.size} ends: {error}", file=sys.stderr, flush=True)


def _end(place: RankPlace, error: EngineError) -> None:
    """Exit at once, since a thread may wait forever for a lost rank."""
    _say(place, error)
    os._exit(1)
