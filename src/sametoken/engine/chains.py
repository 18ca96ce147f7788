"""What a drafter said of one row's chain of guesses, and what became of it. Legend: L places, K candidates of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sametoken.drafters.base import Drafter


class Said(NamedTuple):
    """The candidates of each place of a row's chain, best first; the first one is the guess of the chain.

    Attributes:
        shares: [L][K] how clearly each of them won the drafter's draw.
        tokens: [L][K] what they are; None where the guesses alone are known.
        kept: [L] how many of them joined the draft.
    """

    shares: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[int]] | None = None
    kept: Sequence[int] = ()


def said_by(drafter: Drafter) -> Iterator[Said]:
    """Of each row of a drafter's last proposal, none where it does not say."""
    shares, ended = drafter.shares, drafter.ended
    if shares is None:
        return iter(())
    if ended is None:
        return map(Said, shares.tolist())
    return map(Said, shares.tolist(), ended.candidates, ended.kept)


class ChainOutcome(NamedTuple):
    """What became of a row's chain of guesses.

    Attributes:
        accepted: its guesses that came true, siblings aside.
        drawn: of each place that was reached, the rank of the candidate that came true; K where none did.
        kept: [L] how many candidates of each place were verified.
        siblings: how many of these were not the chain's; `saved`: whether one of them came true.
    """

    accepted: int
    drawn: Sequence[int] = ()
    kept: Sequence[int] = ()
    siblings: int = 0
    saved: bool = False

    @classmethod
    def of(cls, said: Said, longest: int, accepted: int, emitted: Sequence[int]) -> ChainOutcome:
        """Of a draft with a longest path of so many guesses, of which `accepted` are among the tokens `emitted`."""
        if said.tokens is None:
            return cls(accepted, [*[0] * accepted, 1][:longest], [1] * longest)
        places, drawn = sum(count > 0 for count in said.kept), list[int]()
        for token, candidates in zip(emitted, said.tokens[:places], strict=False):
            drawn.append(candidates.index(token) if token in candidates else len(candidates))
            if drawn[-1]:
                break
        saved = bool(drawn) and 0 < drawn[-1] < said.kept[len(drawn) - 1]
        return cls(accepted - saved, drawn, said.kept, sum(said.kept) - places, saved)
