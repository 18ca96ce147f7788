"""Decoding one step ahead of the host, captured as a graph: step i + 1 runs while the host reads the tokens of step i.

The end of a request reaches the host one step late; later tokens of that request are discarded. Every change of the
batch ends the session of its graph slots. The next step begins another session, or is the engine's uncaptured step.
`decode_step` is the step as a function of tensors that stay on the device, so that the host waits for no value.
Legend: B graph slots, N nodes, K tokens of a path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sametoken.drafters.device import Proposer
from sametoken.engine.host import HostRunner
from sametoken.engine.plan import Decode, Plan
from sametoken.engine.report import Done, Proposal, RowResult
from sametoken.engine.request import Emission, Request
from sametoken.engine.runner import Runner
from sametoken.engine.scheduler import Scheduler
from sametoken.errors import not_finite
from sametoken.runtime.cache import Span
from sametoken.runtime.draw import draw
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.runtime.graphs import GraphKey, Graphs
from sametoken.runtime.transfer import Readback
from sametoken.speculation.draft import PADDING, ancestors, chain_mask, depth
from sametoken.speculation.sampling import Sampling
from sametoken.speculation.verify import verify

AHEAD = 2  # launched steps from which on the host waits for the oldest
LEAST_KEYS = 512  # least bound of key lengths; greater bounds are powers of two, with one graph each


def decode_step(runner: Runner, proposer: Proposer, graph_slots: GraphSlots, sampling: Sampling, keys: int) -> None:
    """Advance every active graph slot by the tokens accepted or drawn in one forward of the target.

    Args:
        runner: runner of the target.
        proposer: drafter on the device.
        graph_slots: state of the rows.
        sampling: sampling of the graph slots, without grammars; its history is updated.
        keys: upper bound of the keys of any row, the slots of this step included.
    """
    draft = proposer.guess(graph_slots, sampling, keys)
    batch, nodes = draft.tokens.shape
    ancestor_mask = chain_mask(batch, nodes, draft.tokens.device) if proposer.chain else ancestors(draft.parents)
    span = Span(graph_slots.rows, (), graph_slots.lengths, ancestor_mask, nodes, keys)
    hidden = runner.decoder.run(draft.tokens.flatten(), runner.cache, [span], proposer.taps)
    logits = runner.decoder.logits(hidden.last).view(batch, nodes, -1)
    drawn = draw(logits, draft, ancestor_mask, graph_slots.lengths, sampling)
    verdict = verify(draft, ancestor_mask, drawn)
    path = verdict.path[:, : proposer.depth + 1]
    if not proposer.chain:
        runner.cache.move(graph_slots.rows, graph_slots.lengths, path)
    depths = depth(ancestor_mask) * (draft.tokens != PADDING)
    if proposer.taps:
        features = torch.cat(hidden.taps, dim=1).view(batch, nodes, -1)
        graph_slots.features.copy_(features.gather(1, path.unsqueeze(2).expand(-1, -1, features.shape[2])))
    tokens, counts = drawn.gather(1, path), verdict.length + 1
    sampling.remember(tokens, counts * graph_slots.active)
    _advance(graph_slots, tokens, counts, depths[:, 1:])


def _advance(graph_slots: GraphSlots, tokens: Tensor, counts: Tensor, depths: Tensor) -> None:
    """Append the first `counts` of the tokens [B, K + 1] to every active graph slot."""
    granted, active = counts * graph_slots.active, graph_slots.active > 0
    graph_slots.emitted.copy_(torch.cat([granted.unsqueeze(1), tokens, depths], dim=1))
    graph_slots.tokens.copy_(torch.where(active.unsqueeze(1), tokens, graph_slots.tokens))
    graph_slots.counts.copy_(torch.where(active, counts, graph_slots.counts))
    graph_slots.lengths.add_(granted)
    graph_slots.room.sub_(granted)


@dataclass(slots=True)
class _Session:
    """Unchanged batch, with the tensors and pages of its steps.

    Attributes:
        requests: requests in the order of their graph slots.
        slots: cache slots that each row may have filled after the last planned step.
        flying: launched steps, oldest first; `readback` has as many results.
    """

    requests: tuple[Request, ...]
    method: str
    proposer: Proposer
    graph_slots: GraphSlots
    sampling: Sampling
    kind: tuple[object, ...]
    readback: Readback
    slots: Sequence[int] = ()
    flying: deque[tuple[Plan, Proposal]] = field(default_factory=deque)


class CapturedSteps:
    """Plan and run steps while every running row only decodes and no request waits for a row.

    Args:
        runner: runner of the target and of steps that are not captured.
        proposers: drafters on the device, by method.
        max_num_tokens: greatest number of nodes of a step.
        may_draft: function of a number of rows that returns true if these may be drafted to the proposer's full depth;
            None for always.
    """

    def __init__(
        self,
        runner: HostRunner,
        proposers: Mapping[str, Proposer],
        max_num_tokens: int,
        may_draft: Callable[[int], bool] | None = None,
    ) -> None:
        self._may_draft = may_draft
        self.runner, self.proposers, self.max_num_tokens = runner, dict(proposers), max_num_tokens
        self.graphs = Graphs(runner.device)
        self._session: _Session | None = None
        # Graphs hold addresses, so batches of an equal kind reuse the tensors of the earlier one.
        self._graph_slots: dict[tuple[str, int], tuple[GraphSlots, Readback]] = {}
        self._sampling: dict[tuple[object, ...], Sampling] = {}

    def plan(self, scheduler: Scheduler) -> Plan | None:
        """Plan a captured step, without entries while older steps must be read; None if the host must run the step."""
        session = self._session
        if session is not None:
            plan = self._next(session, scheduler) if self._unchanged(session, scheduler) else None
            if plan is not None or session.flying:
                return plan or Plan(captured=True)
            _leave(session)
        session = self._session = self._enter(scheduler)
        plan = None if session is None else self._next(session, scheduler)
        if plan is None:
            self._session = None
        return plan

    def run(self, plan: Plan, proposal: Proposal) -> Done:
        """Launch the plan's step, if it has entries, and return the result of the oldest step that is due."""
        session = self._session
        assert session is not None, "the plan is not of this runner"
        # Streams and graphs are those of the current device.
        with torch.cuda.device_of(self.runner.cache.keys), self.runner.meter.verifying:  # type: ignore[no-untyped-call]
            if plan.decode:
                self._launch(session)
                session.flying.append((plan, proposal))
            seated = [request for request in session.requests if request.row is not None]
            if plan.decode and len(session.flying) < AHEAD:
                return Done(Plan(captured=True), proposal._replace(makers=[]), [], seated)
            emitted = session.readback.pop()
        plan, proposal = session.flying.popleft()
        results = {place: row for place, row in enumerate(self._results(session, emitted)) if row is not None}
        plan = plan._replace(decode=tuple(plan.decode[place] for place in results))
        makers = [proposal.makers[place] for place in results]
        return Done(plan, proposal._replace(makers=makers), list(results.values()), seated)

    def _unchanged(self, session: _Session, scheduler: Scheduler) -> bool:
        same = len(session.requests) == len(scheduler.running)
        same = same and all(a is b for a, b in zip(session.requests, scheduler.running, strict=True))
        same = same and not any(session.proposer.outgrown(_row(request)) for request in session.requests)
        return same and not scheduler.may_admit

    def _enter(self, scheduler: Scheduler) -> _Session | None:
        """Start a session of the running rows; None if one of them needs work on the host."""
        requests = tuple(scheduler.running)
        methods = {request.method for request in requests}
        if scheduler.may_admit or len(methods) != 1 or not all(_on_device(request) for request in requests):
            return None
        method = methods.pop()
        proposer = self.proposers.get(method)
        batch = 1 << (len(requests) - 1).bit_length()
        if proposer is None or (proposer.depth and self._may_draft and not self._may_draft(len(requests))):
            return None
        if batch * proposer.nodes > self.max_num_tokens:
            return None
        fresh = Sampling.of([requests[slot % len(requests)].sampling for slot in range(batch)])
        kind, sampling = self._filled(fresh)
        graph_slots, readback = self._seats(method, proposer, batch)
        graph_slots.load(
            [_row(request) for request in requests],
            [request.tokens[-1] for request in requests],
            self.runner.cache.table.spare,
            [request.committed for request in requests],
            [request.max_draft_len for request in requests],
            [request.room for request in requests],
            [proposer.enter(_row(request)) for request in requests],
        )
        return _Session(requests, method, proposer, graph_slots, sampling, kind, readback)

    def _seats(self, method: str, proposer: Proposer, batch: int) -> tuple[GraphSlots, Readback]:
        if (method, batch) not in self._graph_slots:
            decoder = self.runner.decoder
            width = len(proposer.taps) * decoder.config.hidden_size
            graph_slots = GraphSlots.empty(
                batch, proposer.depth, proposer.nodes, self.runner.device, width, decoder.dtype
            )
            self._graph_slots[method, batch] = graph_slots, Readback(graph_slots.emitted, AHEAD)
        return self._graph_slots[method, batch]

    def _filled(self, fresh: Sampling) -> tuple[tuple[object, ...], Sampling]:
        """Kind of sampling, and the tensors that are kept for it, filled from `fresh`."""
        tensors, kind = _leaves(fresh)
        kept = self._sampling.setdefault(kind, fresh)
        if kept is not fresh:
            for old, new in zip(_leaves(kept)[0], tensors, strict=True):
                old.copy_(new)
        return kind, kept

    def _next(self, session: _Session, scheduler: Scheduler) -> Plan | None:
        """Next step of the session; None if no row needs one, or if there are too few pages."""
        flying, proposer = len(session.flying), session.proposer
        if all(request.room <= flying for request in session.requests):
            return None
        # The launched steps may already emit the last tokens.
        limits = [len(request.tokens) + request.room for request in session.requests]
        known = [len(request.tokens) - 1 + flying * (proposer.depth + 1) for request in session.requests]
        useful = session.slots = [min(n, limit) + proposer.slots for n, limit in zip(known, limits, strict=True)]
        if proposer.chain:  # nodes past the last token of a request go to the sink
            useful = [min(n, limit) for n, limit in zip(useful, limits, strict=True)]
        pages = scheduler.reserve([_row(request) for request in session.requests], useful)
        if pages is None:
            return None
        return Plan(
            pages=tuple((row, tuple(new)) for row, new in pages.items()),
            decode=tuple(self._decode(request, session) for request in session.requests),
            captured=True,
        )

    def _decode(self, request: Request, session: _Session) -> Decode:
        """Entry of a request in a step; `start` does not count tokens of launched steps."""
        limit = min(request.draft_limit, session.proposer.depth)
        methods, reason = ((session.method,), "") if limit else ((), "end")
        return Decode(_row(request), limit, methods, reason, request.committed)

    def _launch(self, session: _Session) -> None:
        """Launch the next step."""
        keys = max(LEAST_KEYS, 1 << (max(session.slots) - 1).bit_length())
        decoder = self.runner.decoder
        key = GraphKey(
            session.method, session.proposer.depth, session.graph_slots.batch, keys, session.kind,
            decoder.dtype, decoder.embed.deterministic,
        )  # fmt: skip
        work = partial(decode_step, self.runner, session.proposer, session.graph_slots, session.sampling, keys)
        self.graphs.run(key, work, (*session.graph_slots.state, *session.sampling.history))
        session.readback.push(session.graph_slots.emitted)

    def _results(self, session: _Session, emitted: Sequence[Sequence[int]]) -> list[RowResult | None]:
        """Result of each request; None if it ended before, and its tokens are discarded."""
        results: list[RowResult | None] = []
        for request, (count, *rest) in zip(session.requests, emitted, strict=False):
            if request.finish_reason is not None or request.row is None:
                results.append(None)
                continue
            start, most = request.committed, session.proposer.depth + 1
            if rest[0] == PADDING:
                request.fail(not_finite())
                results.append(RowResult(request, start, (), None, 0, 0, Emission.end(request), prompt=False))
                continue
            tokens, depths = rest[:count], [depth for depth in rest[most:] if depth]
            emission = request.emit(tokens, count - 1, depths, [])
            committed = [request.tokens[start], *tokens[:-1]][: len(emission.token_ids) + 1]
            session.proposer.committed(request.row, start, committed)
            longest = max(depths, default=0)
            results.append(RowResult(request, start, committed, None, longest, count - 1, emission, prompt=False))
        return results


def _leave(session: _Session) -> None:
    """Return the rows of unfinished requests to the host."""
    for request, features in zip(session.requests, session.graph_slots.committed_features(), strict=False):
        if request.row is not None and request.finish_reason is None:
            session.proposer.leave(request.row, features)


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row


def _on_device(request: Request) -> bool:
    """True if a request needs the host only to emit its tokens."""
    if request.reports_steps or request.params.logprobs is not None:
        return False
    return request.remaining == 1 and not request.sampling.on_host


def _leaves(sampling: Sampling) -> tuple[list[Tensor], tuple[object, ...]]:
    """Tensors of the sampling of a batch, and their names, shapes and dtypes with all other values."""
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
