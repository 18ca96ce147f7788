"""Description of the controller's choices in a cell, of their gain, and of the reasons for steps without a draft."""

from __future__ import annotations

from sametoken.bench.predict import common_step
from sametoken.bench.record import Cell
from sametoken.bench.tables import factor
from sametoken.bench.variant import Choice, Variant

WORTH_SAYING = 0.01  # least share of the steps or forwards for a mention
REASONS = {  # of `SpeculationStats.plain`
    "gain": "no gain was expected",
    "silent": "the drafter had no guess",
    "room": "the step had no room for guesses",
    "end": "one token was left to generate",
    "recall": "the time of a plain step was measured again",
    "batch": "the batch was larger than the settings allow drafts for",
    "threshold": "acceptance_length_threshold had ended drafts",
}


def best_tree(cell: Cell) -> Variant | None:
    """Fastest variant with more branches than the `fixed` ones; None if there is none."""
    trees = [variant for variant in cell.shaped if variant not in cell.fixed]
    return max(trees, key=lambda variant: variant.speed_up.value, default=None)


def compared(cell: Cell, best: Variant) -> list[str]:
    """Sentences that compare the best tree and the controller, if measured, with the best chain."""
    found = []
    if (tree := best_tree(cell)) is not None:
        ratio = tree.tokens_per_second / best.tokens_per_second
        found.append(
            f"The best tree, draft length {tree.max_draft_len} with {tree.tree_top_k} branches, reaches "
            f"{factor(tree.speed_up)}: {ratio:.2f} of the speed of that chain."
        )
    if (chosen := cell.chosen) is None:
        return found
    ratio = chosen.tokens_per_second / best.tokens_per_second
    return [
        *found,
        f"The controller, which chooses the length of every step, reaches {factor(chosen.speed_up)}: {ratio:.2f} of "
        f"the speed of the best fixed length, {best.max_draft_len}.",
    ]


def choices(cell: Cell) -> list[str]:
    """Sentences on the controller's draft lengths, with their time and tokens, and on steps without a draft."""
    chosen = cell.chosen
    if chosen is None or not chosen.choices:
        return []
    lines = [_lengths(cell, chosen)]
    seen = chosen.acceptance.reliability
    if tried := sum(each.tried for each in seen):
        expected = sum(each.tried * each.expected for each in seen) / tried
        real = sum(each.tried * each.accepted for each in seen) / tried
        lines.append(f"Of {tried} guesses {expected:.0%} were expected to be accepted, and {real:.0%} were.")
    plain = chosen.acceptance.plain
    forwards = sum(plain.values()) + sum(chosen.acceptance.drafted_by.values())
    reasons = {reason: count / forwards for reason, count in plain.items() if count >= WORTH_SAYING * forwards}
    if reasons:
        ranked = sorted(reasons.items(), key=lambda item: -item[1])
        why = ", ".join(f"{REASONS.get(reason, reason)} ({share:.0%})" for reason, share in ranked)
        lines.append(f"{sum(plain.values()) / forwards:.0%} of the forwards of a request had no draft: {why}.")
    return lines


def _lengths(cell: Cell, chosen: Variant) -> str:
    total, plain = sum(choice.steps for choice in chosen.choices), common_step(cell.plain, cell.plain)
    named = [choice for choice in chosen.choices if choice.steps >= WORTH_SAYING * total]
    named.sort(key=lambda choice: -choice.steps)
    parts = [_one(choice, total, plain.seconds if plain else None) for choice in named]
    return f"It chose {'; '.join(parts)}."


def _one(choice: Choice, total: int, plain_s: float | None) -> str:
    what = f"drafts of {choice.draft_len}" if choice.draft_len else "no draft"
    said = f"{what} in {choice.steps / total:.0%} of the steps"
    if plain_s is None or not choice.draft_len:
        return said
    cost = choice.step_s / plain_s
    expected = "" if choice.expected_cost is None else f" (expected: {choice.expected_cost:.2f})"
    return (
        f"{said}, which took {cost:.2f} plain steps{expected} and emitted {choice.tokens_per_row:.2f} tokens per row "
        f"({choice.tokens_per_row / cost:.2f}x)"
    )
