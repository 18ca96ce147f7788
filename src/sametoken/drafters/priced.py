"""Chains of guesses from counted texts, with siblings, that repay the cost of their verification.

A lookup drafter has no draw of its own: its shares are frequencies of tokens after a match, reduced for short matches
(`trust`). The policy measures how often guesses of a given share are accepted. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sametoken.control.worth import Worth, chance_of
from sametoken.drafters.automaton import Follower, Match, SuffixAutomaton
from sametoken.drafters.padded import Guess

CANDIDATES = 3  # per place
LEAST_SHARE = 0.1  # of all continuations, for a candidate


class RowPrice(NamedTuple):
    """Value of one row's guesses and cost of verifying one; see `Worth`.

    Attributes:
        chances: [K][bins] acceptance tables of the row's kind.
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
    """Chain of one row. Legend: L places, K candidates of each.

    Attributes:
        guess: the chain, then siblings in the order of their places.
        candidates: [L][K] tokens, best first; the last place may be one that was left out.
        shares: [L][K] shares of the candidates.
        kept: [L] number of candidates of each place that are in the guess.
        value: sum of the acceptance probabilities of the guesses.
    """

    guess: Guess
    candidates: Sequence[Sequence[int]] = ()
    shares: Sequence[Sequence[float]] = ()
    kept: Sequence[int] = ()
    value: float = 0.0


def trust(found: Follower, length: int) -> float:
    """Estimated probability that a token follows a match of `length` tokens once more."""
    return found.share * (length / (1 + length)) ** 2


def priced_chain(automaton: SuffixAutomaton, match: Match, limit: int, price: RowPrice) -> PricedChain:
    """Chain of at most `limit` guesses after a match, as far as they repay the cost of their verification."""
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
