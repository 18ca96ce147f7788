"""Decoding one step ahead of the host: step i + 1 runs while the host reads what step i emitted.

The host learns late that a request has ended; what was computed for it beyond is discarded. Every change of the batch
ends the session of its lanes, and the next step builds another or leaves the work to the engine's own step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sametoken.drafters.device import Proposer
from sametoken.engine.device_step import decode_step, nodes_of
from sametoken.engine.request import Request
from sametoken.engine.runner import Runner
from sametoken.engine.scheduler import Scheduler
from sametoken.errors import not_finite
from sametoken.runtime.graphs import GraphKey, Graphs
from sametoken.runtime.lanes import Lanes
from sametoken.runtime.transfer import Readback
from sametoken.speculation.draft import PADDING
from sametoken.speculation.sampling import Sampling

AHEAD = 2  # steps that may be under way when the host has to wait
LEAST_KEYS = 512  # key lengths are bounded by powers of two from here on, one graph each


@dataclass(frozen=True, slots=True)
class _Session:
    """A batch that stays the same: requests in the order of their lanes, and what its steps work on."""

    requests: tuple[Request, ...]
    method: str
    proposer: Proposer
    lanes: Lanes
    sampling: Sampling
    kind: tuple[object, ...]
    readback: Readback

    @property
    def nodes(self) -> int:
        return self.lanes.emitted.shape[1] - 1


class CapturedSteps:
    """Takes over the engine's step while every running row only decodes and nobody waits for a row.

    Args:
        runner: the target over its cache.
        proposers: methods that can guess on the device, by name.
        max_num_tokens: most nodes of a step.
        may_draft: whether so many rows may be drafted as far as a proposer goes; None is always.
    """

    def __init__(
        self,
        runner: Runner,
        proposers: Mapping[str, Proposer],
        max_num_tokens: int,
        may_draft: Callable[[int], bool] | None = None,
    ) -> None:
        self._may_draft = may_draft
        self.runner, self.proposers, self.max_num_tokens = runner, dict(proposers), max_num_tokens
        self.graphs = Graphs(runner.device)
        self._session: _Session | None = None
        # Graphs know addresses: equal kinds of batch are given the same tensors again.
        self._lanes: dict[tuple[int, int], tuple[Lanes, Readback]] = {}
        self._sampling: dict[tuple[object, ...], Sampling] = {}

    def step(self, scheduler: Scheduler) -> list[Request] | None:
        """The requests that emitted tokens or ended; None when this step is the engine's own."""
        # Streams and graphs are those of the current device.
        with torch.cuda.device_of(self.runner.cache.keys):  # type: ignore[no-untyped-call]
            return self._step(scheduler)

    def _step(self, scheduler: Scheduler) -> list[Request] | None:
        begin = time.perf_counter()
        session = self._session
        if session is not None:
            launched = self._unchanged(session, scheduler) and self._launch(session, scheduler)
            changed = self._collect(session) if len(session.readback) else []
            if not launched and not len(session.readback):
                self._session = None
            _account(session.requests, time.perf_counter() - begin)
            if launched or changed:
                return changed
        session = self._session = self._enter(scheduler)
        if session is not None and self._launch(session, scheduler):
            _account(session.requests, time.perf_counter() - begin)
            return []
        self._session = None
        return None

    def _unchanged(self, session: _Session, scheduler: Scheduler) -> bool:
        same = len(session.requests) == len(scheduler.running)
        same = same and all(a is b for a, b in zip(session.requests, scheduler.running, strict=True))
        return same and not scheduler.may_admit

    def _enter(self, scheduler: Scheduler) -> _Session | None:
        """The session of the rows that run now; None when one of them needs what only the host can do."""
        requests = tuple(scheduler.running)
        methods = {request.method for request in requests}
        if scheduler.may_admit or len(methods) != 1 or not all(_on_device(request) for request in requests):
            return None
        method = methods.pop()
        proposer = self.proposers.get(method)
        batch = 1 << (len(requests) - 1).bit_length()
        if proposer is None or (proposer.depth and self._may_draft and not self._may_draft(len(requests))):
            return None
        nodes = nodes_of(batch, proposer.depth, self.runner.decoder.least_rows)
        if batch * nodes > self.max_num_tokens:
            return None
        fresh = Sampling.of([requests[lane % len(requests)].sampling for lane in range(batch)])
        kind, sampling = self._filled(fresh)
        lanes, readback = self._seats(batch, nodes)
        for request in requests:
            proposer.enter(_row(request))
        lanes.load(
            [_row(request) for request in requests],
            [(request.tokens[-2], request.tokens[-1]) for request in requests],
            self.runner.cache.table.spare,
            [*(r.committed for r in requests), *(min(r.max_draft_len, proposer.depth) for r in requests)],
        )
        return _Session(requests, method, proposer, lanes, sampling, kind, readback)

    def _seats(self, batch: int, nodes: int) -> tuple[Lanes, Readback]:
        if (batch, nodes) not in self._lanes:
            lanes = Lanes.empty(batch, nodes, self.runner.device)
            self._lanes[batch, nodes] = lanes, Readback(lanes.emitted, AHEAD)
        return self._lanes[batch, nodes]

    def _filled(self, fresh: Sampling) -> tuple[tuple[object, ...], Sampling]:
        """What kind of sampling this is, and the tensors of that kind, filled."""
        tensors, kind = _leaves(fresh)
        kept = self._sampling.setdefault(kind, fresh)
        if kept is not fresh:
            for old, new in zip(_leaves(kept)[0], tensors, strict=True):
                old.copy_(new)
        return kind, kept

    def _launch(self, session: _Session, scheduler: Scheduler) -> bool:
        """Starts the next step; False when it would be for nothing, or when there are too few pages for it."""
        flying = len(session.readback)
        if flying == AHEAD or all(request.room <= flying for request in session.requests):
            return False
        # The steps under way may have emitted all they could. Nodes past a request's last token go to the sink.
        slots = [len(r.tokens) - 1 + flying * (session.proposer.depth + 1) + session.nodes for r in session.requests]
        useful = [min(n, len(r.tokens) + r.room) for n, r in zip(slots, session.requests, strict=True)]
        enough, pages = scheduler.reserve([_row(r) for r in session.requests], useful)
        for row, new in pages.items():
            self.runner.cache.table.extend(row, new)
        if not enough:
            return False
        keys = max(LEAST_KEYS, 1 << (max(slots) - 1).bit_length())
        decoder = self.runner.decoder
        key = GraphKey(
            session.method, session.proposer.depth, session.lanes.batch, keys, session.kind,
            decoder.dtype, decoder.embed.deterministic,
        )  # fmt: skip
        work = partial(decode_step, self.runner, session.proposer, session.lanes, session.sampling, keys)
        self.graphs.run(key, work, session.lanes.state)
        session.readback.push(session.lanes.emitted)
        return True

    def _collect(self, session: _Session) -> list[Request]:
        """Reads the oldest step under way and hands the requests that still run their tokens."""
        changed = []
        for request, (count, *drawn) in zip(session.requests, session.readback.pop(), strict=False):
            if request.finish_reason is not None or request.row is None:
                continue
            if drawn[0] == PADDING:
                request.fail(not_finite())
                changed.append(request)
                continue
            limit = min(request.draft_limit, session.proposer.depth)
            accepted = min(count - 1, limit)
            request.committed += accepted + 1
            request.emit(drawn[: accepted + 1], accepted, range(1, limit + 1), [])
            request.committed = min(request.committed, len(request.tokens))
            session.proposer.told(request.row, request.tokens, request.committed)
            changed.append(request)
        return changed


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row


def _on_device(request: Request) -> bool:
    """Whether nothing but emitting its tokens needs the host."""
    return request.remaining == 1 and request.params.logprobs is None and request.sampling.reusable


def _account(requests: Sequence[Request], seconds: float) -> None:
    """Proposing and verifying are one piece of work here; it counts as verifying."""
    for request in requests:
        if request.row is not None:
            request.stats.verify_s += seconds


def _leaves(sampling: Sampling) -> tuple[list[Tensor], tuple[object, ...]]:
    """The tensors of a batch's sampling, and everything else about it: which there are, their shapes, the rest."""
    tensors: list[Tensor] = []
    kind: list[object] = []
    for name in Sampling.__slots__:
        value = getattr(sampling, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Tensor):
                tensors.append(part)
                kind.append((name, part.shape, part.dtype))
            else:
                kind.append((name, part))
    return tensors, tuple(kind)
