"""What a drafter says of its guesses becomes chances, and these are set against what came true."""

from __future__ import annotations

import random

import pytest

from sametoken.control.confidence import BINS, Confidence
from sametoken.engine.stats import Reliability

DRAFTS = 8


def learned(chance_of: dict[float, float], drafts: int, sampled: bool = False) -> tuple[Confidence, Reliability]:
    """After drafts of three guesses whose shares come true with the chances given."""
    confidence, seen, luck = Confidence(), Reliability(), random.Random(3)
    for _ in range(drafts):
        shares = [luck.choice([*chance_of]) for _ in range(3)]
        accepted = next((i for i, share in enumerate(shares) if luck.random() >= chance_of[share]), 3)
        drawn = [*[0] * accepted, 1][:3]
        confidence.learn([[share] for share in shares], sampled, drawn, [1] * 3, seen.see)
    return confidence, seen


@pytest.mark.parametrize("sampled", [False, True])
def test_shares_become_chances(sampled: bool) -> None:
    confidence, _ = learned({0.15: 0.3, 0.55: 0.5, 0.95: 0.99}, 4000, sampled)
    assert [confidence.chance(share, sampled) for share in (0.15, 0.55, 0.95)] == pytest.approx(
        [0.3, 0.5, 0.99], abs=0.05
    )
    chances = [confidence.chance(share / 100, sampled) for share in range(101)]
    assert chances == sorted(chances)
    assert confidence.chance(0.55, not sampled) == pytest.approx(0.55)  # the other kind of rows tells nothing


def test_a_table_rises_whatever_was_seen() -> None:
    confidence, _ = learned({0.15: 0.9, 0.55: 0.2, 0.95: 0.6}, 2000)
    chances = [confidence.chance((place + 0.5) / BINS, False) for place in range(BINS)]
    assert chances == sorted(chances)
    assert min(chances) >= 0
    assert max(chances) <= 1


def test_only_guesses_that_were_reached_count() -> None:
    confidence, seen = Confidence(), Reliability()
    for _ in range(DRAFTS):
        confidence.learn([[0.95], [0.35], [0.75]], False, [0, 1], [1] * 3, seen.see)
    assert sum(seen.tried) == 2 * DRAFTS
    assert sum(seen.accepted) == sum(seen.accepted[8:]) == DRAFTS
    assert seen.tried[7] == 0
    assert confidence.chance(0.75, False) == pytest.approx(0.75)
    assert confidence.chance(0.35, False) < 0.35


def test_what_is_expected_comes_true() -> None:
    _, seen = learned({0.15: 0.3, 0.95: 0.7}, 3000)
    told = [place for place in range(BINS) if seen.tried[place] > 100]
    assert len(told) >= 2
    for place in told:
        assert seen.accepted[place] / seen.tried[place] == pytest.approx(
            seen.expected[place] / seen.tried[place], abs=0.05
        )


def test_reliability_of_several_requests_is_their_sum() -> None:
    (_, one), (_, other) = learned({0.3: 0.5}, 50), learned({0.3: 0.5, 0.8: 0.6}, 70)
    both = Reliability()
    both.add(one)
    both.add(other)
    assert sum(both.tried) == sum(one.tried) + sum(other.tried)
    assert both.accepted == [a + b for a, b in zip(one.accepted, other.accepted, strict=True)]


@pytest.mark.parametrize("sampled", [False, True])
def test_siblings_have_chances_of_their_own(sampled: bool) -> None:
    """The second of a draw by its share, verified or not; what was expected is kept of those that were."""
    confidence, seen, luck = Confidence(), Reliability(), random.Random(5)
    assert [confidence.chance(0.25, sampled, rank) for rank in range(3)] == pytest.approx([0.25] * 3)
    tried = right = 0
    for _ in range(4000):
        second, chance = luck.choice([(0.05, 0.02), (0.25, 0.15), (0.45, 0.4)])
        drawn, verified = 1 if luck.random() < chance else 0 if luck.random() < 0.7 else 2, luck.randint(1, 2)
        confidence.learn([[0.5, second]], sampled, [drawn], [verified], seen.see)
        tried, right = tried + verified, right + (drawn < verified)
    found = [confidence.chance(share, sampled, 1) for share in (0.05, 0.25, 0.45)]
    assert found == pytest.approx([0.02, 0.15, 0.4], abs=0.04)
    chances = [confidence.chance(share / 100, sampled, 1) for share in range(51)]
    assert chances == sorted(chances)
    assert confidence.chance(0.25, not sampled, 1) == pytest.approx(0.25)
    assert (sum(seen.tried), sum(seen.accepted)) == (tried, right)
    assert sum(seen.expected) == pytest.approx(sum(seen.accepted), rel=0.1)
    assert confidence.typical[1][sampled] == pytest.approx(0.19, abs=0.03)
