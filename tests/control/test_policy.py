"""The controller as arithmetic: the best choice by brute force, and whole runs in a world with known costs and luck."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from sametoken.control.acceptance import HOPE, Acceptance, Gate, united
from sametoken.control.choice import POWER, ChosenLengths, DecodingRow, RequestedDraft, StepBatch, cheapest
from sametoken.control.cost import STRIDE, Costs, Curve, Measured
from sametoken.control.policy import KEPT, Policy
from sametoken.model.expert_config import ExpertConfig

LONGEST = 8
FLAT = {2: 1.0, 16: 1.0, 32: 1.6, 64: 3.0}  # a kernel that is flat up to 16 rows
STEEP = {2: 1.0, 64: 16.0}


def measured(step: Mapping[int, float] = FLAT, draft: float = 0.06, feed: float = 0.002) -> Measured:
    flat = {"model": {1: draft, 64: draft}}
    return Measured(step, 0.0, 0.0, flat, flat, {"model": feed})


def runs_model(method: str) -> bool:
    return method == "model"


def slots(method: str, limit: int) -> int:
    return 3 * limit if method == "tree" else limit


@dataclass
class World:
    """Rows whose guesses come true by chance, and a clock that only knows the true costs.

    `chances` per method: that a guess comes true if those before did; `offers`: that the method has a guess at all.
    `relation` of methods: "alone" (luck of its own), "together" (right at the same places) or "apart" (the model is
    right where the others are not, as far as chances allow).
    """

    chances: dict[str, float]
    batch: int = 1
    costs: Measured = field(default_factory=measured)
    offers: dict[str, float] = field(default_factory=dict)
    methods: tuple[str, ...] = ("model",)
    backlog: int = 0  # tokens that the model has not read when a row begins
    room: int = 500
    adaptive: bool = True
    schedule: dict[int, int] | None = None
    belief: Measured | None = None  # what the policy was told of the costs, if not the truth
    work: Callable[[float], float] = float  # what it was told of how they grow
    least: int = 2  # tokens of a forward
    relation: str = "alone"

    def __post_init__(self) -> None:
        self.luck = random.Random(0)
        self.policy = Policy(slots, runs_model, LONGEST, self.schedule)
        self.policy.costs = Costs(self.belief or self.costs, self.work)
        self.truth = Costs(self.costs)
        self.seconds = self.tokens = self.plain_seconds = 0.0
        self.used: list[RequestedDraft] = []
        self.unread = [self.backlog] * self.batch

    def rows(self) -> list[DecodingRow]:
        return [
            DecodingRow(i, self.methods, LONGEST, self.adaptive, 100, self.unread[i], self.room)
            for i in range(self.batch)
        ]

    def run(self, forwards: int) -> list[list[int]]:
        """The limits chosen in each forward."""
        return [self.step() for _ in range(forwards)]

    def step(self) -> list[int]:
        requested = self.policy.choose(self.rows())
        nodes, drafting, read = 0, dict.fromkeys(self.methods, 0), 0
        for row, each in enumerate(requested):
            if any(map(runs_model, each.methods)):
                read, self.unread[row] = read + self.unread[row], 0
            accepts: dict[str, tuple[int, int]] = {}  # guesses and accepted ones by method
            common = [self.luck.random() for _ in range(LONGEST)]
            offered = False
            for method in sorted(each.methods, key=runs_model):
                if runs_model(method) and offered and not each.joined:
                    break
                drafting[method] += 1
                made = each.limit if self.luck.random() < self.offers.get(method, 1.0) else 0
                draws = common if self.relation != "alone" else [self.luck.random() for _ in common]
                if self.relation == "apart" and runs_model(method):
                    draws = [1.0 - draw for draw in draws]
                accepted = next((i for i in range(made) if draws[i] >= self.chances[method]), made)
                self.policy.learn([method], [row], [each.limit], [made], [accepted])
                accepts[method], offered = (made, accepted), offered or made > 0
                nodes += slots(method, made)
            longest, accepted = map(max, zip(*accepts.values(), strict=True)) if accepts else (0, 0)
            if len(accepts) > 1 and (each.joined or not any(map(runs_model, accepts))):
                self.policy.learn(list(accepts), [row], [each.limit], [longest], [accepted])
            self.tokens += accepted
        limit = max(each.limit for each in requested)
        size = max(self.least, self.batch + nodes)
        seconds = self.truth.step(size - self.batch, self.batch, 100)
        assert self.policy.costs is not None
        self.policy.costs.saw_step(nodes, self.batch, 100, seconds)
        for method, rows in drafting.items():
            draft = self.truth.draft(method, rows, limit)
            if rows:
                self.policy.costs.saw_draft(method, rows, limit, draft)
            seconds += draft + self.truth.feed(method, read)
        self.seconds += seconds
        self.plain_seconds += self.truth.step(max(self.least - self.batch, 0), self.batch, 100)
        self.tokens += self.batch
        self.used += requested
        return [each.limit for each in requested]

    @property
    def speed_up(self) -> float:
        """Tokens per second, over those of plain decoding."""
        plain = self.truth.step(max(self.least - self.batch, 0), self.batch, 100) / self.batch
        return self.tokens / self.seconds * plain

    def fixed(self, length: int) -> float:
        """The speed-up of a fixed length, from the true numbers."""
        chance = self.chances["model"]
        gain = sum(chance**k for k in range(1, length + 1))
        step = self.truth.step(max(self.least - self.batch, self.batch * length), self.batch, 100)
        plain = self.truth.step(max(self.least - self.batch, 0), self.batch, 100)
        return (1 + gain) * plain / (step + self.truth.draft("model", self.batch, length))


# --- the choice


def gains_of(chances: Sequence[Sequence[float]]) -> list[list[float]]:
    """Guesses expected to come true with paths of 1, 2, .. tokens, [R][L]."""
    return np.cumsum(np.cumprod(np.array(chances), axis=1), axis=1).tolist()  # type: ignore[no-any-return]


def by_count(seconds: Sequence[float]) -> Callable[[int, int], float]:
    """The price of steps that depends on how many guesses they have."""
    later = iter(seconds[1:])
    return lambda row, place: next(later)


@given(data=st.data(), rows=st.integers(1, 4), longest=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_the_choice_is_what_brute_force_finds(data: st.DataObject, rows: int, longest: int) -> None:
    """Of all lengths of all rows, where a step costs what its number of guesses costs."""
    row = st.lists(st.floats(0.001, 1), min_size=longest, max_size=longest)
    gains = gains_of(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    seconds = sorted(data.draw(st.lists(st.floats(0.1, 10), min_size=rows * longest + 1, max_size=99)))

    def wait(lengths: Sequence[int]) -> float:
        waits = [1 / (1 + (gains[i][n - 1] if n else 0.0)) for i, n in enumerate(lengths)]
        return sum(wait**POWER for wait in waits) * seconds[sum(lengths)] ** POWER

    best = min(map(wait, itertools.product(range(longest + 1), repeat=rows)))
    choice = cheapest(gains, seconds[0], by_count(seconds))
    assert wait(choice.lengths) <= best * (1 + 1e-9)
    assert choice.wait**POWER == pytest.approx(wait(choice.lengths))
    assert choice.seconds == seconds[sum(choice.lengths)]


@given(
    chances=st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted),
    level=st.floats(0, 1), row=st.floats(0, 1),
)  # fmt: skip
@settings(deadline=None)
def test_better_guesses_are_never_drafted_shorter(chances: list[float], level: float, row: float) -> None:
    def length(chance: float) -> int:
        seconds = [1 + (level + row) * count for count in range(LONGEST + 1)]
        return cheapest(gains_of([[chance] * LONGEST]), 1.0, by_count(seconds)).lengths[0]

    assert length(chances[0]) <= length(chances[1])


@given(
    limits=st.lists(st.tuples(st.integers(0, 2 * LONGEST), st.booleans()), min_size=1, max_size=6),
    chance=st.floats(0, 1), calibrated=st.booleans(),
    schedule=st.none() | st.dictionaries(st.integers(1, 6), st.integers(0, 2 * LONGEST), min_size=1),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_nobody_drafts_beyond_its_limits(
    limits: list[tuple[int, bool]], chance: float, calibrated: bool, schedule: dict[int, int] | None
) -> None:
    policy, luck = Policy(slots, runs_model, LONGEST, schedule), random.Random(1)
    policy.costs = Costs(measured()) if calibrated else None
    bound = LONGEST
    if schedule is not None:
        bound = min(LONGEST, next((schedule[size] for size in sorted(schedule) if size >= len(limits)), 0))
    for _ in range(20):
        rows = [DecodingRow(i, ("model", "host"), limit, free, 10, 0, 50) for i, (limit, free) in enumerate(limits)]
        for row, each in zip(rows, policy.choose(rows), strict=True):
            assert 0 <= each.limit <= min(row.limit, bound)
            assert bool(each.limit) == bool(each.methods) == (not each.reason)
            assert set(each.methods) <= set(row.methods)
            if not row.adaptive:
                assert each.limit == min(row.limit, bound)
            if each.reason in ("end", "batch"):
                assert (each.reason == "end") == (row.limit == 0)
            if each.limit:
                accepted = next((i for i in range(each.limit) if luck.random() >= chance), each.limit)
                policy.learn(each.methods[:1], [row.id], [each.limit], [each.limit], [accepted])


# --- whole runs


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("step", [FLAT, STEEP], ids=["flat", "steep"])
def test_without_acceptance_it_ends_at_nothing_and_costs_next_to_nothing(batch: int, step: dict[int, float]) -> None:
    world = World({"model": 0.0}, batch, measured(step))
    world.run(200)
    assert 1 - world.speed_up < 0.05  # learning included
    world.run(800)
    before, plain = world.seconds, world.plain_seconds
    later = world.run(1500)
    assert (world.seconds - before) / (world.plain_seconds - plain) < 1.008
    assert sum(any(limits) for limits in later) >= 3, "it never tried again"


@pytest.mark.parametrize("batch", [1, 2])
def test_with_perfect_acceptance_and_free_rows_it_takes_the_full_length(batch: int) -> None:
    step = {2: 1.0, 64: 1.0}
    assert World({"model": 1.0}, batch, measured(step, draft=0.01)).run(50)[-1] == [LONGEST] * batch


def test_a_busy_batch_drafts_little_and_an_idle_one_a_lot() -> None:
    steps = [World({"model": 0.8}, batch).run(150)[-20:] for batch in (1, 8, 32)]
    lengths = [statistics.median(max(limits) for limits in each) for each in steps]  # without trials
    assert lengths[0] >= 4 > lengths[1] >= 1 > lengths[2]


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 6, 32])
@pytest.mark.parametrize("step", [FLAT, STEEP], ids=["flat", "steep"])
def test_it_is_about_as_fast_as_the_best_fixed_length(chance: float, batch: int, step: dict[int, float]) -> None:
    world = World({"model": chance}, batch, measured(step))
    world.run(200)
    world.tokens = world.seconds = 0.0
    world.run(600)
    best = max(1.0, *(world.fixed(length) for length in range(1, LONGEST + 1)))
    assert world.speed_up > 0.95 * best


def test_it_finds_back_when_guesses_come_true_again() -> None:
    world = World({"model": 0.0})
    world.run(3000)
    world.chances["model"] = 0.9
    world.run(600)
    assert sum(limits[0] >= 2 for limits in world.run(50)) >= 49  # one may be a recall


def test_one_good_row_among_bad_ones_drafts_for_itself() -> None:
    policy = Policy(slots, runs_model, LONGEST)
    policy.costs = Costs(measured({2: 1.0, 64: 1.2}, draft=0.002))
    rows = [DecodingRow(i, ("model",), LONGEST, True, 100, 0, 500) for i in range(4)]
    for _ in range(400):
        for row, each in zip(rows, policy.choose(rows), strict=True):
            if each.limit:
                policy.learn(["model"], [row.id], [each.limit], [each.limit], [each.limit if row.id == 2 else 0])
    limits = [max(each) for each in zip(*([d.limit for d in policy.choose(rows)] for _ in range(2)), strict=True)]
    assert limits[2] >= 3 > max(limits[:2] + limits[3:])


def test_reading_a_long_backlog_must_pay() -> None:
    """A row that was never read by the draft model is read where the tokens to come are enough to pay for it."""
    costs = measured(feed=0.01)  # 5000 tokens take as long as 50 plain steps
    for room, pays in ((40, False), (1000, True)):
        world = World({"model": 0.9}, backlog=5000, room=room, costs=costs)
        assert (max(limits[0] for limits in world.run(6)) >= 4) == pays
    eager = World({"model": 0.9}, backlog=0)
    eager.run(50)
    assert max(limits[0] for limits in eager.run(2)) >= 4  # one may be a recall


def test_trials_read_no_more_than_they_may_lose() -> None:
    """Short answers never pay for a long prompt, so no trial reads it either."""
    world = World({"model": 0.9}, batch=4, backlog=5000, room=20, costs=measured(feed=0.01))
    world.run(60)
    assert world.unread == [5000] * 4
    assert world.seconds == pytest.approx(world.plain_seconds, rel=0.01)


PAIR = {1: 1.0, 33: 1.0 + 32 * 0.15}  # of a published pair on two cores: a token verified takes 0.15 of a plain step


def published(chance: float) -> World:
    """A draft that takes 0.42 of a plain step for a guess, and eight plain steps to read a prompt."""
    return World({"model": chance}, backlog=160, room=600, costs=measured(PAIR, draft=0.42, feed=0.05))


def test_a_draft_that_the_prior_rules_out_is_tried_after_its_prompt_was_read() -> None:
    """One guess in a thousand steps would tell nothing of a draft that pays from a chance of 0.85 on."""
    good = published(0.97)
    assert sum(limits[0] for limits in good.run(100)[-50:]) > 100
    assert good.speed_up > 1.1


def test_a_draft_that_pays_nothing_costs_a_prompt_and_some_guesses_once() -> None:
    bad = published(0.5)
    bad.run(200)
    assert bad.seconds - bad.plain_seconds < 24
    bad.tokens = bad.seconds = 0.0
    bad.run(2000)
    assert bad.speed_up > 0.99


def test_what_reading_costs_is_learned() -> None:
    costs = Costs(measured(feed=0.0))
    costs.saw_feed("model", 6400, 64.0)
    assert costs.feed("model", 1) == pytest.approx(0.01, rel=0.01)
    costs.saw_feed("model", 64, 64.0)  # a stolen time slice is little news
    assert costs.feed("model", 1) < 0.3


def test_a_wrong_first_measurement_is_corrected() -> None:
    """Told that drafts cost little and rows nothing, it learns what they cost, plain steps included."""
    belief = measured({2: 1.0, 16: 1.0, 64: 1.0}, draft=0.1)
    world = World({"model": 0.5}, 4, measured(STEEP, draft=0.3), belief=belief)
    world.run(1000)
    world.tokens = world.seconds = 0.0
    world.run(500)
    assert world.speed_up > 0.95


# --- rows that share a forward: seconds of a 1 B model by tokens, as measured

LARGE = {1: 0.040, 8: 0.058, 16: 0.087, 32: 0.142, 64: 0.216, 160: 0.438}


@dataclass
class Shared:
    """A closed batch: `batch` requests of `tokens` tokens that begin together, on a clock of true costs.

    Every other row's guesses come true with `good`, the others' with `bad`. `slow(seconds, tokens)` is the factor that
    the machine adds at this time to a forward of so many tokens.
    """

    batch: int
    good: float = 0.9
    bad: float = 0.2
    tokens: int = 64
    belief: dict[int, float] = field(default_factory=lambda: LARGE)
    slow: Callable[[float, int], float] = lambda seconds, tokens: 1.0
    step: float = LARGE[1]  # seconds of one token

    def __post_init__(self) -> None:
        self.policy, self.luck = Policy(slots, runs_model, LONGEST), random.Random(self.batch)
        scale = self.step / LARGE[1]
        self.truth = Curve({count: seconds * scale for count, seconds in LARGE.items()})
        believed = {count: seconds * scale for count, seconds in self.belief.items()}
        self.costs = Costs(measured(believed, 0.01 * self.step, 0.0))
        self.policy.costs = self.costs
        self.clock, self.started = 0.0, 0
        self.limits: list[tuple[float, int]] = []  # by time

    def run(self, drafts: bool = True) -> float:
        """Seconds until all are done."""
        begin, left = self.clock, {self.started + i: self.tokens for i in range(self.batch)}
        self.started += self.batch
        while left:
            rows = [DecodingRow(i, ("model",), min(LONGEST, n - 1), True, 100, 0, n) for i, n in left.items()]
            requested = self.policy.choose(rows) if drafts else [RequestedDraft(0, (), "gain")] * len(rows)
            self._forward(rows, [each.limit for each in requested], left, drafts)
            for i in [i for i, n in left.items() if n <= 0]:
                del left[i]
                self.policy.forget(i, ["model"])
        return self.clock - begin

    def _forward(self, rows: Sequence[DecodingRow], limits: Sequence[int], left: dict[int, int], told: bool) -> None:
        longest = max(limits)
        for row, limit in zip(rows, limits, strict=True):
            chance = self.bad if row.id % 2 else self.good
            accepted = next((i for i in range(limit) if self.luck.random() >= chance), limit)
            if limit:
                self.policy.learn(["model"], [row.id], [limit], [limit], [accepted])
            left[row.id] -= accepted + 1
        size = len(rows) + sum(limits)
        seconds = self.truth(size) * self.slow(self.clock, size)
        draft = 0.01 * self.step * (1 + longest) if longest else 0.0
        self.clock += seconds + draft
        if told:
            self.limits.append((self.clock, longest))
            self.costs.saw_step(sum(limits), len(rows), 100, seconds)
            if longest:
                self.costs.saw_draft("model", sum(map(bool, limits)), longest, draft)

    def ratios(self, rounds: int) -> list[float]:
        """Speed over plain decoding, by round; the first one learns."""
        return [self.run(drafts=False) / self.run() for _ in range(1 + rounds)][1:]


@pytest.mark.parametrize(("bad", "least"), [(0.0, 0.9), (0.2, 0.97), (0.5, 0.97)])
@pytest.mark.parametrize("batch", [2, 4, 8, 16, 32])
def test_a_batch_of_good_and_bad_rows_is_not_slower_than_plain(batch: int, bad: float, least: float) -> None:
    """Tokens per second of the moment are not all: rows slowed by their neighbours' drafts end the later.

    Where half of the rows gain nothing at all, the others may be three times as fast at a bounded price.
    """
    worlds = [Shared(batch, bad=bad) for _ in range(3)]
    for seed, shared in enumerate(worlds):
        shared.luck.seed(seed)
    assert statistics.mean(statistics.median(shared.ratios(5)) for shared in worlds) >= least


@pytest.mark.parametrize("factor", [0.4, 2.5])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_wrong_costs_of_long_forwards_do_not_make_it_slower_than_plain(batch: int, factor: float) -> None:
    belief = {count: seconds * (factor if count > batch else 1.0) for count, seconds in LARGE.items()}
    worlds = [Shared(batch, belief=belief) for _ in range(3)]
    for seed, shared in enumerate(worlds):
        shared.luck.seed(seed)
        assert min(shared.ratios(2)) >= 0.75  # while it learns
    assert statistics.mean(statistics.median(shared.ratios(5)) for shared in worlds) >= 0.94


@pytest.mark.parametrize("step", [0.0007, 0.04], ids=["small model", "1 B"])
def test_a_start_on_a_busy_machine_leaves_the_drafts_out_for_seconds_only(step: float) -> None:
    """Four busy neighbours for 5 s: every forward is late, long ones most, and so was the first measurement."""
    busy = 5.0

    def slow(seconds: float, tokens: int) -> float:
        return 1.0 if seconds > busy else 4.0 if tokens == 1 else 12.0

    belief = {count: seconds * slow(0.0, count) for count, seconds in LARGE.items()}
    shared = Shared(1, bad=0.9, belief=belief, slow=slow, step=step)
    while shared.clock < 2 * busy + 2.0:
        shared.run()
    late = [limit for when, limit in shared.limits if when > 2 * busy]
    assert sum(limit >= 2 for limit in late) > 0.8 * len(late)


# --- several drafters


def test_a_copy_that_comes_true_is_preferred_to_the_model_and_the_model_fills_in() -> None:
    cheap = measured(draft=0.02)
    world = World({"model": 0.8, "host": 0.9}, 1, cheap, offers={"host": 0.5}, methods=("model", "host"))
    world.run(1200)
    assert [each.methods for each in world.used[-400:]].count(("host", "model")) >= 340


def test_a_copy_that_does_not_come_true_gives_way_to_the_model() -> None:
    world = World({"model": 0.8, "host": 0.1}, methods=("model", "host"))
    world.run(300)
    assert [each.methods for each in world.used[-80:]].count(("model",)) >= 50  # the copy is tried now and then


def test_a_model_that_does_not_pay_gives_way_to_the_copy() -> None:
    world = World({"model": 0.3, "host": 0.5}, offers={"host": 0.4}, methods=("model", "host"))
    world.costs = measured(draft=0.5)
    world.__post_init__()
    world.run(400)
    assert [each.methods for each in world.used[-40:]].count(("host",)) >= 34


@pytest.mark.parametrize("relation", ["alone", "apart"])
def test_halves_that_are_right_at_different_places_are_joined(relation: str) -> None:
    """Where nodes and the model are cheap, the union of two is faster than asking one after the other."""

    def world(methods: tuple[str, ...]) -> World:
        return World({"model": 0.5, "host": 0.5}, 1, measured(draft=0.02), methods=methods, relation=relation)

    joined = world(("model", "host"))
    joined.run(300)
    assert [each.joined for each in joined.used[-80:]].count(True) >= 52
    worlds = [joined, *map(world, (("model",), ("host",)))]
    for each in worlds[1:]:
        each.run(300)
    for each in worlds:
        each.tokens = each.seconds = 0.0
        each.run(500)
    assert joined.speed_up > 1.05 * max(each.speed_up for each in worlds[1:])


def test_drafters_that_are_right_at_the_same_places_are_not_joined() -> None:
    world = World({"model": 0.7, "host": 0.7}, 1, measured(draft=0.02), methods=("model", "host"), relation="together")
    world.run(300)
    world.used.clear()
    world.run(200)
    assert sum(each.joined for each in world.used) <= 20
    alone = World({"host": 0.7}, 1, methods=("host",))
    for each in (world, alone):
        each.run(1000)
        each.tokens = each.seconds = 0.0
        each.run(3000)
    assert world.speed_up > 0.96 * alone.speed_up


@pytest.mark.parametrize("batch", [1, 8])
def test_a_dear_model_does_not_join_a_copy_that_is_nearly_always_right(batch: int) -> None:
    world = World(
        {"model": 0.8, "host": 0.95}, batch, measured(draft=0.3), offers={"host": 0.95}, methods=("model", "host")
    )
    world.run(300)
    world.used.clear()
    world.run(200)
    assert sum(each.joined for each in world.used) <= 0.1 * len(world.used)


@pytest.mark.parametrize("batch", [1, 8])
def test_nodes_that_are_dear_are_not_joined(batch: int) -> None:
    world = World({"model": 0.7, "host": 0.3}, batch, measured(STEEP, draft=0.01), methods=("model", "host"))
    world.run(300)
    world.used.clear()
    world.run(200)
    assert sum(each.joined for each in world.used) <= 0.1 * len(world.used)


def test_two_copies_are_united_where_that_pays() -> None:
    chances, methods = {"host": 0.6, "other": 0.6}, ("host", "other")
    for relation, expected in (("alone", True), ("together", False)):
        world = World(chances, 1, methods=methods, relation=relation)
        world.run(300)
        both = sum(set(each.methods) == set(methods) for each in world.used[-80:])
        assert both >= 60 if expected else both <= 20


@given(data=st.data(), drafters=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_union_holds_what_any_of_its_parts_holds(data: st.DataObject, drafters: int) -> None:
    row = st.lists(st.floats(0.01, 1), min_size=LONGEST, max_size=LONGEST)
    parts = data.draw(st.lists(row, min_size=drafters, max_size=drafters))
    expected = 1.0 - np.prod(1.0 - np.cumprod(np.array(parts), axis=1), axis=0)
    assert np.cumprod(united(parts)) == pytest.approx(expected, abs=1e-9)


def test_a_copy_that_is_never_there_costs_nothing() -> None:
    world = World({"host": 0.0}, methods=("host",), offers={"host": 0.0})
    world.run(500)
    assert world.speed_up > 0.99


# --- what was said explicitly


def test_the_schedule_bounds_by_batch_size() -> None:
    policy = Policy(slots, runs_model, LONGEST, {4: 8, 1: 8, 8: 2, 32: 1})
    assert [policy.bound(batch) for batch in (1, 4, 5, 8, 9, 32, 33)] == [8, 8, 2, 2, 1, 1, 0]
    world = World({"model": 1.0}, 5, measured({2: 1.0, 99: 1.0}, 0.01), schedule={4: 8, 6: 2})
    assert max(map(max, world.run(30))) == 2
    assert Policy(slots, runs_model, 3, {2: 8, 4: 2}).bound(1) == 3  # a budget keeps drafts shorter than that
    world = World({"model": 1.0}, 7, schedule={4: 8, 6: 2}, adaptive=False)
    world.run(2)
    assert {each.reason for each in world.used} == {"batch"}


def test_fixed_rows_draft_what_they_are_told() -> None:
    assert World({"model": 0.0}, adaptive=False).run(100) == [[LONGEST]] * 100


def test_the_gate_closes_for_good_after_a_window_of_poor_requests() -> None:
    gate = Gate(3, 0.5)
    assert [gate.record(*each) for each in ((9, 3), (0, 5), (0, 0), (1, 5))] == [False] * 4  # 0 forwards say nothing
    assert gate.average == pytest.approx((3 + 0 + 0.2) / 3)
    assert gate.record(0, 4)
    assert gate.closed
    assert not gate.record(9, 1)
    policy = Policy(slots, runs_model, LONGEST, gate=gate)
    assert policy.choose([DecodingRow(0, ("model",), 8, False, 5, 0, 9)]) == [RequestedDraft(0, (), "threshold")]
    assert not policy.expects("model")
    assert not Gate(0, 5.0).record(0, 3)


# --- costs


@given(points=st.dictionaries(st.integers(1, 99), st.floats(0.1, 9), min_size=1, max_size=6), at=st.floats(1, 200))
def test_a_curve_never_falls_and_lies_between_its_points(points: dict[int, float], at: float) -> None:
    curve = Curve(points)

    def seconds(count: float) -> float:
        return curve(count)

    assert seconds(at) <= seconds(at + 1) * (1 + 1e-9)
    knots = sorted(points)
    for below, above in itertools.pairwise(knots):
        assert seconds(below) <= seconds((below + above) / 2) * (1 + 1e-9)
        assert seconds((below + above) / 2) <= seconds(above) * (1 + 1e-9)
    assert seconds(knots[0]) == pytest.approx(points[knots[0]])


def test_costs_follow_what_is_seen() -> None:
    costs = Costs(measured({2: 1.0, 32: 2.0}))
    for _ in range(300):
        costs.saw_step(1, 1, 10, 3.0)
        costs.saw_step(1, 1, 10, 3.0)  # everything three times slower, and many tokens twelve times
        costs.saw_step(31, 1, 10, 24.0)
    assert costs.step(31, 1, 10) / costs.step(1, 1, 10) == pytest.approx(24.0 / 3.0, rel=0.1)


def test_a_wrong_first_measurement_is_mended_by_the_steps_that_are_made() -> None:
    costs = Costs(measured({2: 0.5, 8: 1.3}))
    for _ in range(12):
        costs.saw_step(1, 1, 10, 1.0)
    assert costs.step(1, 1, 10) == pytest.approx(1.0, rel=0.05)
    for _ in range(4):
        costs.saw_step(7, 1, 10, 1.3)
    assert costs.step(7, 1, 10) / costs.step(1, 1, 10) == pytest.approx(1.3, rel=0.15)


@given(
    seen=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 64), st.floats(0.01, 10)), max_size=30),
    nodes=st.integers(0, 600), rows=st.integers(1, 64),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_corrected_costs_are_positive_and_finite(seen: list[tuple[int, int, float]], nodes: int, rows: int) -> None:
    costs = Costs(measured())
    for count, size, seconds in seen:
        costs.saw_step(count, size, 10, seconds)
        costs.saw_draft("host", size, 1 + count, seconds)
    assert 0 < costs.step(nodes, rows, 10) < math.inf
    assert 0 <= costs.draft("host", rows, 1 + nodes) < math.inf
    assert bool(costs.draft("host", rows, 1 + nodes)) == bool(seen)  # it costs nothing until it was seen


EXPERTS = ExpertConfig(count=128, chosen=8, width=64, normalised=True, layers=(True,))
SPARSE = {count: 2.0 + EXPERTS.work(count) for count in range(1, 65)}
SPARSE_BELIEF = measured({count: SPARSE[count] for count in (1, 16, 64)})


def test_what_experts_cost_is_known_between_the_counts_that_were_measured() -> None:
    """A second token reads almost as many experts as the first; a straight line to 16 tokens does not know it."""
    told, line = Costs(SPARSE_BELIEF, EXPERTS.work), Costs(SPARSE_BELIEF)
    for count in range(1, 65):
        assert told.step(count - 1, 1, 10) == pytest.approx(SPARSE[count])
    for count in (2, 3, 5):
        assert line.step(count - 1, 1, 10) < 0.9 * SPARSE[count]
    every = Costs(SPARSE_BELIEF, replace(EXPERTS, chosen=128).work)  # no more to read for a second token
    assert every.step(4, 1, 10) == pytest.approx(line.step(4, 1, 10))


@pytest.mark.parametrize("chance", [0.5, 0.7])
def test_no_draft_is_made_where_its_experts_cost_more_than_it_gains(chance: float) -> None:
    truth = measured(SPARSE, draft=0.1)
    told = World({"model": chance}, costs=truth, belief=SPARSE_BELIEF, work=EXPERTS.work, least=1)
    line = World({"model": chance}, costs=truth, belief=SPARSE_BELIEF, least=1)
    assert max(told.fixed(length) for length in range(1, LONGEST + 1)) < 1
    guesses = [sum(map(sum, world.run(30))) for world in (told, line)]
    assert guesses[0] < guesses[1]
    assert told.speed_up > line.speed_up
    dense = World({"model": chance}, costs=measured({1: 10.0, 16: 11.0, 64: 16.0}, draft=0.1), least=1)
    assert sum(map(sum, dense.run(30))) > 2 * guesses[0]


def test_one_stolen_slice_moves_little() -> None:
    costs = Costs(measured())
    for _ in range(50):
        costs.saw_step(1, 1, 10, 1.0)
    before = costs.step(6, 2, 10) / costs.step(0, 2, 10)
    costs.saw_step(1, 1, 10, 1000.0)
    costs.saw_draft("model", 1, 4, 1000.0)
    assert costs.step(6, 2, 10) / costs.step(0, 2, 10) == pytest.approx(before, rel=0.05)
    assert costs.draft("model", 1, 4) < 0.06 * 5 * math.exp(STRIDE)
    assert costs.step(1, 1, 10) < 1.1


def test_a_drafter_on_the_host_has_its_time_learned() -> None:
    costs = Costs(measured())
    for _ in range(60):
        costs.saw_draft("host", 4, 3, 0.0004)
    assert costs.draft("host", 8, 1) == pytest.approx(0.0008, rel=0.05)
    assert costs.draft("model", 0, 4) == costs.draft("model", 4, 0) == 0.0


# --- acceptance


@given(chance=st.floats(0.05, 0.95), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_acceptance_approaches_the_truth(chance: float, seed: int) -> None:
    luck, seen = random.Random(seed), Acceptance(4)
    for now in range(2000):
        seen.learn(now, [7], [4], [4], [next((i for i in range(4) if luck.random() >= chance), 4)])
    assert seen.overall(2000)[1] == pytest.approx(chance, abs=0.15)
    assert seen.chances(7, 2000)[1] == pytest.approx(chance, abs=0.25)
    assert seen.chances(8, 2000) == pytest.approx(seen.overall(2000))


def test_acceptance_counts_as_one_by_one() -> None:
    """For each request several drafts at once are what they are one after the other; the engine's fade by step."""
    luck, together, alone = random.Random(3), Acceptance(6), Acceptance(6)
    for now in range(150):
        asked = [luck.randint(1, 6) for _ in range(12)]
        longest = [luck.randint(0, most) for most in asked]
        accepted = [luck.randint(0, most) for most in longest]
        together.learn(now, range(12), asked, longest, accepted)
        for i in range(12):
            alone.learn(now, [i], asked[i : i + 1], longest[i : i + 1], accepted[i : i + 1])
    for i in range(12):
        assert together.chances(i, 150) == pytest.approx(alone.chances(i, 150), abs=0.1)
        together.forget(i)
        assert len(together) == 11 - i
    assert together.chances(3, 150) == pytest.approx(together.overall(150))


