"""Trial steps, made to learn something: plain, with longer or shorter paths, and with other drafters. Pure.

The interval of a kind of trial grows with its estimated loss, so a cheap kind never waits for an expensive one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sametoken.control.acceptance import PRIOR
from sametoken.control.choice import RECALL, ChosenLengths, RequestedDraft, StepBatch, Way

SHARE = 0.005  # of the time, most that trials lose, and that choices take
Drafts = dict[int, RequestedDraft]  # by request


class TrialStep(NamedTuple):
    """Drafts of a trial in place of planned ones; a trial of this kind is made again `apart` steps later."""

    kind: str
    drafts: Drafts
    apart: float


class Trials:
    """Trials of batches of about one size.

    Attributes:
        needed: chance at which one guess a row would have paid when it was last tried.
    """

    def __init__(self) -> None:
        self._next: dict[str, tuple[int, float]] = {}  # by kind, how many were made, and when the next one is due
        self.needed = 0.0

    def due(
        self, now: int, batch: StepBatch, ways: Sequence[Way], choice: ChosenLengths, planned: Sequence[RequestedDraft]
    ) -> list[TrialStep]:
        """Trials that are due, one after the other, in steps from step `now` on."""
        kinds, found = self._kinds(batch, planned), []
        # Reading may take as much as trials may lose of the time of all steps so far, or half a step.
        affordable = batch.plain * max(0.5, SHARE * now)
        for kind, wanted in kinds.items():
            count, when = self._next.get(kind, (0, PRIOR))
            if now >= when:
                changed, debts = _read_within(affordable, batch, planned, wanted)
                if not any(changed[i] != planned[i] for i in changed):
                    continue
                lost = self._lost(batch, ways, choice, planned, changed) * len(kinds) / SHARE
                # The estimated loss may be wrong, so the trial is repeated before long.
                apart = min(max(PRIOR, lost), PRIOR * 2.0 ** min(count, 16)) + debts / batch.plain / SHARE
                found.append(TrialStep(kind, {batch.rows[i].id: draft for i, draft in changed.items()}, apart))
        return found

    def made(self, trial: TrialStep, now: int) -> None:
        """Record that a trial is made in this step."""
        self._next[trial.kind] = self._next.get(trial.kind, (0, 0.0))[0] + 1, now + trial.apart

    def _kinds(self, batch: StepBatch, planned: Sequence[RequestedDraft]) -> dict[str, Drafts]:
        """Drafts of a trial by kind, by index of a row."""
        on, off = ([i for i in batch.free if (planned[i].limit > 0) == drafts] for drafts in (True, False))
        most = {i: min(2 * planned[i].limit, batch.rows[i].limit, batch.longest) for i in on}
        kinds = {
            "recall": dict.fromkeys(on, RECALL),
            "longer": {i: planned[i]._replace(limit=most[i]) for i in on},
            "shorter": {i: planned[i]._replace(limit=(planned[i].limit + 1) // 2) for i in on},
            "others": {i: _asks_all(planned[i], batch.rows[i].methods, batch.runs_model) for i in on},
            "guess": self._guesses(off, batch),
        }
        return {kind: changed for kind, changed in kinds.items() if any(changed[i] != planned[i] for i in changed)}

    def _guesses(self, off: Sequence[int], batch: StepBatch) -> Drafts:
        """One guess for some of the rows that draft nothing, in turn."""
        count, some = self._next.get("guess", (0, 0.0))[0], min(len(off), int(PRIOR))
        guesses = Drafts()
        for place in range(count * some, (count + 1) * some):
            methods = batch.rows[off[place % len(off)]].methods
            guesses[off[place % len(off)]] = RequestedDraft(1, (methods[place // len(off) % len(methods)],))
        return guesses

    def _lost(
        self, batch: StepBatch, ways: Sequence[Way], choice: ChosenLengths, planned: Sequence[RequestedDraft],
        changed: Mapping[int, RequestedDraft],
    ) -> float:  # fmt: skip
        """Estimated loss of a trial, in plain steps, or in planned steps if they draft."""
        tried = list(ways)
        for i, draft in changed.items():
            if draft.limit and draft.methods != ways[i].methods:  # other drafters run in every step
                tried[i] = ways[i]._replace(methods=draft.methods, shares=[1.0] * len(draft.methods))
        wait, seconds = batch.outcome(tried, [changed.get(i, draft).limit for i, draft in enumerate(planned)])
        if any(draft.limit for draft in planned):
            return wait / choice.wait - 1.0
        self.needed = (seconds / batch.plain - 1.0) * len(batch.rows) / len(changed)
        return (1.0 if batch.dear else 2.0) * (seconds / batch.plain - 1.0)  # see `Policy.again`


def _asks_all(draft: RequestedDraft, methods: tuple[str, ...], runs_model: Callable[[str], bool]) -> RequestedDraft:
    return draft._replace(methods=methods, joined=len(set(map(runs_model, methods))) > 1)


def _read_within(
    affordable: float, batch: StepBatch, planned: Sequence[RequestedDraft], wanted: Drafts
) -> tuple[Drafts, float]:
    """Wanted drafts whose models have little to read first, and the seconds of reading."""
    kept, seconds = Drafts(), 0.0
    for i, draft in wanted.items():
        debt = sum(batch.debt(method, i) for method in set(draft.methods) - set(planned[i].methods))
        if seconds + debt <= affordable:
            kept[i], seconds = draft, seconds + debt
    return kept, seconds
