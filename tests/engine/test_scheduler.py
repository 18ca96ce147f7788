"""Scheduler: every plan can be replayed from its own data, keeps its limits, starves nobody and comes to an end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sametoken.control.choice import RequestedDraft
from sametoken.engine.blocks import BlockManager
from sametoken.engine.detokenize import Detokenizer
from sametoken.engine.pace import Pace
from sametoken.engine.plan import Plan
from sametoken.engine.report import Done, Proposal, RowResult
from sametoken.engine.request import Request
from sametoken.engine.scheduler import Scheduler
from sametoken.options.sampling import SamplingParams
from sametoken.speculation.sampling import RowSampling

VOCAB, PAGE, CONTEXT = 8, 4, 40
ROWS, BUDGET, MIXED, NODES, LAG = 4, 16, 6, 5, 3
PAGES = 1 + (CONTEXT + 2 + NODES) // PAGE  # the sink, and hardly more than one sequence of full length
NUMBERS = itertools.count()


class Mute:
    """A tokenizer whose tokens have no text."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


def request(prompt: Sequence[int], max_tokens: int, *, drafts: int = 0, complete: bool = False) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return Request(
        id=next(NUMBERS), index=0, choice=0, prompt=None, prompt_ids=list(prompt), params=params,
        sampling=RowSampling(params, 0, prompt, VOCAB), detokenizer=Detokenizer(Mute(), prompt, params),
        stop_ids=frozenset(), eos_ids=frozenset(), method="draft" if drafts else "none",
        methods=("draft",) if drafts else (), adaptive=False, draft_kv="draft" if drafts else "", complete=complete,
        max_draft_len=drafts, max_seq_len=CONTEXT,
    )  # fmt: skip


class Drafts:
    """Everybody drafts as much as it may; a tree takes `per_token` slots a level, `LAG` tokens are not read yet."""

    def __init__(self, per_token: int = 1, siblings: int = 0) -> None:
        self.per_token, self.siblings = per_token, siblings

    def choose(self, pending: Sequence[Request], beside: int) -> list[RequestedDraft]:
        reasons = ["" if r.draft_limit else "end" for r in pending]
        return [
            RequestedDraft(r.draft_limit, r.methods, reason, siblings=self.siblings)
            for r, reason in zip(pending, reasons, strict=True)
        ]

    def slots(self, methods: Sequence[str], limit: int, joined: bool = False) -> int:
        return min(NODES, self.per_token * limit) if methods else 0

    def draft_cached(self, request: Request, *, catch_up: bool = False) -> int:
        return max(0, request.committed - LAG)


def scheduler(
    pages: int = PAGES, *, budget: int = BUDGET, rows: int = ROWS, per_token: int = 1, siblings: int = 0
) -> Scheduler:
    return Scheduler(
        BlockManager(pages, PAGE), max_batch_size=rows, max_num_tokens=budget, pace=Pace(1.0, MIXED),
        drafts=Drafts(per_token, siblings),
    )  # fmt: skip


def execute(planner: Scheduler, plan: Plan, rows: dict[int, Request], accept: int = 0, token: int = 1) -> list[Request]:
    """What an engine would do with a plan: compute, emit, advance, return who ended."""
    results = []
    for row, limit, _, _, start, *_ in plan.decode:
        accepted, pending = min(accept, limit), rows[row].tokens[-1]
        emission = rows[row].emit([token] * (accepted + 1), accepted, list(range(1, limit + 1)), [])
        committed = [pending, *[token] * min(accepted, len(emission.token_ids))]
        results.append(RowResult(rows[row], start, committed, None, limit, accepted, emission, prompt=False))
    for row, start, tokens, last in plan.prefill:
        drawn = rows[row].emit([token], 0, [], []) if last else None
        results.append(RowResult(rows[row], start, tokens, None, 0, 0, drawn, prompt=True))
    planner.advance(Done(plan, Proposal((), (), []), results, []))
    return [rows[row] for row in sorted(rows) if rows[row].finish_reason is not None]


