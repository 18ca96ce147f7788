"""Measurement of one variant of decoding: speed, acceptance, time of its parts, choices of the controller.

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
    """Value with its 95 % confidence interval, which needs two or more rounds."""

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
    """Acceptance of the guesses at one position of a draft.

    Attributes:
        position: position from 1, for the guess after the pending token.
        drafted: forwards with a guess at this position.
        tried: forwards that also accepted all guesses before it.
        accepted: forwards that accepted the guess.
        unconditional: accepted / drafted.
        conditional: accepted / tried; None without tried guesses.
    """

    position: int
    drafted: int
    tried: int
    accepted: int
    unconditional: float
    conditional: float | None


@dataclass(frozen=True, config=STRICT)
class Expectation:
    """Guesses of one drafter after an accepted prefix, in one bin of their expected chance.

    Attributes:
        drafter: name of the drafter.
        low: lower bound of the bin.
        high: upper bound of the bin.
        tried: number of guesses.
        expected: mean expected chance.
        accepted: share of accepted guesses.
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
        length: emitted tokens per target forward, with the bonus token.
        forwards_per_token: target forwards per emitted token of a request.
        forwards: number of target forwards.
        emitted: number of emitted tokens.
        drafted: number of draft tokens.
        accepted: number of accepted draft tokens.
        accepted_lengths: number of forwards that accepted a draft tokens, at index a.
        drafted_lengths: number of forwards with d draft tokens on the longest path, at index d.
        positions: acceptance by position.
        drafted_by: number of forwards with a draft, by drafter.
        plain: number of forwards without a draft, by reason, see `SpeculationStats`.
        reliability: expected and real acceptance, for drafters that return the confidence of their guesses.
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
    """Shares of the wall time: drafting, the target's forward with verification, and the host's remaining work."""

    draft: float
    verify: float
    host: float


@dataclass(frozen=True, config=STRICT)
class StepCost:
    """Median seconds of decoding steps with `rows` rows, by part."""

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
    """Median seconds and tokens per row of decoding steps with a mean context of `low` .. `high` - 1 tokens."""

    low: int
    high: int
    steps: int
    step_s: float
    tokens_per_row: float


@dataclass(frozen=True, config=STRICT)
class Choice:
    """Decoding steps with an equal greatest draft limit.

    Attributes:
        draft_len: greatest draft limit of any row, in tokens; 0 for no draft.
        steps: number of steps.
        step_s: median seconds of the steps with the most frequent number of rows.
        tokens_per_row: emitted tokens per row and step, with the bonus token.
        expected_cost: mean time that the controller expected, in plain steps; None without an expectation.
    """

    draft_len: int
    steps: int
    step_s: float
    tokens_per_row: float
    expected_cost: float | None = None


@dataclass(frozen=True, config=STRICT)
class Category:
    """One category of a workload; its speed-up compares seconds from arrival to last token of its requests."""

    name: str
    requests: int
    tokens: int
    speed_up: Estimate
    acceptance: AcceptanceTable


@dataclass(frozen=True, config=STRICT)
class Variant:
    """Decoding of the prompts of a cell with one shape of drafts.

    Attributes:
        max_draft_len: draft length in tokens, or the longest one if `chosen`; 0 for plain decoding.
        method: name of the drafter.
        tokens: tokens of one round.
        round_s: wall time of each round.
        tokens_per_second: tokens per second over all rounds.
        speed_up: time of plain decoding / time of this variant, paired by round.
        acceptance: acceptance over all requests.
        ttft_s: time to the first token.
        inter_token_s: time per token between emissions; None if every request had one emission.
        prompt_share: share of the requests' time before the first token, which drafts do not shorten.
        time_share: shares of the wall time by part.
        steps: costs of decoding steps by number of rows.
        contexts: costs of decoding steps by context.
        categories: figures by category of the prompts.
        chosen: true if the controller chose the length of every step.
        choices: decoding steps by chosen length, the shortest first; empty unless `chosen`.
        tree_top_k: branches of each draft level; 1 for a chain.
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
        """Shape of the drafts: "4", "4x2" for a tree with 2 branches per level, or "chosen"."""
        branches = f"x{self.tree_top_k}" if self.tree_top_k > 1 else ""
        return "chosen" if self.chosen else f"{self.max_draft_len}{branches}"
