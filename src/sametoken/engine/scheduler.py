"""Choice of the rows of the next step and of their tokens: continuous batching, chunked prefill, preemption.

The scheduler has lengths and pages, but no tensors. A sequence with one token left to compute decodes, and may have a
draft; otherwise a chunk of it is prefilled. There is no other state: a preempted sequence is prefilled again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sametoken.control.choice import RequestedDraft
from sametoken.engine.blocks import BlockManager, PrefixMatch
from sametoken.engine.pace import Pace
from sametoken.engine.plan import Admission, Decode, Plan, PromptPiece
from sametoken.engine.report import Done
from sametoken.engine.request import Emission, Request


class Drafts(Protocol):
    """Interface of drafts for the scheduler."""

    def choose(self, pending: Sequence[Request], beside: int) -> Sequence[RequestedDraft]:
        """Requested draft of each pending request, in a step that also reads `beside` prompt tokens."""
        ...

    def slots(self, methods: Sequence[str], limit: int, joined: bool = False) -> int:
        """Number of cache slots past the pending token for a draft; also the greatest number of its tokens."""
        ...

    def draft_cached(self, request: Request, *, catch_up: bool = False) -> int:
        """Number of leading tokens of a running request whose keys and values of the drafter are in its pages.

        Args:
            request: running request.
            catch_up: true if the drafter first reads all committed tokens.
        """
        ...


class Scheduler:
    """Scheduler of requests, in order of arrival; the newest sequence is preempted when pages run out.

    Every other step reads the oldest prompt first, the steps between read the shortest: a long prompt delays no other
    prompt, and many short ones at most double its time. Of equal prompts one is read; the others share its pages.

    Args:
        blocks: page pool.
        max_batch_size: number of rows.
        max_num_tokens: greatest number of tokens of one step.
        pace: limit of the prompt tokens of a step that also decodes.
        drafts: requested drafts, and their numbers of cache slots.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        pace: Pace,
        drafts: Drafts,
    ) -> None:
        self.blocks = blocks
        self.max_num_tokens, self._pace = max_num_tokens, pace
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._drafts = drafts
        self._free_rows = list(range(max_batch_size - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}
        self._oldest_last = False

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def may_admit(self) -> bool:
        """True if a request waits and a row is free."""
        return bool(self.waiting and self._free_rows)

    def reserve(self, rows: Sequence[int], slots: Sequence[int]) -> dict[int, list[int]] | None:
        """Take pages for `slots` slots of each row and return the new pages by row; take none if there are too few."""
        grown: dict[int, list[int]] = {}
        if all(self._grow(row, count, grown) for row, count in zip(rows, slots, strict=True)):
            return grown
        for row, pages in grown.items():
            del self._owned[row][-len(pages) :]
            self.blocks.free(pages)
        return None

    @property
    def free_rows(self) -> list[int]:
        """Rows without a request."""
        return sorted(self._free_rows)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """End a request in any state; its full pages stay cached for their prefix."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._vacate(request)

    def _vacate(self, request: Request) -> None:
        row = request.row
        assert row is not None
        self._publish(request)
        self.blocks.free(self._owned.pop(row))
        self.running.remove(request)
        self._free_rows.append(row)
        request.row = None
        request.committed = 0

    def _publish(self, request: Request) -> None:
        """Offer the full pages of a running request to others, with the draft's keys and values if they are present.

        The drafter first reads all committed tokens if a request with an equal prompt waits.
        """
        if request.shares_prefix and request.error is None and request.row is not None:
            committed, cached = request.committed, 0
            if request.draft_kv:
                catch_up = any(self._same_prompt(request, each) for each in self.waiting)
                cached = min(committed, self._drafts.draft_cached(request, catch_up=catch_up))
            kept = request.tokens[:committed]
            self.blocks.publish(kept, self._owned[request.row], request.draft_kv, cached, salt=request.salt)

    def advance(self, done: Done) -> list[Emission]:
        """Update the position of each row, offer the pages of finished prompts, and return the emissions."""
        for row in done.rows:
            row.request.committed = row.start + len(row.committed)
            if row.prompt and row.emission is not None:
                self._publish(row.request)
        return [row.emission for row in done.rows if row.emission is not None]

    def plan(self) -> Plan:
        """Plan the next step and take its pages."""
        preempted: list[int] = []
        grown: dict[int, list[int]] = {}
        decode: list[Decode] = []
        pending = [request for request in self.running if request.remaining == 1]
        budget = self.max_num_tokens - len(pending)
        # Drafts leave room for prompts; otherwise streams would exclude new requests as long as they run.
        expected = len(pending) < len(self.running) or bool(self.waiting and self._free_rows)
        mixed = self._pace.tokens()
        reserved = min(mixed, self.max_num_tokens // 2) if expected else 0
        for request, requested in zip(pending, self._drafts.choose(pending, reserved), strict=True):
            if request.row is None or not self._make_room(request, preempted, grown):
                continue
            decode.append(self._decode(request, requested, budget - reserved, grown))
            budget -= self._drafts.slots(decode[-1].methods, decode[-1].limit, decode[-1].joined)
        # A row that was preempted for a later one must not decode.
        rows = {request.row: request for request in self.running}
        decode = [item for item in decode if item.row in rows]
        for place, item in enumerate(decode):
            decode[place] = self._with_siblings(item, rows[item.row], budget - reserved, grown)
            budget -= decode[place].siblings
        admitted: list[Admission] = []
        prefill: list[PromptPiece] = []
        budget = min(budget, mixed) if decode else budget
        # A request that was just preempted must not return in the same step.
        self._read(budget, admitted, prefill, grown, admit=not preempted)
        pages = tuple((row, tuple(new)) for row, new in grown.items() if new and row in self._owned)
        return Plan(tuple(preempted), tuple(admitted), pages, tuple(decode), tuple(prefill))

    def _read(
        self, budget: int, admitted: list[Admission], prefill: list[PromptPiece], grown: dict[int, list[int]],
        *, admit: bool,
    ) -> None:  # fmt: skip
        """Choose the prompts that are read, and assign rows to waiting requests."""
        prompts = [request for request in self.running if request.remaining > 1]
        oldest, others = prompts[:1], sorted(prompts[1:], key=lambda request: request.remaining)
        # Pieces are short while other prompts wait.
        piece = self._pace.most if others or self.may_admit else budget
        if not self._oldest_last:
            budget -= sum(self._chunk(request, min(piece, budget), prefill, grown) for request in oldest)
        for request in others:
            budget -= self._chunk(request, budget, prefill, grown)
        if admit:
            budget = self._admit(budget, admitted, prefill, grown)
        if self._oldest_last:
            budget -= sum(self._chunk(request, min(piece, budget), prefill, grown) for request in oldest)
        self._oldest_last ^= bool(prefill)

    def _grow(self, row: int, tokens: int, grown: dict[int, list[int]]) -> bool:
        """Take pages for `tokens` tokens of a row; take none and return False if there are too few."""
        owned = self._owned[row]
        missing = self.blocks.pages_for(tokens) - len(owned)
        if missing <= 0:
            return True
        new = self.blocks.allocate(missing, owned[-1] if owned else None)
        if new is None:
            return False
        owned.extend(new)
        grown.setdefault(row, []).extend(new)
        return True

    def _make_room(self, request: Request, preempted: list[int], grown: dict[int, list[int]]) -> bool:
        """Make room for a pending token by preempting the newest rows; return False if the request was preempted."""
        while request.row is not None and not self._grow(request.row, len(request.tokens), grown):
            victim = self.running[-1]
            row = victim.row
            assert row is not None
            preempted.append(row)
            victim.preemptions += 1
            grown.pop(row, None)
            self._vacate(victim)
            self.waiting.appendleft(victim)
        return request.row is not None

    def _decode(self, request: Request, requested: RequestedDraft, budget: int, grown: dict[int, list[int]]) -> Decode:
        """Decode entry, with as much of a requested draft as tokens of the step and pages allow."""
        row, limit = request.row, requested.limit and min(requested.limit, request.draft_limit)
        assert row is not None
        while limit:
            slots = self._drafts.slots(requested.methods, limit, requested.joined)
            if slots <= budget and self._grow(row, len(request.tokens) + slots, grown):
                start, siblings = request.committed, requested.siblings
                return Decode(row, limit, requested.methods, "", start, requested.joined, siblings)
            limit -= 1
        return Decode(row, 0, (), requested.reason or "room", request.committed)

    def _with_siblings(self, item: Decode, request: Request, budget: int, grown: dict[int, list[int]]) -> Decode:
        """Decode entry, with as many siblings as the drafts of other rows and the end of the context allow."""
        siblings = min(item.siblings, budget, request.room - 1 - item.limit)
        slots = len(request.tokens) + self._drafts.slots(item.methods, item.limit, item.joined) + siblings
        return item._replace(siblings=siblings if siblings > 0 and self._grow(item.row, slots, grown) else 0)

    def _chunk(self, request: Request, budget: int, prefill: list[PromptPiece], grown: dict[int, list[int]]) -> int:
        """Plan the next piece of a prompt; return the number of its tokens."""
        count = min(request.remaining, budget)
        row = request.row
        if row is None or count <= 0 or not self._grow(row, request.committed + count, grown):
            return 0
        start = request.committed
        tokens = tuple(request.tokens[start : start + count])
        prefill.append(PromptPiece(row, start, tokens, count == request.remaining))
        return count

    def _admit(
        self, budget: int, admitted: list[Admission], prefill: list[PromptPiece], grown: dict[int, list[int]]
    ) -> int:
        for request in list(self.waiting) if self._free_rows else ():
            if not self._free_rows or budget <= 0:
                break
            if self._awaits(request):
                continue
            pages, draft_cached = self._reused(request)
            # The whole sequence and its lookahead must fit, or the request would be preempted before its first token.
            slots = len(request.tokens) + 1 + max(1, self._drafts.slots(request.methods, request.draft_limit))
            if self.blocks.pages_for(slots) - len(pages) > self.blocks.available:
                self.blocks.free(pages)
                break
            self.waiting.remove(request)
            row = self._free_rows.pop()
            request.row, request.committed = row, len(pages) * self.blocks.page_size
            self._owned[row] = list(pages)
            grown[row] = list(pages)
            self.running.append(request)
            admitted.append(Admission(row, request.id, request.committed, draft_cached * self.blocks.page_size))
            self._grow(row, len(request.tokens) + 1, grown)
            budget -= self._chunk(request, budget, prefill, grown)
        return budget

    def _awaits(self, request: Request) -> bool:
        """True if running requests with an equal prompt have yet to compute full pages of it."""
        size, alike = self.blocks.page_size, [each for each in self.running if self._same_prompt(each, request)]
        pages = (len(request.prompt_ids) - 1) // size if self.blocks.reuse else 0
        return bool(alike) and all(each.remaining > 1 and each.committed // size < pages for each in alike)

    @staticmethod
    def _same_prompt(one: Request, other: Request) -> bool:
        shared = one.shares_prefix and other.shares_prefix and one.salt == other.salt
        return shared and one.prompt_ids == other.prompt_ids

    def _reused(self, request: Request) -> PrefixMatch:
        """Shared pages that hold the beginning of the request."""
        if not request.shares_prefix:
            return PrefixMatch([], 0)
        return self.blocks.match(request.tokens, request.draft_kv, complete=request.complete, salt=request.salt)
