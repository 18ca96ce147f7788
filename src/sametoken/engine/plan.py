"""Plan of a step as plain data: the rows that run, their new pages, and the tokens that each row computes.

Preemptions are applied first, then admissions, then pages.
"""

from __future__ import annotations

from typing import NamedTuple


class Decode(NamedTuple):
    """Decoding of one pending token of a row, with a draft.

    Attributes:
        row: row of the page table.
        limit: longest path of the draft in tokens; 0 for no draft.
        methods: drafters of the row, see `control.choice.RequestedDraft`.
        reason: reason of limit 0, see `control.choice`; "room" if too few pages or tokens were left in the step.
        start: number of tokens of the row before the pending one, all in the target's cache.
        joined: see `control.choice.RequestedDraft`.
        siblings: greatest number of draft tokens in addition to a chain, which ends where guesses do not pay.
    """

    row: int
    limit: int
    methods: tuple[str, ...] = ()
    reason: str = ""
    start: int = 0
    joined: bool = False
    siblings: int = 0


class PromptPiece(NamedTuple):
    """Tokens of `row` from position `start`; if `last`, they complete the prompt, and a token is drawn."""

    row: int
    start: int
    tokens: tuple[int, ...]
    last: bool


class Admission(NamedTuple):
    """Assignment of a row to a request.

    Attributes:
        row: row of the page table.
        id: identifier of the request.
        cached: number of leading tokens in reused pages.
        draft_cached: number of leading tokens whose draft's KV is in these pages.
    """

    row: int
    id: int
    cached: int
    draft_cached: int


class Plan(NamedTuple):
    """Plan of one step; each row has at most one entry in `decode` and `prefill` together.

    Attributes:
        preempted: rows that are vacated.
        admitted: rows that are assigned to requests.
        pages: new pages by row.
        decode: rows that decode.
        prefill: rows that read prompts.
        captured: true if the step, drafts included, runs as a graph on the device, a step ahead of the host; without
            entries, the step only waits for launched ones.
    """

    preempted: tuple[int, ...] = ()
    admitted: tuple[Admission, ...] = ()
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    decode: tuple[Decode, ...] = ()
    prefill: tuple[PromptPiece, ...] = ()
    captured: bool = False
