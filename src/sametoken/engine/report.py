"""Results of a step as data: the runner's result per row, and the report for rooms above the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from sametoken.drafters.padded import Guess
from sametoken.engine.plan import Plan
from sametoken.engine.request import Emission, Request
from sametoken.speculation.draft import Union

Makers = tuple[str, ...]
NO_UNIONS: Mapping[int, Union] = MappingProxyType({})


class Proposal(NamedTuple):
    """Guesses for the decoding rows of a step.

    Attributes:
        pending: pending token of each row.
        guesses: guesses of each row, after the pending token.
        makers: methods with a guess for each row.
        unions: united guesses of rows with several makers, by place.
    """

    pending: Sequence[int]
    guesses: Sequence[Guess]
    makers: list[Makers]
    unions: Mapping[int, Union] = NO_UNIONS


class RowResult(NamedTuple):
    """Result of a step for one row.

    Attributes:
        request: request of the row.
        start: position of the first token of `committed`.
        committed: tokens whose keys and values are in the target's cache after the step: the pending token and the
            accepted ones that the request took, or a piece of a prompt; empty if the request failed.
        features: [len(committed), taps * H] the target's hidden states of these tokens; None if no drafter reads them.
        longest: longest path of the row's draft, in tokens.
        accepted: number of draft tokens that the target also drew.
        emission: tokens for the request; None for a piece of a prompt that is not the last.
        prompt: true for a piece of a prompt.
        path: accepted nodes of the row's draft, the root first, if the host verified the draft.
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
    """Step that the target has verified; older than the step passed to `run` if the device runs ahead.

    Attributes:
        plan: plan of the verified step.
        proposal: guesses of the verified step.
        rows: decoding rows in order of the plan, then pieces of prompts; empty if no result was due.
        requests: requests in the step passed to `run`, whose statistics include its time.
        tokens: number of tokens of the decoding rows in the target's forward; 0 if unknown on the host.
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
        plan: plan of the step with these results.
        emissions: emissions of all requests that emitted tokens or ended, or were aborted since the last step.
        makers: methods with a guess for each row of `plan.decode`.
        features: number of tokens whose hidden states were passed to drafters.
        timings: wall time of this call.
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
