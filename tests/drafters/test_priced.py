"""Chains of looked-up guesses hold what is worth its verification, and what was left out is learned from too."""

from __future__ import annotations

import pytest

from sametoken.control.worth import Time, Worth
from sametoken.drafters.automaton import SuffixAutomaton
from sametoken.drafters.base import Proposed
from sametoken.drafters.priced import RowPrice, priced_chain
from sametoken.drafters.suffix import SuffixDrafter
from sametoken.engine.chains import said_in

EVEN = [[(place + 0.5) / 10 for place in range(10)] for _ in range(3)]  # a share comes true as often as it says
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4]


def indexed(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton(24)
    automaton.begin()
    for token in text:
        automaton.extend(token)
    return automaton


def made(verify: float, limit: int = 8, siblings: int = 4) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and kept candidates after `TEXT`."""
    automaton = indexed(TEXT)
    found = priced_chain(automaton, automaton.match(TEXT), limit, RowPrice(EVEN, 1.0, verify, siblings))
    assert len(found.kept) == len(found.candidates) == len(found.shares)
    return found.guess.tokens, found.guess.parents, list(found.kept)


def test_the_dearer_a_guess_is_to_verify_the_fewer_are_made() -> None:
    lengths = [len(made(verify)[0]) for verify in (0.0, 0.1, 0.3, 0.6, 0.7, 2.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[-1] == 0


def test_siblings_stand_beside_the_chain_where_several_tokens_followed() -> None:
    tokens, parents, kept = made(0.05)
    assert tokens[:2] == [5, 6]
    assert {7, 9} <= {token for token, parent in zip(tokens, parents, strict=True) if parent == 2}
    assert kept[2] == 2
    assert made(0.05, siblings=0)[2] == [1] * len(made(0.05, siblings=0)[0])
    assert len(made(0.0, limit=1, siblings=0)[0]) == 1


def proposed(verify: float) -> Proposed:
    """Of the drafter, after `TEXT` but for its last token."""
    drafter = SuffixDrafter(budget=12, max_draft_len=12)
    drafter.admit(0, TEXT[:-1])
    kinds = [[table, table] for table in EVEN]
    worth = Worth(kinds, [[0.5, 0.5]] * 3, [False], [1.0], Time(verify, 0.0, 0.0), [0])
    return drafter.propose([0], TEXT[-1:], [12], None, worth)


def test_a_guess_that_was_left_out_is_learned_from_by_the_token_that_came() -> None:
    found = proposed(2.0)
    assert found.drafts[0].tokens == []
    (said,) = said_in(found)
    assert list(said.kept) == [0]
    assert [said.outcome(0, 0, [token])[0] for token in (5, 8)] == [[0], [1]]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_an_outcome_has_the_ranks_of_accepted_guesses(accepted: int) -> None:
    found = proposed(0.05)
    (said,) = said_in(found)
    chain = found.drafts[0].tokens
    drawn, _ = said.outcome(len(chain), accepted, [*chain[:accepted], 99])
    assert list(drawn) == [0] * accepted + [len(said.shares[accepted])]