def test_what_is_unknown_is_told_by_what_is_nearest() -> None:
    seen = Acceptance(6)
    assert seen.overall(0) == pytest.approx([HOPE] * 7)
    for now in range(100):
        seen.learn(now, [1], [2], [2], [0])
    assert seen.overall(100)[1] < 0.1
    assert seen.chances(2, 100) == pytest.approx(seen.overall(100))
    for now in range(100, 110):
        seen.learn(now, [2], [2], [2], [2])
    fresh = seen.chances(2, 110)
    assert fresh[1] > 0.5 > seen.overall(110)[1]
    assert fresh[2] > 0.5


def test_what_a_request_was_like_counts_for_a_while_only() -> None:
    """Also while it drafts nothing, or a text that began badly would never draft again."""
    seen = Acceptance(4)
    for now in range(200):
        seen.learn(now, [now], [4], [4], [3])
    for now in range(200, 220):
        seen.learn(now, [1000], [4], [4], [0])
    chances = [seen.chances(1000, now)[1] for now in (220, 250, 300, 400)]
    assert chances == sorted(chances)
    assert chances[0] < 0.5 < chances[-1] == pytest.approx(seen.overall(400)[1], abs=0.01)


def batch_of(costs: Costs, acceptance: Acceptance, beside: int = 0) -> StepBatch:
    """One row with a model that may guess four tokens."""
    rows = [DecodingRow(1, ("model",), 4, True, 50, 0, 99)]
    of = [lambda m, limit, j: limit, costs, True, lambda m: acceptance, lambda m: True, 4, 0]
    return StepBatch(rows, [0], beside, 0, *of)  # type: ignore[arg-type]


