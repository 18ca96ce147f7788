"""Trial steps, made to learn something: plain, with longer or shorter paths, and with other drafters. Pure.

The interval of a kind of trial grows with its estimated loss, so a cheap kind never waits for an expensive one. A draft
model reads a prompt before its first guess of a request, which costs far more than that guess: such a reading is paid
from an account of its own, and several steps follow it with the drafts that it made possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sametoken.control.acceptance import PRIOR
from sametoken.control.choice import RECALL, ChosenLengths, RequestedDraft, StepBatch, Way

SHARE = 0.005  # of the time, most that trials lose, and that choices take
READ_SHARE = 0.01  # of the time, most that reading for trials takes
FIRST = 12.0  # plain steps that reading for the first trials may take
AFTER_READING = 2 * int(PRIOR)  # guesses of a trial that reads
Drafts = dict[int, RequestedDraft]  # by request


class TrialStep(NamedTuple):
    """Drafts of a trial in place of planned ones; a trial of this kind is made again `apart` steps later.

    `read` plain steps are the time that its drafters need before their first guess.
    """

    kind: str
    drafts: Drafts
    apart: float
    read: float


class ReadingAccount:
    """Account of what trials of one engine read, in plain steps."""

    def __init__(self) -> None:
        self.spent = 0.0

    def left(self, steps: int) -> float:
        """Plain steps that reading for the next trials may take, after `steps` steps of the engine."""
        return max(0.5, FIRST + READ_SHARE * steps - self.spent)


class Trials:
    """Trials of batches of about one size.

    Args:
        reading: of all trials.

    Attributes:
        needed: chance at which one guess a row would have paid when it was last tried.
    """

    def __init__(self, reading: ReadingAccount) -> None:
        self._reading = reading
        self._next: dict[str, tuple[int, float]] = {}  # by kind, how many were made, and when the next one is due
        self.needed = 0.0

    def due(
        self, now: int, steps: int, batch: StepBatch, ways: Sequence[Way], choice: ChosenLengths,
        planned: Sequence[RequestedDraft],
    ) -> list[TrialStep]:  # fmt: skip
        """Trials that are due, one after the other, in steps from step `now` of these batches on, after `steps` of the
        engine.
        """
        kinds, found = self._kinds(batch, planned), list[TrialStep]()
        affordable = self._reading.left(steps)
        for kind, wanted in kinds.items():
            count, when = self._next.get(kind, (0, PRIOR))
            if now < when:
                continue
            changed, debts = _read_within(affordable * batch.plain, batch, planned, wanted)
            if not any(changed[i] != planned[i] for i in changed):
                continue
            read, drafts = debts / batch.plain, {batch.rows[i].id: draft for i, draft in changed.items()}
            times = max(1, AFTER_READING // len(drafts)) if read > 1.0 else 1
            lost = times * self._lost(batch, ways, choice, planned, changed) * len(kinds) / SHARE
            # The estimated loss may be wrong, so the trial is repeated before long.
            apart = min(max(PRIOR, lost), PRIOR * 2.0 ** min(count, 16))
            found += [TrialStep(kind, drafts, apart, read), *[TrialStep(kind, drafts, apart, 0.0)] * (times - 1)]
            affordable -= read
        return found

    def made(self, trial: TrialStep, now: int) -> None:
        """Record that a trial is made in this step."""
        self._next[trial.kind] = self._next.get(trial.kind, (0, 0.0))[0] + 1, now + trial.apart
        self._reading.spent += trial.read

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