class Serving(RuleBasedStateMachine):
    """Requests come, are cancelled and end; `rows` and `pages` know nothing but what the plans say."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(per_token=2, siblings=4)
        self.alive: dict[int, Request] = {}
        self.rows: dict[int, Request] = {}
        self.pages: dict[int, list[int]] = {}
        self.seniority: dict[int, int] = {}  # when a row was last admitted
        self.content: dict[int, list[int]] = {}  # what lies in a full page
        self.with_draft: dict[int, str] = {}  # pages that hold a drafter's keys and values of that

    @rule(
        beginning=st.integers(1, 3), length=st.integers(1, 36), count=st.integers(1, 30),
        drafts=st.sampled_from([0, 3]), complete=st.booleans(),
    )  # fmt: skip
    def add(self, beginning: int, length: int, count: int, drafts: int, complete: bool) -> None:
        new = request([beginning] * length, count, drafts=drafts, complete=complete and drafts > 0)
        self.alive[new.id] = new
        self.scheduler.add(new)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(self.alive[data.draw(st.sampled_from(sorted(self.alive)))])

    def leave(self, gone: Request) -> None:
        del self.alive[gone.id]
        if gone.row is not None:
            del self.rows[gone.row], self.pages[gone.row], self.seniority[gone.row]
        self.scheduler.finish(gone)
        assert gone.row is None

    @rule(accept=st.integers(0, 3), token=st.integers(1, 2))
    def step(self, accept: int, token: int) -> None:
        waiting = [waits.id for waits in self.scheduler.waiting]
        plan = self.scheduler.plan()
        self.replay(plan, waiting)
        self.judge(plan)
        assert plan.decode or plan.prefill or not self.alive, "nothing moves although somebody waits"
        finished = execute(self.scheduler, plan, self.rows, accept, token)
        for row, each in self.rows.items():
            for end in range(PAGE, each.committed + 1, PAGE):
                page = self.pages[row][end // PAGE - 1]
                self.content[page] = each.tokens[:end]
                if each.draft_kv and end <= each.committed - LAG:
                    self.with_draft[page] = each.draft_kv
        for ended in finished:
            self.leave(ended)

    def replay(self, plan: Plan, waiting: list[int]) -> None:
        for row in plan.preempted:
            assert self.seniority[row] == max(self.seniority.values()), "an older row had to go first"
            del self.rows[row], self.pages[row], self.seniority[row]
        admitted = [admission.id for admission in plan.admitted]
        running = [each.prompt_ids for each in (*self.rows.values(), *(self.alive[number] for number in admitted))]
        passed = waiting[: waiting.index(admitted[-1]) + 1 if admitted else 0]
        assert admitted == [number for number in passed if number in admitted]
        assert all(self.alive[number].prompt_ids in running for number in passed if number not in admitted)
        for row, number, cached, draft_cached in plan.admitted:
            assert 0 <= draft_cached <= cached
            assert draft_cached == cached or not self.alive[number].complete
            assert row not in self.rows
            assert cached % PAGE == 0
            assert cached < len(self.alive[number].tokens)
            self.rows[row], self.pages[row] = self.alive[number], []
            self.seniority[row] = max(self.seniority.values(), default=0) + 1
        reused = {row: cached // PAGE for row, _, cached, _ in plan.admitted}
        with_draft = {row: draft_cached // PAGE for row, _, _, draft_cached in plan.admitted if self.rows[row].draft_kv}
        for row, new in plan.pages:
            for page in new[reused.get(row, 0) :]:
                self.content.pop(page, None)
                self.with_draft.pop(page, None)
            self.pages[row].extend(new)
        for row, count in reused.items():
            for i, page in enumerate(self.pages[row][:count]):
                expected = self.rows[row].tokens[: (i + 1) * PAGE]
                assert self.content.get(page) == expected, "a page was reused that does not hold this prefix"
                assert i >= with_draft.get(row, 0) or self.with_draft.get(page) == self.rows[row].draft_kv

    def judge(self, plan: Plan) -> None:
        used = [item.row for item in plan.decode] + [chunk.row for chunk in plan.prefill]
        assert len(used) == len(set(used))
        computed = sum(len(chunk.tokens) for chunk in plan.prefill)
        drafts = Drafts(2)
        nodes = sum(drafts.slots(item.methods, item.limit) + item.siblings for item in plan.decode)
        assert len(plan.decode) + nodes + computed <= BUDGET
        assert not plan.decode or computed <= MIXED
        pending = {row for row, each in self.rows.items() if each.remaining == 1}
        assert pending <= set(used), "a running stream emits in every step"
        for row, limit, methods, reason, start, _, siblings in plan.decode:
            assert start == self.rows[row].committed
            assert bool(limit) == bool(methods) == (not reason)
            assert self.rows[row].remaining == 1
            assert limit <= self.rows[row].draft_limit
            assert 0 <= siblings <= (4 if limit else 0)
            needed = len(self.rows[row].tokens) + drafts.slots(methods, limit) + siblings
            assert needed <= CONTEXT + NODES
            assert len(self.pages[row]) * PAGE >= needed
        for row, start, tokens, last in plan.prefill:
            end = start + len(tokens)
            assert start == self.rows[row].committed
            assert len(tokens) >= 1
            assert list(tokens) == self.rows[row].tokens[start:end]
            assert last == (end == len(self.rows[row].tokens))
            assert len(self.pages[row]) * PAGE >= end

    @invariant()
    def nobody_writes_what_another_reads(self) -> None:
        self.scheduler.blocks.check()
        assert set(self.rows) == {each.row for each in self.alive.values() if each.row is not None}
        for (row, one), (other, there) in itertools.combinations(sorted(self.pages.items()), 2):
            for page in set(one) & set(there):
                end = (one.index(page) + 1) * PAGE
                assert one.index(page) == there.index(page)
                assert self.rows[row].tokens[:end] == self.rows[other].tokens[:end]
                assert end <= min(self.rows[row].committed, self.rows[other].committed)

    def teardown(self) -> None:
        for _ in range(40 * (1 + len(self.alive))):
            if not self.alive:
                break
            self.step(0, 1)
        assert not self.alive, "it never ends"
        assert not self.scheduler.busy
        assert self.scheduler.blocks.available == PAGES - 1


Serving.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestServing = Serving.TestCase


def test_a_long_prompt_comes_in_pieces_beside_a_running_stream() -> None:
    planner = scheduler(60)
    stream, long = request([1], 30), request([2] * 35, 2)
    planner.add(stream)
    rows = {0: stream}
    execute(planner, planner.plan(), rows)
    planner.add(long)
    pieces = []
    while long.first_token is None:
        plan = planner.plan()
        rows |= {row: long for row, *_ in plan.admitted}
        assert [item.row for item in plan.decode] == [0]
        pieces += [len(chunk.tokens) for chunk in plan.prefill]
        execute(planner, plan, rows)
    assert pieces == [6, 6, 6, 6, 6, 5]


def test_a_prompt_alone_takes_the_whole_step() -> None:
    planner = scheduler(60)
    planner.add(request([2] * 35, 2))
    assert [len(chunk.tokens) for chunk in planner.plan().prefill] == [BUDGET]


def test_drafts_leave_room_for_prompts() -> None:
    """Three rows could draft away the whole step; then nobody new would ever come in."""
    planner = scheduler(60)
    streams = [request([i], 30, drafts=5) for i in range(3)]
    for stream in streams:
        planner.add(stream)
    rows = dict(enumerate(streams))
    execute(planner, planner.plan(), rows)
    assert sum(item.limit for item in planner.plan().decode) == BUDGET - 3
    planner.add(request([7] * 20, 2))
    plan = planner.plan()
    assert sum(item.limit for item in plan.decode) == BUDGET - 3 - MIXED
    assert [len(chunk.tokens) for chunk in plan.prefill] == [MIXED]


def test_a_sequence_that_cannot_have_its_lookahead_waits() -> None:
    """Or it would be preempted before it says a word."""
    planner = scheduler(1 + 5, per_token=2)  # 20 slots
    planner.add(request([1] * 7, 9, drafts=3))
    planner.add(request([2] * 7, 9, drafts=3))
    assert [len(chunk.tokens) for chunk in planner.plan().prefill] == [7]
    assert len(planner.waiting) == 1


def test_without_pages_for_a_long_draft_a_row_makes_a_short_one() -> None:
    planner = scheduler(1 + 5, per_token=2)  # 20 slots
    lone = request([1] * 9, 11, drafts=3)
    planner.add(lone)
    rows = {0: lone}
    execute(planner, planner.plan(), rows)
    seen = []
    while lone.finish_reason is None:
        plan = planner.plan()
        seen.append((len(lone.tokens), plan.decode[0].limit, plan.decode[0].reason))
        execute(planner, plan, rows)
    # Three levels take five slots, two four, one two; and the last token needs no draft.
    assert [limit for _, limit, _ in seen] == [3] * 6 + [2, 1, 1, 0]
    assert seen[-1][2] == "end"


def test_a_tree_is_charged_its_nodes() -> None:
    planner = scheduler(60, budget=10, per_token=2)
    streams = [request([i], 30, drafts=2) for i in range(3)]
    for stream in streams:
        planner.add(stream)
    execute(planner, planner.plan(), dict(enumerate(streams)))
    assert [(item.limit, item.reason) for item in planner.plan().decode] == [(2, ""), (1, ""), (0, "room")]


def test_a_drafter_that_needs_its_kv_reuses_only_pages_that_hold_it() -> None:
    planner = scheduler(60, budget=40)
    first = request([1] * 20, 2, drafts=3)
    planner.add(first)
    execute(planner, planner.plan(), {0: first})
    planner.finish(first)  # 20 tokens committed, 17 of them with the drafter's keys and values
    found = {}
    for name, options in (("plain", {}), ("any", {"drafts": 3}), ("whole", {"drafts": 3, "complete": True})):
        planner.add(request([1] * 21, 2, **options))  # type: ignore[arg-type]
        found[name] = planner.plan().admitted[0]
    assert {name: (seen.cached, seen.draft_cached) for name, seen in found.items()} == {
        "plain": (20, 20), "any": (20, 16), "whole": (16, 16),
    }  # fmt: skip


def test_equal_prompts_are_read_once() -> None:
    """Those that wait share the full pages as soon as the first has read them, and read the rest themselves."""
    planner = scheduler(60, budget=8, rows=5)
    choices = [request([3] * 18, 5) for _ in range(4)]
    other = request([4] * 3, 5)
    for each in (*choices, other):
        planner.add(each)
    rows: dict[int, Request] = {}
    read: list[list[tuple[int, int]]] = []
    for _ in range(4):
        plan = planner.plan()
        rows |= {row: next(r for r in (*choices, other) if r.id == number) for row, number, *_ in plan.admitted}
        read.append([(rows[piece.row].id - choices[0].id, len(piece.tokens)) for piece in plan.prefill])
        execute(planner, plan, rows)
    assert read == [[(0, 8)], [(4, 3), (0, 5)], [(0, 5)], [(1, 2), (2, 2), (3, 2)]]
    owned = [planner._owned[choice.row] for choice in choices if choice.row is not None]
    assert len({tuple(pages[:4]) for pages in owned}) == 1
    assert len({page for pages in owned for page in pages}) == 4 + 4


def steps_to_first(sched: Scheduler, requests: list[Request]) -> list[int]:
    """Steps until each of the requests has emitted."""
    rows: dict[int, Request] = {}
    first: dict[int, int] = {}
    for step in range(1, 100):
        plan = sched.plan()
        rows |= {row: next(r for r in requests if r.id == number) for row, number, *_ in plan.admitted}
        for ended in execute(sched, plan, rows):
            del rows[ended.row if ended.row is not None else -1]
            sched.finish(ended)
        first |= {i: step for i, r in enumerate(requests) if r.output_ids and i not in first}
        if len(first) == len(requests):
            break
    return [first[i] for i in range(len(requests))]


def test_a_long_prompt_holds_up_neither_short_ones_nor_is_held_up_by_them() -> None:
    sched = scheduler(100, budget=8)
    first, *others = [request(range(length), 1) for length in (36, 5, 5, 5)]
    for each in (first, *others):
        sched.add(each)
    long, *short = steps_to_first(sched, [first, *others])
    assert max(short) <= 5  # fifteen tokens, eight in every other step
    assert long <= 8  # 36 tokens, eight a step at half the time or what the others leave


def test_siblings_get_what_all_other_drafts_leave() -> None:
    planner = scheduler(60, siblings=4)
    streams = [request([1 + row], 30, drafts=3) for row in range(3)]
    for stream in streams:
        planner.add(stream)
    execute(planner, planner.plan(), dict(enumerate(streams)))
    plan = planner.plan()
    assert [(item.limit, item.siblings) for item in plan.decode] == [(3, 4), (3, 0), (3, 0)]  # of 16 tokens