@pytest.mark.parametrize("beside", [1, 30, 500])
def test_prompts_in_the_step_make_no_draft_look_cheaper(beside: int) -> None:
    """What they take is to be paid whatever the rows draft."""
    acceptance, straight = Acceptance(4), Costs(measured({1: 0.5, 4096: 2048.0}))
    alone, together = (batch_of(straight, acceptance, tokens) for tokens in (0, beside))
    assert [together.step(n) for n in range(9)] == pytest.approx([alone.step(n) for n in range(9)])
    # Where nodes are dearer beside a prompt, that counts.
    bent = Costs(measured({1: 1.0, 16: 1.1, 4096: 4096.0}))
    alone, together = (batch_of(bent, acceptance, tokens) for tokens in (0, 500))
    assert together.plain == pytest.approx(alone.plain)
    assert together.step(8) - together.plain > 10.0 * (alone.step(8) - alone.plain)


@given(
    seen=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 16), st.floats(0.01, 10)), max_size=20),
    rows=st.integers(1, 16), beside=st.integers(0, 5000),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_no_prompt_makes_a_step_cheaper(seen: list[tuple[int, int, float]], rows: int, beside: int) -> None:
    costs = Costs(measured({1: 1.0, 16: 1.1, 64: 4.0}))
    for nodes, size, seconds in seen:
        costs.saw_step(nodes, size, 10, seconds)
    assert costs.step(0, rows, 10, beside) == pytest.approx(costs.step(0, rows, 10))
    for nodes in range(40):
        assert costs.step(nodes, rows, 10, beside) >= costs.step(nodes, rows, 10) > 0.0


