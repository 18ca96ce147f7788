"""Made-up measurements of which all is known: acceptance, costs of steps, and so what an explanation must say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sametoken.bench.measure import acceptance
from sametoken.bench.record import SCHEMA, Cell, Environment, Run
from sametoken.bench.variant import Category, Choice, ContextCost, Estimate, Spread, StepCost, TimeShares, Variant
from sametoken.engine.stats import SpeculationStats

SPREAD = Spread(0.01, 0.01, 0.02, 0.03)
PLAIN_S = 0.010


def variant(
    length: int, accepted: Sequence[float], cost: Callable[[int], tuple[float, float]], forwards: int = 1000
) -> Variant:
    """Decoding where a share `accepted[k]` of the forwards that come to guess k + 1 accepts it.

    Args:
        cost: seconds of drafting and of verification by draft length; the host takes 0.1 ms.
    """
    stats = SpeculationStats("draft_target")
    stats.count(1, 0, 0, 0)  # the forward that reads the prompt
    left, counts = forwards, []
    for share in accepted[:length]:
        stay = round(left * share)
        counts.append(left - stay)
        left = stay
    for taken, count in enumerate([*counts, left]):
        for _ in range(count):
            stats.count(taken + 1, length, taken, length)
    found = acceptance([stats])
    draft_s, verify_s = cost(length)
    step = StepCost(1, forwards, draft_s, verify_s, 0.0001)
    plain = PLAIN_S + 0.0001
    gain = found.emitted / found.forwards * plain / step.seconds
    share = TimeShares(*(part / step.seconds for part in (draft_s, verify_s, 0.0001)))
    return Variant(
        max_draft_len=length,
        method="draft_target" if length else "none",
        tokens=found.emitted,
        round_s=[1.0 / gain],
        tokens_per_second=100 * gain,
        speed_up=Estimate(gain, gain - 0.01, gain + 0.01),
        acceptance=found,
        ttft_s=SPREAD,
        inter_token_s=SPREAD,
        prompt_share=0.0,
        time_share=share,
        steps=[step],
        contexts=[],
        categories=[Category("chat", 1, 10, Estimate(gain), found)],
    )


def cheap(length: int) -> tuple[float, float]:
    """A draft that costs next to nothing, verification for free."""
    return 0.0001 * length, PLAIN_S


def cell(lengths: Sequence[int], accepted: Sequence[float], cost: Any = cheap, **other: Any) -> Cell:
    """Plain decoding and these draft lengths."""
    variants = [variant(length, accepted, cost) for length in (0, *lengths)]
    made = Cell("made-up", 0.0, 1, None, 1, 1, 20.0, variants)
    return replace(made, **other)


def with_controller(made: Cell, speed: float, choices: dict[int, int], **plain: int) -> Cell:
    """A cell whose controller was `speed` times as fast as the last fixed length.

    Args:
        choices: decoding steps by the draft length that was allowed; a step without one takes a plain step's time.
        plain: forwards without a draft, by reason.
    """
    best = made.fixed[-1]
    gain = best.speed_up.value * speed
    plain_s = PLAIN_S + 0.0001
    steps = [
        Choice(n, count, plain_s * (1 + 0.1 * n), 1 + 0.5 * n, 1 + 0.2 * n) for n, count in sorted(choices.items())
    ]
    drafted = sum(count for length, count in choices.items() if length)
    found = replace(best.acceptance, drafted_by={best.method: drafted}, plain=plain)
    chosen = replace(
        best,
        chosen=True,
        choices=steps,
        acceptance=found,
        speed_up=Estimate(gain, gain - 0.01, gain + 0.01),
        tokens_per_second=best.tokens_per_second * speed,
    )
    return replace(made, variants=[*made.variants, chosen])


def changed(made: Cell, place: int, **other: Any) -> Cell:
    """A cell with one variant changed."""
    variants = [replace(v, **other) if i == place else v for i, v in enumerate(made.variants)]
    return replace(made, variants=variants)


def contexts(seconds: Sequence[float], tokens: Sequence[float]) -> list[ContextCost]:
    """Steps at 64, 512 and 4096 tokens."""
    lows = (64, 512, 4096)
    return [ContextCost(low, 2 * low, 50, s, t) for low, s, t in zip(lows, seconds, tokens, strict=True)]


def run_of(*cells: Cell, **other: Any) -> Run:
    made = Environment("0.1.0", None, "sametoken bench", {}, "here", "a processor", 2, "cpu", "float32", 1, 0.0, 0.0)
    run = Run(SCHEMA, "engine", "2026-01-01T00:00:00+0000", made, 0, {}, [], {"speed_up": "measured"}, [*cells], [], [])
    return replace(run, **other)
