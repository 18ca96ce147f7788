"""A step as plain data: which rows run, which pages they get, what each row computes.

Ranks can replay it and tests print it. Preemptions happen first, then admissions, then pages.
"""

from __future__ import annotations

from typing import NamedTuple


class Decode(NamedTuple):
    """One pending token of `row`, with at most `limit` draft tokens on a path.

    Attributes:
        methods, joined: who is asked for them, see `control.choice.RequestedDraft`.
        reason: why the limit is 0, see `control.choice`; "room": too few pages or tokens were left in the step.
        start: tokens of the row before the pending one, all in the target's cache.
        siblings: most draft tokens that may stand beside a chain, where what guesses are worth ends it.
    """

    row: int
    limit: int
    methods: tuple[str, ...] = ()
    reason: str = ""
    start: int = 0
    joined: bool = False
    siblings: int = 0


class PromptPiece(NamedTuple):
    """Tokens of `row` from position `start`; when `last`, they are all there is, so the next token is drawn."""

    row: int
    start: int
    tokens: tuple[int, ...]
    last: bool


class Admission(NamedTuple):
    """Request `id` takes `row`; reused pages hold `cached` leading tokens, `draft_cached` of them for the draft too."""

    row: int
    id: int
    cached: int
    draft_cached: int


class Plan(NamedTuple):
    """One step.

    Attributes:
        preempted: rows that are vacated. `admitted`: rows that are taken. `pages`: new pages by row.
        decode, prefill: what is computed, at most one entry for a row.
        captured: the step runs as a graph on the device, a step ahead of the host, and drafts are made there; without
            entries it only waits for the steps that are under way.
    """

    preempted: tuple[int, ...] = ()
    admitted: tuple[Admission, ...] = ()
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    decode: tuple[Decode, ...] = ()
    prefill: tuple[PromptPiece, ...] = ()
    captured: bool = False
