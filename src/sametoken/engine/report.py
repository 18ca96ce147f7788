"""Results of a step as data: the runner's result per row, and the report that all rooms above the engine read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from sametoken.drafters.padded import Guess
from sametoken.engine.plan import Plan
from sametoken.engine.request import Emission, Request
from sametoken.speculation.union import Union

Makers = tuple[str, ...]
NO_UNIONS: Mapping[int, Union] = MappingProxyType({})


class Proposal(NamedTuple):
    """Guesses for the decoding rows of a step.

    Attributes:
        pending: each row's pending token.
        guesses: of each row, after that token.
        makers: the methods that had a guess for each row.
        unions: of rows with several makers, by place: the guesses of each of them.
    """

    pending: Sequence[int]
    guesses: Sequence[Guess]
    makers: list[Makers]
    unions: Mapping[int, Union] = NO_UNIONS


class RowResult(NamedTuple):
    """Result of a step for one row.

    Attributes:
        start: position of the first token of `committed`.
        committed: tokens whose keys and values the step left in the target's cache: the pending token and the
            accepted ones that the request took, or a piece of a prompt; empty where the request failed.
        features: [len(committed), taps * H] the target's hidden states of these tokens, None if no drafter reads them.
        longest: longest path of the row's draft; `accepted`: draft tokens that the target drew as well.
        emission: tokens for the request; None for a piece of a prompt that is not the last.
        prompt: true for a piece of a prompt.
        path: the accepted nodes of the row's draft, the root first, where the host verified it.
    """

    request: Request
    start: int
    committed: Sequence[int]
    features: Tensor | None
    longest: int
    accepted: int
    emission: Emission | None
    prompt: bool
    path: Sequence[int] = (0,)


class Done(NamedTuple):
    """A step that the target has verified: an earlier one than that passed to `run` if the device runs ahead.

    Attributes:
        rows: decoding rows in the plan's order, then pieces of prompts; empty if no result was due.
        requests: those in the step passed to `run`, which are charged its time.
        tokens: of the decoding rows in the target's forward; 0 if unknown to the host.
    """

    plan: Plan
    proposal: Proposal
    rows: list[RowResult]
    requests: list[Request]
    tokens: int = 0


class Timings(NamedTuple):
    """Wall time of a step in seconds: drafts, target, everything else."""

    draft_s: float
    verify_s: float
    other_s: float


class StepReport(NamedTuple):
    """Result of one call of `Engine.step`.

    Attributes:
        plan: of the step whose results these are.
        emissions: those of all requests that emitted tokens or ended, including those aborted since the last step.
        makers: the methods that drafted each row of `plan.decode`.
        features: number of tokens whose hidden states were passed to drafters.
        timings: of this call.
    """

    plan: Plan
    emissions: list[Emission]
    makers: list[Makers]
    features: int
    timings: Timings

    @property
    def requests(self) -> list[Request]:
        """Requests that emitted tokens or ended."""
        return [emission.request for emission in self.emissions]