@pytest.mark.parametrize("few", [0.9, 1.0, 1.3])
def test_no_guess_is_verified_for_nothing(few: float) -> None:
    """Of steps with 0, 2 and 8 draft tokens the second may seem dearer than the third, whose mean then holds."""

    class Noisy(Costs):
        def step(self, nodes: float, rows: int, context: float, beside: int = 0) -> float:
            return float(np.interp(nodes, [0, 2, 8], [0.5, 0.5 * few, 0.6]))

    batch = batch_of(Noisy(measured()), Acceptance(4))
    ways = batch.ways()[0]
    times = batch.worth(ways, ChosenLengths([4], 1.0, 1.0))[1]
    assert times["model"].verify == pytest.approx(max(0.1 / 8, (0.6 - 0.5 * few) / 6))


def test_a_place_given_up_is_thought_well_of_again() -> None:
    seen = Acceptance(2)
    for now in range(50):
        seen.learn(now, [1], [2], [2], [1])  # the second guess never comes true
    low = seen.overall(50)[2]
    for now in range(1000):
        seen.learn(now, [1], [1], [1], [1])  # and is not made any more
    assert low < 0.2 < 0.5 < seen.overall(1050)[2]


def test_a_choice_holds_for_some_steps_or_until_something_changes() -> None:
    """`again` stands for `choose` meanwhile; another batch, or prompts beside it, end that."""
    world = World({"model": 0.0}, 4, measured(STEEP))
    world.run(400)
    policy = world.policy
    assert policy.choose(world.rows())
    kept = 0
    while policy.again([0, 1, 2, 3], [8, 8, 8, 8], 0):
        kept += 1
    assert 0 < kept < 3 * KEPT
    policy.choose(world.rows())
    assert policy.again([0, 1, 2], [8, 8, 8], 0) is None
    assert policy.again([0, 1, 2, 3], [8, 8, 8, 8], 5) is None
    assert policy.again([0, 1, 2, 9], [8, 8, 8, 8], 0) is None
    assert policy.again([3, 2, 1, 0], [8, 8, 8, 8], 0) is not None


