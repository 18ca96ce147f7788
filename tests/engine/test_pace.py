"""Pace: whatever prompts cost, streams get their tokens within the time that the share allows."""

from __future__ import annotations

import random

import pytest

from sametoken.engine.pace import LEAST, MOST_GAIN, Pace


def run(pace: Pace, steps: int, alone: float, token: float, waiting: bool = True) -> list[tuple]:
    """Steps of a machine on which streams take `alone` seconds and a prompt token `token` more: (tokens, seconds)."""
    seen = []
    for _ in range(steps):
        tokens = pace.tokens() if waiting else 0
        seen.append((tokens, alone + tokens * token))
        pace.saw(tokens, seen[-1][1], 1)
    return seen


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("token", [1e-6, 1e-4, 1e-2])
def test_streams_keep_their_share_of_the_time(share: float, token: float) -> None:
    pace = Pace(share, most=64)
    run(pace, 20, 0.004, token, waiting=False)
    seen = run(pace, 4000, 0.004, token)
    total, pieces = sum(seconds for _, seconds in seen), [tokens * token for tokens, _ in seen]
    spent = sum(pieces) / total
    assert sum(pieces) - max(pieces) <= share * total
    most = 64 * token / (0.004 + 64 * token)  # where even the largest piece costs less than allowed
    assert spent >= min(share, most) * 0.9
    assert all(tokens == 0 or LEAST <= tokens <= 64 for tokens, _ in seen)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("each", [0.0, 0.001, 0.004])
def test_prompts_keep_their_share_beside_drafts_of_any_length(share: float, each: float) -> None:
    """Some steps draft nothing and some much, so their times differ for another reason than a delay."""
    luck, pace, seconds, spent = random.Random(0), Pace(share, most=64), 0.0, 0.0
    for number in range(20_000):
        tokens, waiting = 8 + luck.choice([0, 0, luck.randint(1, 24)]), number // 1000 % 2
        read = pace.tokens() if waiting else 0
        alone = 0.01 + each * tokens
        pace.saw(read, alone + 0.003 * read, tokens)
        if waiting:
            seconds, spent = seconds + alone + 0.003 * read, spent + 0.003 * read
    assert spent / seconds == pytest.approx(share, rel=0.07)


@pytest.mark.parametrize(("gain", "counted"), [(0.7, 1.0), (1.0, 1.0), (1.5, 1.5), (5.0, MOST_GAIN)])
def test_time_that_drafts_save_is_for_prompts_first(gain: float, counted: float) -> None:
    """Streams keep their share of the pace of plain decoding, and all of what drafts gain beyond the most counted."""
    share, seconds, read, pace = 0.4, 0.0, 0.0, Pace(0.4, most=64)
    for number in range(6000):
        tokens = pace.tokens() if number > 1000 else 0
        pace.saw(tokens, 0.02 + 0.001 * tokens, 8, gain * 0.02)
        if number > 1000:
            seconds, read = seconds + 0.02 + 0.001 * tokens, read + 0.001 * tokens
    assert (seconds - read) * counted / seconds == pytest.approx(1 - share, rel=0.1)  # two of 34 steps read nothing


def test_a_delay_of_streams_alone_is_not_charged_to_prompts() -> None:
    pace = Pace(0.5, most=64)
    run(pace, 20, 0.004, 1e-4, waiting=False)
    pace.saw(0, 3.0, 1)
    assert pace.tokens() >= LEAST


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
