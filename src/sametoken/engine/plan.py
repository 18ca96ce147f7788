"""A step as plain data: the rows that run, their new pages, and the tokens that each row computes.

Ranks can replay it and tests print it. Preemptions happen first, then admissions, then pages.
"""

from __future__ import annotations

from typing import NamedTuple


class Decode(NamedTuple):
    """One pending token of `row`, with at most `limit` draft tokens on a path.

    Attributes:
        methods, joined: the drafters of the row, see `control.choice.RequestedDraft`.
        reason: why the limit is 0, see `control.choice`; "room": too few pages or tokens were left in the step.
        start: tokens of the row before the pending one, all in the target's cache.
        siblings: most draft tokens beside a chain that ends where guesses are no longer worth their cost.
    """

    row: int
    limit: int
    methods: tuple[str, ...] = ()
    reason: str = ""
    start: int = 0
    joined: bool = False
    siblings: int = 0


class PromptPiece(NamedTuple):
    """Tokens of `row` from position `start`; if `last`, they complete the prompt, so the next token is drawn."""

    row: int
    start: int
    tokens: tuple[int, ...]
    last: bool


class Admission(NamedTuple):
    """Request `id` takes `row`; reused pages hold `cached` leading tokens, and the draft's KV of `draft_cached` of
    them.
    """

    row: int
    id: int
    cached: int
    draft_cached: int


class Plan(NamedTuple):
    """One step: pages to take, tokens to compute.

    Attributes:
        preempted: rows that are vacated. `admitted`: rows that are taken. `pages`: new pages by row.
        decode, prefill: work of the rows, at most one entry for a row.
        captured: the step runs as a graph on the device, a step ahead of the host, and drafts are made there; without
            entries it only waits for the steps already launched.
    """

    preempted: tuple[int, ...] = ()
    admitted: tuple[Admission, ...] = ()
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    decode: tuple[Decode, ...] = ()
    prefill: tuple[PromptPiece, ...] = ()
    captured: bool = False
