"""Servers in simulated time: requests come and go, each with chances of its own, on a clock of true costs.

A fixed setting and the controller decode the same requests. Times are in plain steps of one row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from sametoken.control.choice import DecodingRow, RequestedDraft
from sametoken.control.cost import Costs, Measured
from sametoken.control.policy import Policy

LONGEST = 8
PROMPT, ANSWER = (100, 200), (50, 200)  # tokens, from and to


def costs(step: dict[int, float], draft: tuple[float, float], feed: float) -> Measured:
    """Costs of a forward by tokens, of a draft level for 1 and for 64 rows, and of reading a token."""
    levels = dict(zip((1, 64), draft, strict=True))
    first = {rows: 0.1 * seconds for rows, seconds in levels.items()}
    return Measured(step, 0.0, 0.0, {"model": first}, {"model": levels}, {"model": feed})


MACHINES = {
    "gpu": costs({1: 1.0, 16: 1.0, 32: 1.3, 64: 2.0, 256: 7.0}, (0.06, 0.07), 0.0005),
    "published pair": costs({1: 1.0, 257: 1.0 + 256 * 0.15}, (0.42, 2.1), 0.05),  # on two cores with AVX-512
    "published pair, AMX": costs({1: 1.0, 8: 1.15, 16: 1.35, 64: 3.5, 256: 13.0}, (0.36, 1.2), 0.02),
    "embedded pair": costs({1: 1.0, 16: 1.6, 64: 4.0, 256: 16.0}, (0.03, 0.12), 0.005),
    "1 B": costs({1: 1.0, 8: 1.45, 16: 2.2, 32: 3.55, 64: 5.4, 160: 11.0, 320: 21.0}, (0.01, 0.06), 0.0),
}


class Text(NamedTuple):
    """Kind of texts: chance of a guess of the model and of a looked-up one by request, and how often there is one."""

    chances: Callable[[random.Random], dict[str, float]]
    offers: float


TEXTS = {
    "good": Text(lambda luck: {"model": 0.92, "host": 0.92}, 0.6),
    "middling": Text(lambda luck: {"model": 0.65, "host": 0.8}, 0.3),
    "bad": Text(lambda luck: {"model": 0.15, "host": 0.3}, 0.5),
    "mixed": Text(lambda luck: {"model": luck.choice((0.1, 0.9)), "host": luck.choice((0.2, 0.95))}, 0.4),
}


def runs_model(method: str) -> bool:
    return method == "model"


class Fixed:
    """Setting without a controller: the same draft in every step."""

    def __init__(self, methods: tuple[str, ...], limit: int) -> None:
        self._draft = RequestedDraft(limit, methods) if limit else RequestedDraft(0, (), "gain")

    def choose(self, rows: Sequence[DecodingRow]) -> list[RequestedDraft]:
        return [self._draft.within(row.limit) for row in rows]


@dataclass
class Request:
    luck: random.Random
    chances: dict[str, float]
    unread: int
    left: int
    answer: int

    @classmethod
    def number(cls, i: int, text: Text) -> Request:
        luck = random.Random(i)
        answer = luck.randint(*ANSWER)
        return cls(luck, text.chances(luck), luck.randint(*PROMPT), answer, answer)


@dataclass
class Server:
    """Server of one kind of texts.

    Attributes:
        seconds: time so far.
        tokens: output tokens so far.
        done: number of finished requests.
    """

    machine: str
    text: str
    batch: int
    methods: tuple[str, ...]
    policy: Policy | Fixed | None = None

    def __post_init__(self) -> None:
        self._truth, self._text = Costs(MACHINES[self.machine]), TEXTS[self.text]
        if self.policy is None:
            self.policy = Policy(lambda method, limit: limit, runs_model, LONGEST)
            self.policy.costs = Costs(MACHINES[self.machine])
        self._numbers, self._rows = count(), dict[int, Request]()
        self.seconds, self.tokens, self.done = 0.0, 0, 0

    def run(self, answers: int) -> float:
        """Seconds per token until so many more requests have finished."""
        seconds, tokens, end = self.seconds, self.tokens, self.done + answers
        while self.done < end:
            self._step()
        return (self.seconds - seconds) / (self.tokens - tokens)

    def _step(self) -> None:
        while len(self._rows) < self.batch:
            number = next(self._numbers)
            self._rows[number] = Request.number(number, self._text)
        learns, items = self.policy if isinstance(self.policy, Policy) else None, list(self._rows.items())
        room = learns.left(ANSWER[1]) if learns else 0
        rows = [
            DecodingRow(i, self.methods, min(LONGEST, each.left - 1), True, 100, each.unread, room) for i, each in items
        ]
        assert self.policy is not None
        nodes, drafting = 0, dict[str, tuple[int, int]]()  # rows and levels by method
        for (i, each), draft in zip(items, self.policy.choose(rows), strict=True):
            found = self._draft(i, each, draft)
            for method, (made, _) in found.items():
                drafts, levels = drafting.get(method, (0, 0))
                drafting[method], nodes = (drafts + 1, max(levels, made)), nodes + made
            accepted = min(max((right for _, right in found.values()), default=0), each.left - 1)
            each.left, self.tokens = each.left - accepted - 1, self.tokens + accepted + 1
            if "model" not in draft.methods:
                each.unread += accepted + 1
        self._pass_time(len(rows), nodes, drafting)
        for i, each in items:
            if each.left <= 0:
                del self._rows[i]
                self.done += 1
                if learns:
                    learns.forget(i, self.methods)
                    learns.saw_answer(each.answer)

    def _draft(self, i: int, each: Request, draft: RequestedDraft) -> dict[str, tuple[int, int]]:
        """Guesses of a row and accepted ones, by method."""
        found, learns = dict[str, tuple[int, int]](), self.policy if isinstance(self.policy, Policy) else None
        for method in sorted(draft.methods, key=runs_model):
            made = draft.limit
            if not runs_model(method):
                made *= each.luck.random() < self._text.offers
            elif any(guesses for guesses, _ in found.values()) and not draft.joined:
                break
            elif each.unread:
                seconds = self._truth.feed(method, each.unread)
                self.seconds += seconds
                if learns:
                    learns.saw_feed(method, each.unread, seconds)
                each.unread = 0
            found[method] = made, next((k for k in range(made) if each.luck.random() >= each.chances[method]), made)
        if learns is None or not found:
            return found
        for methods in {*((method,) for method in found), tuple(sorted(found))}:
            if len(methods) == 1 or draft.joined or not any(map(runs_model, methods)):
                made, right = (max(found[method][which] for method in methods) for which in (0, 1))
                learns.learn(methods, [i], [draft.limit], [made], [right])
        return found

    def _pass_time(self, rows: int, nodes: int, drafting: dict[str, tuple[int, int]]) -> None:
        seconds, learns = self._truth.step(nodes, rows, 100), self.policy if isinstance(self.policy, Policy) else None
        self.seconds += seconds
        if learns:
            learns.saw_step(nodes, rows, 100, seconds)
        for method, (drafts, levels) in drafting.items():
            draft = self._truth.draft(method, drafts, levels) if runs_model(method) else 1e-5
            self.seconds += draft
            if learns and levels:
                learns.saw_draft(method, drafts, levels, draft)
