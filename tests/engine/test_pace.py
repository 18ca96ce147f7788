"""Pace: whatever prompts cost, streams get their tokens within the time that the share allows."""

from __future__ import annotations

import pytest

from sametoken.engine.pace import LEAST, Pace


def run(pace: Pace, steps: int, alone: float, token: float, progress: float = 1.0, waiting: bool = True) -> list[tuple]:
    """Steps of a machine on which streams take `alone` seconds and a prompt token `token` more: (tokens, seconds)."""
    seen = []
    for _ in range(steps):
        tokens = pace.tokens() if waiting else 0
        seen.append((tokens, alone + tokens * token))
        pace.saw(tokens, seen[-1][1], progress)
    return seen


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("token", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("progress", [1.0, 3.0])
def test_streams_keep_their_share_of_the_time(share: float, token: float, progress: float) -> None:
    pace = Pace(share, most=64)
    run(pace, 20, 0.004, token, progress, waiting=False)
    seen = run(pace, 4000, 0.004, token, progress)
    total, pieces = sum(seconds for _, seconds in seen), [tokens * token for tokens, _ in seen]
    spent = sum(pieces) / total
    assert sum(pieces) - max(pieces) <= share * total
    most = 64 * token / (0.004 + 64 * token)  # where even the largest piece costs less than allowed
    assert spent >= min(share, most) * 0.9
    assert all(tokens == 0 or LEAST <= tokens <= 64 for tokens, _ in seen)


def test_what_was_not_used_is_not_saved_up() -> None:
    pace = Pace(0.5, most=64)
    run(pace, 5000, 0.004, 1e-4, waiting=False)
    seen = run(pace, 20, 0.004, 1e-4)
    assert sum(tokens for tokens, _ in seen) <= 20 * 40 + LEAST


def test_it_learns_that_streams_became_slower_and_faster() -> None:
    pace = Pace(0.5, most=64)
    run(pace, 50, 0.004, 1e-4, waiting=False)
    run(pace, 2000, 0.04, 1e-3)
    for alone, token in ((0.04, 1e-3), (0.004, 1e-4)):
        run(pace, 2000, alone, token)
        seen = run(pace, 1000, alone, token)
        taken = sum(seconds for _, seconds in seen) / (1000 * alone)
        assert taken == pytest.approx(2.0, rel=0.1)


def test_a_share_of_one_and_a_machine_unknown_are_no_limit() -> None:
    assert [tokens for tokens, _ in run(Pace(1.0, most=64), 10, 0.004, 1.0)] == [64] * 10
    assert Pace(0.5, most=64).tokens() == 64


def test_a_small_limit_holds_for_small_pieces() -> None:
    pace = Pace(0.5, most=5)
    run(pace, 20, 0.004, 1e-6, waiting=False)
    assert {tokens for tokens, _ in run(pace, 100, 0.004, 1e-6)} == {0, 5}