def test_a_choice_is_kept_for_some_steps_and_never_beyond_a_row_s_limit() -> None:
    world = World({"model": 0.9}, 2, measured(STEEP))
    world.run(200)
    policy, kept = world.policy, []
    for _ in range(20):
        policy.choose(world.rows())
        kept.append(0)
        while requested := policy.again([0, 1], [8, 1], 0):
            assert requested[0].limit >= requested[1].limit <= 1  # equal in a trial
            kept[-1] += requested[0].limit > requested[1].limit
    assert 0 < max(kept) < 100


def test_rows_that_join_a_batch_are_chosen_for() -> None:
    """One like the others soon drafts like them, and one whose length is fixed drafts that at once."""
    world = World({"model": 0.9}, 4, measured(FLAT, draft=0.01))
    world.run(200)
    policy, rows = world.policy, world.rows()
    new, fixed = (rows[0]._replace(id=7 + i, adaptive=not i) for i in range(2))
    drafts = [policy.choose([*rows[:3], new]) for _ in range(40)]
    assert statistics.median(each[3].limit for each in drafts) >= 1
    assert all(policy.choose([*rows[:3], fixed])[3].limit == LONGEST for _ in range(20))


def test_only_rows_whose_guesses_are_priced_may_draft_more_than_planned() -> None:
    """Chains end by worth, but not those of a trial, nor where a row of fixed length drafts beside."""
    world = World({"model": 0.5}, 4, measured({1: 100.0, 64: 400.0}, draft=1.0))
    world.run(100)
    policy, rows = world.policy, world.rows()
    assert not any(each.siblings for _ in range(20) for each in policy.choose(rows))
    policy.stoppable["model"] = True
    open_ = [each for _ in range(40) for each in policy.choose(rows)]
    assert statistics.median(each.siblings for each in open_) > 0
    assert all(each.limit == LONGEST for each in open_ if each.siblings)
    for _ in range(20):
        assert not any(each.siblings for each in policy.choose([*rows[:3], rows[0]._replace(id=100, adaptive=False)]))
        assert not policy.expected_cost


