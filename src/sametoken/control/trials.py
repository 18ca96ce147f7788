"""Steps that are made to learn something: plain, with longer and shorter paths, and with other drafters. Pure.

A kind of trial is made as often as what it is believed to lose allows, so that a cheap one never waits for a dear one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sametoken.control.acceptance import Floats
from sametoken.control.batch import RECALL, RequestedDraft, StepBatch, Ways

SHARE = 0.01  # of the time, most that steps may lose which are made to learn something
FIRST = 8  # steps before the first of them in a batch of a new size; then twice as many, until `SHARE` says when
TRIED = 8  # rows of which guesses are tried at once where nobody drafts, at most; in turn, if there are more


class TrialStep(NamedTuple):
    """What to ask each row, as a trial of this kind."""

    kind: str
    requested: list[RequestedDraft]


class TrialBasis(NamedTuple):
    """What a trial differs from.

    Attributes:
        planned: [R] what each row of `batch` is asked, in these `ways`.
        wait: for a token, as the plan promises.
        choosing: seconds that a choice takes.
    """

    planned: Sequence[RequestedDraft]
    batch: StepBatch
    ways: Ways
    wait: float
    choosing: float


class Trials:
    """Of batches of one size.

    Args:
        runs_model: whether a method runs a model.
    """

    def __init__(self, runs_model: Callable[[str], bool]) -> None:
        self._runs_model = runs_model
        self._steps, self._due = 0, FIRST
        self._counts: dict[str, tuple[int, int]] = {}  # by kind, how many were made, and the step of the last one
        self.needed = 0.0  # chance at which one guess a row would have paid when it was last tried

    def near(self) -> bool:
        """Whether a trial may be worth its time in the next step."""
        return self._steps + 1 >= self._due

    def step(self) -> None:
        """A step that is none of them."""
        self._steps += 1

    def made(self, trial: TrialStep) -> None:
        """This trial is made in this step."""
        count, _ = self._counts.get(trial.kind, (0, 0))
        self._counts[trial.kind] = count + 1, self._steps
        self._due = self._steps + FIRST

    def due(self, choice: TrialBasis) -> TrialStep | None:
        """The trial that is longest due, such that no more than `SHARE` of the time is lost by all."""
        if self._steps < self._due:
            return None
        drafts = any(draft.limit for draft in choice.planned)
        found = self._variations(choice) if drafts else {"guess": self._guess(choice)}
        late = {kind: self._steps - self._counts.get(kind, (0, 0))[1] - after for kind, (_, after) in found.items()}
        kind = max(late, key=late.__getitem__)
        if late[kind] >= 0:
            return TrialStep(kind, found[kind][0])
        self._due = self._steps - late[kind] if not drafts else self._steps + min(-late[kind], 8 * FIRST)
        return None

    def _variations(self, choice: TrialBasis) -> dict[str, tuple[list[RequestedDraft], int]]:
        """By kind the drafts of a trial beside a plan that drafts, and after how many steps it may be made again."""
        planned, batch = choice.planned, choice.batch
        on = [i for i in batch.free if planned[i].limit]
        most = [min(2 * planned[i].limit, batch.rows[i].limit, batch.longest) for i in on]
        kinds = {
            "recall": dict.fromkeys(on, RECALL),
            "longer": {i: planned[i]._replace(limit=limit) for i, limit in zip(on, most, strict=True)},
            "shorter": {i: planned[i]._replace(limit=(planned[i].limit + 1) // 2) for i in on},
            "others": {i: self._asks_all(planned[i], batch.rows[i].methods) for i in on},
        }
        kinds |= {"guess": self._guesses(choice)[0]} if len(on) < len(batch.free) else {}
        kinds = {name: each for name, each in kinds.items() if any(each[i] != planned[i] for i in each)}
        count, found = sum(count for count, _ in self._counts.values()), {}
        for kind, changed in kinds.items():
            trial = [changed.get(i, draft) for i, draft in enumerate(planned)]
            wait, seconds = batch.outcome(_asking(choice, changed), [draft.limit for draft in trial])
            lost = wait / choice.wait - 1.0 + choice.choosing / seconds
            found[kind] = trial, min(FIRST << min(count, 16), max(FIRST, int(lost * len(kinds) / SHARE)))
        return found

    def _asks_all(self, draft: RequestedDraft, methods: tuple[str, ...]) -> RequestedDraft:
        return draft._replace(methods=methods, joined=len(set(map(self._runs_model, methods))) > 1)

    def _guess(self, choice: TrialBasis) -> tuple[list[RequestedDraft], int]:
        """The same of a trial beside a plan that drafts nothing.

        Whatever a guess is believed to cost, which may be wrong, it is tried before long.
        """
        batch = choice.batch
        changed, debts = self._guesses(choice)
        trial = [changed.get(i, draft) for i, draft in enumerate(choice.planned)]
        _, seconds = batch.outcome(_asking(choice, changed), [draft.limit for draft in trial])
        self.needed = (seconds / batch.plain - 1.0) * len(batch.rows) / len(changed)
        lost = 2.0 * (seconds / batch.plain - 1.0) / SHARE  # in two steps
        once = (debts + 2.0 * choice.choosing) / batch.plain / SHARE  # chosen before and after it
        return trial, max(FIRST, int(min(lost, 16 * FIRST) + once))

    def _guesses(self, choice: TrialBasis) -> tuple[dict[int, RequestedDraft], float]:
        """One guess for some of the rows that draft nothing, in turn, and the seconds to read what it needs first."""
        batch, count = choice.batch, self._counts.get("guess", (0, 0))[0]
        off = [i for i in batch.free if not choice.planned[i].limit]
        some, guesses, debts = min(len(off), TRIED), dict[int, RequestedDraft](), 0.0
        for place in range(count * some, (count + 1) * some):
            i = off[place % len(off)]
            methods = batch.rows[i].methods
            method = methods[place // len(off) % len(methods)]
            debt = batch.debt(method, i)
            if guesses and debts + debt > batch.plain / 2:  # they have much to read first
                break
            guesses[i], debts = RequestedDraft(1, (method,)), debts + debt
        return guesses, debts


def _asking(choice: TrialBasis, changed: Mapping[int, RequestedDraft]) -> Ways:
    """The ways of a choice, in which the rows that a trial changes ask its methods always."""
    ways, rows = choice.ways, len(choice.planned)
    shares: dict[str, Floats] = {method: share.copy() for method, share in ways.shares.items()}
    kept = dict(ways.kept)
    for i, draft in changed.items():
        if draft.methods != choice.planned[i].methods or draft.joined != choice.planned[i].joined:
            for method in draft.methods:
                shares.setdefault(method, np.zeros(rows))[i] = 1.0
                kept.setdefault(method, np.ones(1 + choice.batch.longest))
    return ways._replace(shares=shares, kept=kept)
