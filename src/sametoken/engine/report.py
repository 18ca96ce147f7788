"""What a step did, as data: the runner's result per row, and the report that everybody above the engine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from sametoken.engine.plan import Plan
from sametoken.engine.request import Emission, Request
from sametoken.speculation.draft import Draft
from sametoken.speculation.union import Union

Makers = tuple[str, ...]
NO_UNIONS: Mapping[int, Union] = MappingProxyType({})


class Proposal(NamedTuple):
    """The draft of the decoding rows of a step.

    Attributes:
        makers: the methods that had a guess for each row.
        unions: of rows with several makers, by place: which of them said what.
    """

    draft: Draft
    makers: list[Makers]
    unions: Mapping[int, Union] = NO_UNIONS


class RowResult(NamedTuple):
    """What a step computed for one row.

    Attributes:
        start: position of the first token of `committed`.
        committed: tokens whose keys and values the step left in the target's cache: the pending token and the
            accepted ones that the request took, or a piece of a prompt; empty where the request failed.
        features: [len(committed), taps * H] the target's hidden states of these tokens, None where nobody reads them.
        longest: longest path of the row's draft; `accepted`: draft tokens that the target drew as well.
        emission: what the request got; None for a piece of a prompt that is not the last.
        prompt: whether it is a piece of a prompt.
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
    """A step that the target has verified: an earlier one than `run` was asked for where the device runs ahead.

    Attributes:
        rows: decoding rows in the plan's order, then pieces of prompts; none where no result was due.
        requests: who took part in the step that was asked for, and is charged its time.
        tokens: of the decoding rows in the target's forward; 0 where the host does not know.
    """

    plan: Plan
    proposal: Proposal
    rows: list[RowResult]
    requests: list[Request]
    tokens: int = 0


class Timings(NamedTuple):
    """Seconds of a step by the wall: on drafts, on the target, and on everything else."""

    draft_s: float
    verify_s: float
    other_s: float


class StepReport(NamedTuple):
    """What one call of `Engine.step` did.

    Attributes:
        plan: of the step whose results these are.
        emissions: what each request got that emitted tokens or ended, also those that were aborted since the last step.
        makers: the methods that drafted each row of `plan.decode`.
        features: tokens whose hidden states the drafters were given.
        timings: of this call.
    """

    plan: Plan
    emissions: list[Emission]
    makers: list[Makers]
    features: int
    timings: Timings

    @property
    def requests(self) -> list[Request]:
        """Those that emitted tokens or ended."""
        return [emission.request for emission in self.emissions]
