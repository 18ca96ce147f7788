"""The protocol of a drafter: it observes committed tokens and proposes the next ones.

It can only cost time, never change a token: the target's draws do not depend on it (`speculation.verify`).
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
    """Facts of a request that drafters use.

    Attributes:
        owner: owner of the texts that may serve as drafts: requests of different owners share no texts.
        prediction: the output that the caller predicted, None without a prediction.
    """

    owner: str = ""
    prediction: SuffixAutomaton | None = None


ANYONE = RowOrigin()


class Proposed(NamedTuple):
    """Drafts of B rows, and the chances that their drafter gives them.

    Attributes:
        drafts: [B] guesses of each row.
        shares: [B, L, K] share of each candidate of a place in the drafter's own draw, see
            `model.compiled_guesses.Guesses`; None if the drafter reports none.
        ended: candidates, if the worth of guesses ended the rows; None if not.
    """

    drafts: Sequence[Guess]
    shares: Tensor | Sequence[Sequence[Sequence[float]]] | None = None
    ended: EndedChains | None = None

    @classmethod
    def of(cls, found: Proposed | Draft) -> Proposed:
        """Proposal of a drafter, which may return a tensor draft alone, as all did in the past."""
        return found if isinstance(found, Proposed) else cls(guesses_of(found))


class Drafter(Protocol):
    """Maker of drafts for the rows of one engine. Subclasses that guess on the host need only the first four methods.

    Attributes:
        taps: target layers (output of block i, 0-based) whose hidden states it reads, in its order; () for none. With
            taps and keys and values in the pages it cannot make up for tokens that it did not observe, so only prefix
            pages that hold its keys and values are reused, made with the token after them that follows now.
        namespace: names its keys and values in the shared cache pages, "" if it keeps nothing there.
        runs_model: guessing takes forwards of a model, which cost time.
        nodes: most draft tokens of one proposal, which sizes the lookahead of the cache.
    """

    taps: tuple[int, ...] = ()
    namespace: str = ""
    runs_model: bool = False
    nodes: int

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        """Start a sequence in `row`; the tokens `cached` lie in reused prefix pages and are not observed.

        Args:
            draft_cached: number of the first of them for which those pages hold this drafter's keys and values.
            origin: the request of the sequence.
        """

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        """Observe committed tokens, in order: a prompt chunk, or the accepted path from the pending token on.

        Called while the row decodes plainly too, so that it can draft again at any time; costly work is best left to
        `propose` and `catch_up`.

        Args:
            rows: distinct rows.
            tokens: one sequence of token ids per row, continuing what was admitted and observed before.
            features: [sum of lengths, len(taps) * H] hidden states of these tokens, or None without taps.
        """

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: Worth | None = None,
    ) -> Proposed:  # fmt: skip
        """Draft the tokens after the pending ones; must not change the observed state.

        Args:
            pending: each row's emitted but not yet observed token, node 0 of its draft.
            limits: most draft tokens on any path of each row.
            sampling: the rows' sampling, whose noise a drafter ranks its scores under.
            worth: of guesses, so that those not worth their cost are left out; only for a drafter that reports shares.

        Returns:
            Drafts of at most slots(max(limits)) tokens, siblings of `worth` aside.
        """
        ...

    def release(self, row: int) -> None:
        """End the row's sequence, which ended or lost its pages; its number will be used again."""

    def slots(self, limit: int) -> int:
        """Most cache slots past the pending token that a draft of a row with paths of at most `limit` tokens takes.

        A promise: nodes beyond it would have no place in the cache.
        """
        return self.nodes if limit else 0

    def cached_tokens(self, row: int) -> int:
        """Number of the row's leading tokens for which the pages hold this drafter's keys and values."""
        return self.held(row)

    def held(self, row: int) -> int:
        """Former name of `cached_tokens`."""
        return 0

    def catch_up(self, rows: Sequence[int]) -> None:
        """Read long backlogs of these rows now, if that helps: they will probably be drafted soon."""
        return

    @property
    def remembered(self) -> int:
        """Approximate bytes of the outputs of ended requests that it remembers."""
        return 0

    def captured(self) -> Proposer | None:
        """Its proposer inside a captured step, None if it can guess on the host only."""
        return None
