"""Chains of guesses from counted texts, with the siblings beside them, that are worth their verification.

A drafter that looks texts up has no draw of its own. In place of a share in it stands how often a token followed the
match, less for a short match: `trust`. The policy learns from verified guesses how often which share comes true. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sametoken.control.worth import Worth, chance_of
from sametoken.drafters.automaton import Follower, Match, SuffixAutomaton
from sametoken.drafters.padded import Guess

CANDIDATES = 3  # of a place
LEAST_SHARE = 0.1  # of a candidate among all continuations


class RowPrice(NamedTuple):
    """Worth of one row's guesses and of the time to verify one; see `Worth`.

    Attributes:
        chances: [K][bins] tables of the row's kind.
    """

    chances: Sequence[Sequence[float]]
    weight: float
    verify: float
    siblings: int

    @classmethod
    def of(cls, worth: Worth, row: int) -> RowPrice:
        """Price of one row."""
        tables = [kinds[worth.sampled[row]] for kinds in worth.chances[:CANDIDATES]]
        return cls(tables, worth.weights[row], worth.time.verify, worth.siblings[row] if worth.siblings else 0)


class PricedChain(NamedTuple):
    """A row's chain. Legend: L places, K candidates of each.

    Attributes:
        guess: the chain, then siblings in the order of their places.
        candidates, shares: [L][K] tokens and their shares, best first; the last place may be one that was left out.
        kept: [L] how many of them are in the guess.
        value: sum of the chances of the guesses.
    """

    guess: Guess
    candidates: Sequence[Sequence[int]] = ()
    shares: Sequence[Sequence[float]] = ()
    kept: Sequence[int] = ()
    value: float = 0.0


def trust(found: Follower, length: int) -> float:
    """Share of a token that followed a match of `length` tokens: about the chance that it follows again."""
    return found.share * (length / (1 + length)) ** 2


def priced_chain(automaton: SuffixAutomaton, match: Match, limit: int, price: RowPrice) -> PricedChain:
    """The guesses after a match that are worth their verification, at most `limit` in the chain."""
    candidates, shares, kept, siblings = list[list[int]](), list[list[float]](), list[int](), list[tuple[int, int]]()
    chain, path, value = list[int](), 1.0, 0.0
    while len(chain) < limit:
        found = sorted(automaton.followers(match, LEAST_SHARE), key=lambda each: -each.share)[: len(price.chances)]
        if not found:
            break
        trusted = [trust(each, match.length) for each in found]
        chances, least = list[float](), path
        for rank, share in enumerate(trusted):
            least = min(least, path * chance_of(price.chances[rank], share, rank))
            chances.append(least)
        worthy = sum(chance * price.weight > price.verify for chance in chances)
        beside = max(0, min(worthy - 1, price.siblings - len(siblings)))
        candidates.append([each.token for each in found])
        shares.append(trusted)
        kept.append(min(worthy, 1) + beside)
        if not worthy:
            break
        siblings += [(len(chain), each.token) for each in found[1 : 1 + beside]]
        chain.append(found[0].token)
        value += sum(chances[: 1 + beside])
        path, match = chances[0], found[0].match
    tokens = [*chain, *(token for _, token in siblings)]
    return PricedChain(
        Guess(tokens, [*range(len(chain)), *(parent for parent, _ in siblings)]), candidates, shares, kept, value
    )
