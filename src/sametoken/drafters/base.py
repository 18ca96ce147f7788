"""Protocol of drafters, which observe committed tokens and propose the next ones.

A drafter can cost time but never change a token: the target's draws do not depend on drafts (`speculation.verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from sametoken.control.worth import EndedChains, Worth
from sametoken.drafters.automaton import SuffixAutomaton
from sametoken.drafters.padded import Guess, guesses_of
from sametoken.speculation.draft import Draft
from sametoken.speculation.sampling import Sampling

if TYPE_CHECKING:
    from sametoken.drafters.device import Proposer


class RowOrigin(NamedTuple):
    """Properties of a request that drafters use.

    Attributes:
        owner: owner of the texts that may serve as drafts: requests of different owners share no texts.
        prediction: index of the output that the caller predicted, None without a prediction.
    """

    owner: str = ""
    prediction: SuffixAutomaton | None = None


ANYONE = RowOrigin()


class Proposed(NamedTuple):
    """Drafts of B rows, with their drafter's confidence in them.

    Attributes:
        drafts: [B] draft tokens of each row.
        shares: [B, L, K] share of each of K candidates at depth L in the drafter's own draw, see
            `model.compiled_guesses.Guesses`; None if the drafter reports none.
        ended: candidates, if the value of guesses decided where the rows end; otherwise None.
    """

    drafts: Sequence[Guess]
    shares: Tensor | Sequence[Sequence[Sequence[float]]] | None = None
    ended: EndedChains | None = None

    @classmethod
    def of(cls, found: Proposed | Draft) -> Proposed:
        """Proposal from the result of a drafter, which may be a `Draft` alone (the former protocol)."""
        return found if isinstance(found, Proposed) else cls(guesses_of(found))


class Drafter(Protocol):
    """Base class of drafters. Subclasses that draft on the host need only the first four methods.

    Attributes:
        taps: target layers (output of block i, 0-based) whose hidden states the drafter reads, in its order; () for
            none. A drafter with taps and a KV cache cannot recompute tokens that it did not observe, so a prefix page
            is reused only if it contains the drafter's KV, computed with the same next token.
        namespace: name of the drafter's KV in the shared cache pages, "" if it has none.
        runs_model: true if drafting takes forwards of a model.
        nodes: most draft tokens of one proposal; sizes the lookahead of the cache.
    """

    taps: tuple[int, ...] = ()
    namespace: str = ""
    runs_model: bool = False
    nodes: int

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        """Start a sequence in `row`; the tokens `cached` lie in reused prefix pages and are not observed.

        Args:
            draft_cached: number of leading tokens for which the pages contain this drafter's KV.
            origin: the request of the sequence.
        """

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        """Observe committed tokens, in order: a prompt chunk, or the accepted path from the pending token on.

        Called while the row decodes plainly too, so that drafting can resume at any time. Costly work belongs in
        `propose` and `catch_up`.

        Args:
            rows: distinct rows.
            tokens: one sequence of token ids per row, following the tokens admitted and observed before.
            features: [sum of lengths, len(taps) * H] hidden states of these tokens, or None without taps.
        """

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: Worth | None = None,
    ) -> Proposed:  # fmt: skip
        """Draft the tokens after the pending ones; must not change the observed state.

        Args:
            pending: emitted but not yet observed token of each row, node 0 of its draft.
            limits: most draft tokens on any path of each row.
            sampling: sampling state of the rows, under whose noise a drafter ranks its logits.
            worth: value and cost of guesses, by which a drafter that reports shares omits those that do not pay.

        Returns:
            Drafts of at most slots(max(limits)) tokens, not counting siblings added because of `worth`.
        """
        ...

    def release(self, row: int) -> None:
        """Drop the row's sequence, which ended or lost its pages; the row number will be reused."""

    def slots(self, limit: int) -> int:
        """Upper bound of the cache slots past the pending token of a draft with paths of at most `limit` tokens.

        No slots are reserved beyond this number.
        """
        return self.nodes if limit else 0

    def cached_tokens(self, row: int) -> int:
        """Number of the row's leading tokens for which the pages contain this drafter's KV."""
        return 0

    def unread(self, row: int, context: int) -> int:
        """Number of tokens that the model has to read before it drafts for a row of `context` committed tokens."""
        return context - self.cached_tokens(row)

    def catch_up(self, rows: Sequence[int]) -> None:
        """Run the model over long backlogs of these rows now, if that helps: they will probably be drafted soon."""
        return

    @property
    def remembered(self) -> int:
        """Approximate size in bytes of the stored outputs of ended requests."""
        return 0

    def captured(self) -> Proposer | None:
        """Proposer for captured steps, None if the drafter works on the host only."""
        return None