def test_a_padded_batch_drafts_for_all_its_rows() -> None:
    """Guesses within the width of the others cost nothing more, so equal rows have equal drafts."""
    rows = [DecodingRow(i, ("model",), 4, True, 50, 0, 99) for i in range(4)]
    costs, acceptance = Costs(measured({1: 1.0, 64: 5.0}, draft=1e-6)), Acceptance(4)
    for ragged in (False, True):
        batch = StepBatch(
            rows,
            range(4),
            0,
            0,
            lambda m, limit, joined: limit,
            costs,
            ragged,
            lambda m: acceptance,
            lambda m: True,
            4,
            0,
        )
        _, choice = batch.choose()
        assert choice.seconds == pytest.approx(costs.step(sum(choice.lengths), 4, 50), rel=1e-3)
        assert ragged or len(set(choice.lengths)) == 1 < max(choice.lengths)


def test_a_drafter_with_nothing_to_say_does_not_keep_a_model_from_drafting() -> None:
    """From the first forward on: whoever asks for ten tokens has not time to find out."""
    world = World({"model": 0.7, "host": 0.7}, offers={"host": 0.0}, methods=("host", "model"))
    world.run(6)
    assert all("model" in each.methods for each in world.used)


def test_a_drafter_that_was_never_asked_is_tried_without_a_model() -> None:
    world = World({"host": 0.7}, methods=("host",))
    assert all(limits[0] > 0 for limits in world.run(6))


def test_a_row_that_may_emit_one_token_more_ends() -> None:
    """A choice that is kept says why a row has no draft, as a new one would."""
    policy = Policy(slots, runs_model, LONGEST)
    policy.costs = Costs(measured())
    for _ in range(2):
        policy.choose([DecodingRow(1, ("model",), 4, True, 50, 0, 5)])
    kept = policy.again([1], [0], 0)
    assert kept is not None
    assert (kept[0].limit, kept[0].reason) == (0, "end")
