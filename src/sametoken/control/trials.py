"""Exploration: trial steps without drafts, with longer or shorter paths, or with other drafters.

A kind of trial is due while the time that its trials lost is within a fixed fraction of the total time. Before the
first guess of a request, a draft model must read its context; this time has a budget of its own, and several trial
steps follow each such reading. Pure arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from sametoken.control.acceptance import PRIOR
from sametoken.control.choice import RECALL, ChosenLengths, RequestedDraft, StepBatch, Way

SHARE = 0.005  # greatest fraction of the time that trials lose
READ_SHARE = 0.01  # greatest fraction of the time in which draft models read context for trials
FIRST = 12.0  # additional time of reading for the first trials, in plain steps
EARLY, RATE = 5.0, 0.05  # additional loss of each kind at first, in plain steps, and as a fraction of the time
AFTER_READING = 2 * int(PRIOR)  # guesses of a trial after its models read context
Drafts = dict[int, RequestedDraft]  # by request


class Trials:
    """Schedule of trials for batches of similar size.

    Attributes:
        needed: break-even acceptance probability of one guess per row, at the last trial; 0 before.
    """

    def __init__(self) -> None:
        self._steps, self._read = 0, 0.0  # steps of such batches; time of reading in plain steps
        self._lost = defaultdict[str, float](float)  # lost time by kind, in plain steps
        self._turn = 0  # number of "guess" trials so far, which selects their rows
        self.needed = 0.0

    def due(
        self, batch: StepBatch, ways: Sequence[Way], choice: ChosenLengths, planned: Sequence[RequestedDraft]
    ) -> list[Drafts]:
        """Drafts of the trials that are due; each item replaces planned drafts of one step."""
        kinds, found = self._kinds(batch, planned), list[Drafts]()
        for kind, wanted in kinds.items():
            if not self._steps or self._lost[kind] > min(EARLY, RATE * self._steps) + SHARE * self._steps / len(kinds):
                continue
            left = max(0.5, FIRST + READ_SHARE * self._steps - self._read)
            changed, debts = _read_within(left * batch.plain, batch, planned, wanted)
            if not any(changed[i] != planned[i] for i in changed):
                continue
            read, drafts = debts / batch.plain, {batch.rows[i].id: draft for i, draft in changed.items()}
            times = max(1, AFTER_READING // len(drafts)) if read > 1.0 else 1
            found += [drafts] * times
            self._lost[kind] += max(0.0, times * self._loss(batch, ways, choice, planned, changed))
            self._read += read
            self._turn += kind == "guess"
        self._steps += int(PRIOR)
        return found

    def _kinds(self, batch: StepBatch, planned: Sequence[RequestedDraft]) -> dict[str, Drafts]:
        """Drafts of a trial of each kind, by index of the row; kinds that would change nothing are left out."""
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
        """One guess for each of a few rows without drafts, taken in turn."""
        some, guesses = min(len(off), int(PRIOR)), Drafts()
        for place in range(self._turn * some, (self._turn + 1) * some):
            methods = batch.rows[off[place % len(off)]].methods
            guesses[off[place % len(off)]] = RequestedDraft(1, (methods[place // len(off) % len(methods)],))
        return guesses

    def _loss(
        self, batch: StepBatch, ways: Sequence[Way], choice: ChosenLengths, planned: Sequence[RequestedDraft],
        changed: Mapping[int, RequestedDraft],
    ) -> float:  # fmt: skip
        """Estimated time lost by one trial step, in plain steps, or in planned steps if those have drafts."""
        tried = list(ways)
        for i, draft in changed.items():
            if draft.limit and draft.methods != ways[i].methods:  # other drafters run in every step
                tried[i] = ways[i]._replace(methods=draft.methods, shares=[1.0] * len(draft.methods))
        wait, seconds = batch.outcome(tried, [changed.get(i, draft).limit for i, draft in enumerate(planned)])
        if any(draft.limit for draft in planned):
            return wait / choice.wait - 1.0
        self.needed = (seconds / batch.plain - 1.0) * len(batch.rows) / len(changed)
        return seconds / batch.plain - 1.0


def _asks_all(draft: RequestedDraft, methods: tuple[str, ...], runs_model: Callable[[str], bool]) -> RequestedDraft:
    return draft._replace(methods=methods, joined=len(set(map(runs_model, methods))) > 1)


def _read_within(
    affordable: float, batch: StepBatch, planned: Sequence[RequestedDraft], wanted: Drafts
) -> tuple[Drafts, float]:
    """Wanted drafts for which draft models read for at most `affordable` seconds in all, and those seconds."""
    kept, seconds = Drafts(), 0.0
    for i, draft in wanted.items():
        debt = sum(batch.debt(method, i) for method in set(draft.methods) - set(planned[i].methods))
        if seconds + debt <= affordable:
            kept[i], seconds = draft, seconds + debt
    return kept, seconds
