"""Measurement of one way to draft: speed, acceptance, the time of its parts, and what the controller chose.

All times are in seconds; all shares and rates are in 0 .. 1.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Basis = Literal["measured", "estimated"]
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=STRICT)
class Estimate:
    """A figure and its 95 % confidence interval, which one round does not have."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, config=STRICT)
class Spread:
    """Mean and percentiles of a sample."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, config=STRICT)
class Position:
    """Outcome of the guesses at one place of a draft.

    Attributes:
        position: from 1, the guess right after the pending token.
        drafted: forwards with a guess there. `tried`: those of them that accepted all guesses before it.
        accepted: forwards that accepted it.
        unconditional: accepted / drafted. `conditional`: accepted / tried, None where nothing came so far.
    """

    position: int
    drafted: int
    tried: int
    accepted: int
    unconditional: float
    conditional: float | None


@dataclass(frozen=True, config=STRICT)
class Expectation:
    """Guesses of one drafter of which about the same chance was expected, once all before them had come true.

    Attributes:
        low, high: the chances of this bin.
        tried: guesses. `expected`: their mean chance. `accepted`: the share of them that came true.
    """

    drafter: str
    low: float
    high: float
    tried: int
    expected: float
    accepted: float


@dataclass(frozen=True, config=STRICT)
class AcceptanceTable:
    """Statistics of speculation over many requests.

    Attributes:
        rate: accepted / drafted tokens.
        length: tokens emitted per target forward, bonus included.
        forwards_per_token: target forwards per emitted token of a request.
        accepted_lengths: a histogram: `accepted_lengths[a]` is the number of forwards that accepted a draft tokens.
        drafted_lengths: the same of drafts: `drafted_lengths[d]` forwards had d draft tokens on the longest path.
        drafted_by, plain: forwards with a draft by drafter, and without one by reason, see `SpeculationStats`.
        reliability: expected against real acceptance, where a drafter says how clearly its guesses won their draws.
    """

    rate: float
    length: float
    forwards_per_token: float
    forwards: int
    emitted: int
    drafted: int
    accepted: int
    accepted_lengths: list[int]
    drafted_lengths: list[int]
    positions: list[Position]
    drafted_by: dict[str, int] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    reliability: list[Expectation] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class TimeShares:
    """Shares of the wall time: making and feeding drafts, the target's forward with verification, the rest."""

    draft: float
    verify: float
    host: float


@dataclass(frozen=True, config=STRICT)
class StepCost:
    """Decoding steps of so many rows: median seconds by part."""

    rows: int
    steps: int
    draft_s: float
    verify_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.host_s


@dataclass(frozen=True, config=STRICT)
class ContextCost:
    """Decoding steps whose mean context was `low` .. `high` - 1 tokens: median seconds, tokens per row and step."""

    low: int
    high: int
    steps: int
    step_s: float
    tokens_per_row: float


@dataclass(frozen=True, config=STRICT)
class Choice:
    """Decoding steps in which the longest draft that any row was allowed had `draft_len` tokens; 0 for no draft.

    Attributes:
        step_s: median seconds of those with the commonest number of rows.
        tokens_per_row: that a step emits, the bonus token included.
        expected_cost: plain steps that the controller expected such a step to take, on average; None where it did not.
    """

    draft_len: int
    steps: int
    step_s: float
    tokens_per_row: float
    expected_cost: float | None = None


@dataclass(frozen=True, config=STRICT)
class Category:
    """One category of a workload; its speed-up is of the requests' own seconds, from arrival to last token."""

    name: str
    requests: int
    tokens: int
    speed_up: Estimate
    acceptance: AcceptanceTable


@dataclass(frozen=True, config=STRICT)
class Variant:
    """One way to decode the prompts of a cell.

    Attributes:
        max_draft_len: longest draft; 0 is plain decoding.
        chosen: the controller chose the length of every step, up to `max_draft_len`; else all drafts had that length.
        choices: the lengths that it chose, the shortest first; empty where it was off.
        tree_top_k: branches of each level of a draft; 1 is a chain.
        tokens: of one round. `round_s`: wall time of each round.
        prompt_share: share of the requests' time before the first token, which no draft shortens.
        inter_token_s: gaps between emissions over the tokens of the later one, each token counted.
        speed_up: plain time / this time, round by round.
    """

    max_draft_len: int
    method: str
    tokens: int
    round_s: list[float]
    tokens_per_second: float
    speed_up: Estimate
    acceptance: AcceptanceTable
    ttft_s: Spread
    inter_token_s: Spread | None
    prompt_share: float
    time_share: TimeShares
    steps: list[StepCost]
    contexts: list[ContextCost]
    categories: list[Category]
    chosen: bool = False
    choices: list[Choice] = field(default_factory=list)
    tree_top_k: int = 1

    @property
    def label(self) -> str:
        return "plain" if self.max_draft_len == 0 else f"{self.method} {self.shape}"

    @property
    def shape(self) -> str:
        """Of its drafts: "4", "4x2" for a tree with 2 branches a level, or "chosen"."""
        branches = f"x{self.tree_top_k}" if self.tree_top_k > 1 else ""
        return "chosen" if self.chosen else f"{self.max_draft_len}{branches}"
