"""A thought that is bounded: token by token over a small vocabulary, along trees of guesses, within another grammar."""

from __future__ import annotations

import pytest
import torch

from sametoken.engine.confined import AllowedTokens, BoundedThought
from sametoken.options.sampling import ThoughtBound

SPELLED = [b"<think>", b"</th", b"ink>", b"a", b" ", b"</think>"]
MARK = (1, 2)


def bounded(tokens: int, *, begun: bool = False, only: list[int] | None = None) -> BoundedThought:
    mask = torch.zeros(len(SPELLED), dtype=torch.bool)
    mask[only or []] = True
    inner = None if only is None else AllowedTokens(mask, None)
    bound = ThoughtBound(tokens=tokens, opens="<think>", closes="</think>", begun=begun)
    return BoundedThought(inner, bound, SPELLED, MARK)


def free(grammar: BoundedThought) -> list[int]:
    return grammar.allowed([-1], [-1])[0].nonzero().flatten().tolist()


EVERY = list(range(len(SPELLED)))


@pytest.mark.parametrize(
    ("begun", "tokens", "said", "expected"),
    [
        (True, 0, [], [1]),
        (True, 2, [3], EVERY),
        (True, 2, [3, 3], [1]),
        (True, 2, [3, 3, 1], [2]),
        (True, 2, [3, 3, 1, 2], EVERY),
        (True, 2, [3, 5, 3, 3], EVERY),  # it ended by itself
        (True, 3, [1, 2, 3], EVERY),  # in two tokens
        (False, 1, [4, 0], EVERY),
        (False, 1, [4, 0, 3], [1]),
        (False, 0, [0], [1]),
        (False, 1, [3, 0, 3, 3], EVERY),  # it did not begin with a thought
    ],
)
def test_only_the_mark_follows_a_thought_that_is_long_enough(
    begun: bool, tokens: int, said: list[int], expected: list[int]
) -> None:
    grammar = bounded(tokens, begun=begun)
    for token in said:
        assert not grammar.accept(token)
    assert free(grammar) == expected
    assert grammar.forced(9) == ([] if expected == EVERY else list(MARK[MARK.index(expected[0]) :]))


def test_every_path_of_a_tree_has_its_own_thought() -> None:
    grammar = bounded(2, begun=True)
    grammar.accept(3)
    copy = grammar.copy()
    masks = grammar.allowed([3, 3, 5, 1, 3], [-1, 0, 0, 1, 2])
    allowed = [mask.nonzero().flatten().tolist() for mask in masks]
    assert allowed == [EVERY, [1], EVERY, [2], EVERY]
    grammar.accept(3)
    assert (free(grammar), free(copy)) == ([1], EVERY)


def test_what_another_grammar_bans_stays_banned() -> None:
    grammar = bounded(1, begun=True, only=[1, 3])
    assert free(grammar) == [1, 3]
    grammar.accept(3)
    assert free(grammar) == [1]
    grammar.accept(1)
    assert free(grammar) == []
    assert grammar.failure is None
