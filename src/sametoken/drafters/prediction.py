"""Drafts from an output that the caller predicted: the tokens after the place that the output has reached in it.

Works on token ids only. If the output departs from the prediction, the last tokens of the output are looked up in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sametoken.drafters.automaton import NO_MATCH, Match, SuffixAutomaton
from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import NO_GUESS, Guess
from sametoken.drafters.suffix import Bounds, grow
from sametoken.options.speculation import SpeculativeConfig

BEGIN = -1  # precedes the first token of a prediction; no token has this id
MAX_CONTEXT = 16  # tokens of the output that are looked up in the prediction
SURE = 2  # matched tokens from which the whole draft length is used; after fewer, only as many
LEAST_SHARE = 0.2


def index_prediction(tokens: Sequence[int]) -> SuffixAutomaton:
    """Index of a predicted text; immutable, so the choices of a request share one index."""
    known = SuffixAutomaton(MAX_CONTEXT + 1)
    for token in (BEGIN, *tokens):
        known.extend(token)
    return known


@dataclass
class _PredictedRow:
    """State of one sequence: prediction, last tokens, and place in the prediction once the output has begun."""

    known: SuffixAutomaton
    recent: deque[int]
    match: Match | None = None


class PredictionDrafter(Drafter):
    """Drafter that copies from the prediction of each row that has one.

    Args:
        max_draft_len: longest draft.
    """

    def __init__(self, max_draft_len: int) -> None:
        self.nodes = max_draft_len
        self._rows: dict[int, _PredictedRow] = {}

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        """Start `row`; tokens in reused pages belong to the prompt."""
        self._rows.pop(row, None)
        if origin.prediction is not None:
            self._rows[row] = _PredictedRow(origin.prediction, deque(maxlen=MAX_CONTEXT))

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        for row, committed in zip(rows, tokens, strict=True):
            state = self._rows.get(row)
            if state is None:
                continue
            state.recent.extend(committed)
            if state.match is not None:
                for token in committed:
                    state.match = state.known.advance(state.match, token)

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: object, worth: object = None
    ) -> Proposed:
        """Draft continuations of at most `limits[i]` tokens; `sampling` is ignored: a prediction has no logits."""
        return Proposed([self._guess(*each) for each in zip(rows, pending, limits, strict=True)])

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def slots(self, limit: int) -> int:
        return min(self.nodes, limit)

    def _guess(self, row: int, pending: int, limit: int) -> Guess:
        state = self._rows.get(row)
        if state is None:
            return NO_GUESS
        if state.match is None:
            state.match = self._place(state, pending)
        match = state.known.advance(state.match, pending)
        if match == NO_MATCH:
            return NO_GUESS
        nodes = limit if match.length >= SURE else match.length
        return grow(state.known, match, Bounds(self.slots(nodes), limit, LEAST_SHARE))[0]

    def _place(self, state: _PredictedRow, pending: int) -> Match:
        """Place of the output in the prediction at the first draft: its beginning, or later for a preempted row."""
        beginning = state.known.match([BEGIN])
        if state.known.advance(beginning, pending).length > beginning.length:
            return beginning
        return state.known.match(state.recent)


def build(config: SpeculativeConfig) -> Drafter:
    """Build the drafter from these settings."""
    return PredictionDrafter(config.longest)
