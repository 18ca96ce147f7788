"""Predicted speed of draft lengths that were not measured, from acceptance by position and costs of steps.

tokens/s of a row = E[tokens per forward] / (draft(k) + verify(k) + host(k)) for length k. Costs are interpolated
linearly between measured lengths, and extrapolated from the last two. Positions beyond the longest draft have the
acceptance of the last one. Effects outside this model (steps that also compute prompts, batches that are not full) are
a factor: measured / predicted speed-up of the measured lengths, interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sametoken.bench.record import Cell
from sametoken.bench.variant import Basis, StepCost, Variant

FARTHEST = 2  # greatest predicted length, in multiples of the longest measured one


class Forecast(NamedTuple):
    """Speed of a draft length, for decoding and for whole requests.

    Attributes:
        draft_len: draft length in tokens.
        tokens_per_row: emitted tokens per row and step.
        step_s: seconds of a step.
        draft_s: seconds of its drafting.
        speed_up: speed-up of whole requests, with their prompts.
        basis: origin of the figures.
    """

    draft_len: int
    tokens_per_row: float
    step_s: float
    draft_s: float
    speed_up: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class Outlook:
    """Model of the speed of a cell by draft length.

    Attributes:
        cell: measurements.
        plain: cost of a plain step.
        costs: cost of a step by draft length, ascending from 0.
        accepted: share of decoding forwards that accepted the guess at position k + 1, at index k.
    """

    cell: Cell
    plain: StepCost
    costs: dict[int, StepCost]
    accepted: Sequence[float]

    @classmethod
    def of(cls, cell: Cell) -> Outlook | None:
        """Model of a cell; None if the cell has too few decoding steps."""
        found = {variant.max_draft_len: common_step(variant, cell.plain) for variant in (cell.plain, *cell.fixed)}
        costs = {length: cost for length, cost in sorted(found.items()) if cost is not None}
        if 0 not in costs or len(costs) < 2:
            return None
        longest = max(cell.fixed, key=lambda variant: variant.max_draft_len)
        return cls(cell, costs[0], costs, accepted_shares(longest, cell.requests))

    def tokens_per_row(self, draft_len: int) -> float:
        """Expected tokens per row and forward."""
        known = list(self.accepted[:draft_len])
        if known and draft_len > len(self.accepted):
            before = self.accepted[-2] if len(self.accepted) > 1 else 1.0
            kept = min(1.0, self.accepted[-1] / before) if before else 0.0
            known += [self.accepted[-1] * kept**n for n in range(1, draft_len - len(self.accepted) + 1)]
        return 1 + sum(known)

    def step_s(self, draft_len: int) -> tuple[float, float]:
        """Seconds of a step and of its drafting."""
        parts = [{k: getattr(c, name) for k, c in self.costs.items()} for name in ("draft_s", "verify_s", "host_s")]
        draft, verify, host = (_on_lines(part, draft_len) for part in parts)
        return draft + verify + host, draft

    def predict(self, draft_len: int) -> Forecast:
        """Measured speed of a draft length, else the estimated one."""
        measured = {v.max_draft_len: v for v in self.cell.fixed if v.max_draft_len in self.costs}
        if variant := measured.get(draft_len):
            cost, tokens = self.costs[draft_len], 1 + sum(accepted_shares(variant, self.cell.requests))
            return Forecast(draft_len, tokens, cost.seconds, cost.draft_s, variant.speed_up.value, "measured")
        missed = {length: v.speed_up.value / self.modelled(length) for length, v in sorted(measured.items())}
        within = min(max(draft_len, min(missed)), max(missed))
        speed_up = self.modelled(draft_len) * (_on_lines(missed, within) if len(missed) > 1 else missed[within])
        return Forecast(draft_len, self.tokens_per_row(draft_len), *self.step_s(draft_len), speed_up, "estimated")

    def modelled(self, draft_len: int) -> float:
        """Speed-up of whole requests by the model alone: decoding is faster, prompts are not."""
        step_s, _ = self.step_s(draft_len)
        decoding = self.tokens_per_row(draft_len) * self.plain.seconds / step_s
        prompt = self.cell.plain.prompt_share
        return 1 / (prompt + (1 - prompt) / decoding)

    def table(self) -> list[Forecast]:
        """Forecasts up to the longest measured length, and beyond it until the speed-up falls."""
        longest = max(self.costs)
        lines = [self.predict(length) for length in range(1, longest + 1)]
        for length in range(longest + 1, FARTHEST * longest + 1):
            lines.append(self.predict(length))
            if lines[-1].speed_up < lines[-2].speed_up:
                break
        return lines


def common_step(variant: Variant, plain: Variant) -> StepCost | None:
    """Cost of a step with the most frequent number of rows of plain steps, or else of the variant's own steps."""
    if not variant.steps or not plain.steps:
        return None
    rows = max(plain.steps, key=lambda cost: cost.steps).rows
    return next((c for c in variant.steps if c.rows == rows), max(variant.steps, key=lambda cost: cost.steps))


def accepted_shares(variant: Variant, requests: int) -> list[float]:
    """Shares of decoding forwards that accepted the guess at each position.

    Args:
        variant: measured variant.
        requests: requests of one round; the first forward of a request, for its prompt, has no draft.
    """
    decoding = variant.acceptance.forwards - requests * len(variant.round_s)
    return [position.accepted / decoding for position in variant.acceptance.positions] if decoding > 0 else []


def _on_lines(points: dict[int, float], at: int) -> float:
    """Value at `at` from two or more points in ascending order, linear between and beyond them, at least 0."""
    places = list(points)
    right = next((i for i, place in enumerate(places) if place >= at), len(places) - 1)
    a, b = places[max(0, right - 1)], places[max(1, right)]
    return max(0.0, points[a] + (points[b] - points[a]) * (at - a) / (b - a))
