"""Explanation of a configuration's speed, with figures and the options to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from sametoken.bench.choice import best_tree, choices, compared
from sametoken.bench.predict import Forecast, Outlook, accepted_shares
from sametoken.bench.record import Cell, Environment, Load, Run
from sametoken.bench.tables import factor
from sametoken.bench.variant import ContextCost, StepCost, Variant
from sametoken.errors import ConfigError

# Thresholds of shares and factors for a finding.
POOR_RATE = 0.1
SELDOM = 0.5
LONG_PROMPT = 0.3
DEAR_DRAFT = 0.25
DEAR_VERIFY = 1.25
DEAR_GUESS = 1.2
DEAR_HOST = 0.25
CONTEXT_LOSS = 0.85
LONG_CONTEXT = 256  # tokens
ENOUGH_STEPS = 10
WORTH_CHANGING = 1.03


class Evidence(NamedTuple):
    """Evidence for a finding: the fastest fixed draft length of a cell, and plain decoding.

    Attributes:
        cell: cell of the finding.
        best: fastest variant of fixed length.
        step: cost of its most frequent decoding step.
        outlook: model of speed by draft length.
        others: all cells of the run.
    """

    cell: Cell
    best: Variant
    step: StepCost
    outlook: Outlook
    others: Sequence[Cell]

    @property
    def plain(self) -> StepCost:
        return self.outlook.plain

    @property
    def longest(self) -> Variant:
        """Variant with the longest drafts."""
        return max(self.cell.fixed, key=lambda variant: variant.max_draft_len)

    @property
    def tokens_per_row(self) -> float:
        """Emitted tokens per row and decoding step."""
        return 1 + sum(accepted_shares(self.best, self.cell.requests))

    @property
    def slowdown(self) -> float:
        """Time of a step divided by that of a plain step: the tokens per forward that break even."""
        return self.step.seconds / self.plain.seconds


def explain(run: Run) -> str:
    """Explanation of a run, as text for a terminal.

    Raises:
        ConfigError: the run of a server has no baseline.
    """
    if run.kind == "server":
        return _explain_loads(run.loads)
    busy = _busy(run.environment)
    cells = [_verdict_of(cell) if busy else _explain_cell(cell, run.cells) for cell in run.cells]
    parts = [*busy, *cells]
    if run.mismatches:
        parts.insert(
            0,
            f"Outputs differ from plain decoding in {len(run.mismatches)} takes; that comes before speed.",
        )
    return "\n\n".join(parts)


def _busy(made: Environment) -> list[str]:
    """Reason for no conclusion if other processes ran on the machine."""
    if not made.busy:
        return []
    return [
        f"No conclusion: the machine was busy (load average {made.load:.1f}, threads {made.threads}), so the measured "
        "times include other processes' work. Measure again on an idle machine."
    ]


def _fastest(cell: Cell) -> Variant:
    return max(cell.fixed, key=lambda variant: variant.speed_up.value)


def _verdict_of(cell: Cell) -> str:
    """Label and measurements of a cell."""
    best = _fastest(cell)
    return "\n  ".join([f"{cell.label}:", _verdict(cell, best), *compared(cell, best)])


def _explain_cell(cell: Cell, others: Sequence[Cell]) -> str:
    best = _fastest(cell)
    lines = [_verdict_of(cell)]
    outlook = Outlook.of(cell)
    if outlook is None or best.max_draft_len not in outlook.costs:
        return "\n".join([*lines, "  The outputs are too short for an explanation: raise --max-tokens."])
    case = Evidence(cell, best, outlook.costs[best.max_draft_len], outlook, others)
    table = outlook.table()
    lines += [f"  {_advice(case, table)}", f"  {_where_time_goes(case)}"]
    lines += [f"  {line}" for line in choices(cell)]
    lines += [f"  - {finding}" for look in FINDINGS if (finding := look(case))]
    return "\n".join([*lines, *_table(table)])


def _verdict(cell: Cell, best: Variant) -> str:
    gain = f"{factor(best.speed_up)}, {best.tokens_per_second:.1f} against {cell.plain.tokens_per_second:.1f} tokens/s"
    setting = f"{best.method} with draft length {best.max_draft_len}"
    what = " chain" if best_tree(cell) else " draft"
    if _undecided(best):
        return f"The best measured{what}, {setting}, shows no clear difference from plain decoding: {gain}."
    if best.speed_up.value > 1:
        return f"The fastest measured{what} is {setting}: {gain}."
    return f"No measured{what} is faster than plain decoding; the best, {setting}, is {gain}."


def _undecided(variant: Variant) -> bool:
    low, high = variant.speed_up.low, variant.speed_up.high
    return low is not None and high is not None and low <= 1 <= high


def _where_time_goes(case: Evidence) -> str:
    step, plain = case.step, case.plain
    return (
        f"Its step takes {_ms(step.seconds)} (draft {_ms(step.draft_s)}, verification {_ms(step.verify_s)}, host "
        f"{_ms(step.host_s)}), a plain one {_ms(plain.seconds)}. It must emit {case.slowdown:.2f} tokens per row to "
        f"break even and emits {case.tokens_per_row:.2f}."
    )


def _poor_draft(case: Evidence) -> str | None:
    """Finding on a draft with a very low acceptance rate."""
    accepted = case.best.acceptance
    if not accepted.drafted or accepted.rate >= POOR_RATE:
        return None
    return (
        f"Acceptance too low: {accepted.rate:.1%} of drafted tokens. The draft does not predict this target here: "
        "check that they belong together, that prompts have the chat template, or train a draft on this target's text."
    )


def _seldom_drafted(case: Evidence) -> str | None:
    accepted = case.best.acceptance
    decoding = accepted.forwards - case.cell.requests * len(case.best.round_s)
    drafted = sum(accepted.drafted_lengths[1:])
    if not decoding or drafted >= SELDOM * decoding:
        return None
    return (
        f"Seldom anything to verify: {drafted / decoding:.0%} of decoding forwards had a draft. {case.best.method} "
        "finds nothing to copy in the rest; a draft model guesses everywhere."
    )


def _dear_draft(case: Evidence) -> str | None:
    share = case.step.draft_s / case.step.seconds
    if share < DEAR_DRAFT:
        return None
    length = case.best.max_draft_len
    most = (length + 1) / case.slowdown
    return (
        f"Draft too expensive: drafting takes {share:.0%} of a step, each guess "
        f"{case.step.draft_s / length / case.plain.seconds:.2f} of a plain step. Even if all guesses were accepted, "
        f"decoding could not exceed {most:.2f}x; a smaller draft costs less."
    )


def _low_position(case: Evidence) -> str | None:
    """Finding on the first position whose guess costs clearly more time on average than its tokens save.

    None if shorter drafts are not expected to be faster than the measured ones.
    """
    for shorter, longer in pairwise([Forecast(0, 1.0, case.plain.seconds, 0.0, 1.0, "measured"), *_costed(case)]):
        cost, gain = longer.step_s - shorter.step_s, longer.tokens_per_row - shorter.tokens_per_row
        worth = gain * shorter.step_s / shorter.tokens_per_row
        if cost > DEAR_GUESS * worth:
            place = longer.draft_len
            enough = WORTH_CHANGING * case.best.speed_up.value
            if place == 1 or case.outlook.predict(place - 1).speed_up <= enough:
                return None
            conditional = case.longest.acceptance.positions[place - 1].conditional or 0.0
            return (
                f"Acceptance too low at position {place}: {gain:.0%} of forwards accept that guess ({conditional:.0%} "
                f"of those that get there). It costs {_ms(cost)} and saves {_ms(worth)}."
            )
    return None


def _costed(case: Evidence) -> Iterator[Forecast]:
    """Forecasts of the model, without the noise of single measurements, for all measured positions."""
    for length in range(1, len(case.longest.acceptance.positions) + 1):
        step_s, draft_s = case.outlook.step_s(length)
        yield Forecast(length, case.outlook.tokens_per_row(length), step_s, draft_s, 0.0, "estimated")


def _dear_verify(case: Evidence) -> str | None:
    ratio = case.step.verify_s / case.plain.verify_s
    if ratio < DEAR_VERIFY:
        return None
    rows, tokens = case.plain.rows, case.plain.rows * (case.best.max_draft_len + 1)
    known = {other.batch: _verify_factor(other, case) for other in case.others if other.batch < case.cell.batch}
    smaller = [f"{found:.2f} at batch {batch}" for batch, found in sorted(known.items()) if found is not None]
    compared = f" (it is {', '.join(smaller)})" if smaller else ""
    reason = "Batch too large to verify for free" if rows > 1 else "Verification is not free"
    return f"{reason}: the forward over {tokens} tokens costs {ratio:.2f} of the plain one over {rows}{compared}."


def _verify_factor(other: Cell, case: Evidence) -> float | None:
    """Time of verification divided by that of a plain step's forward; None if unknown.

    Args:
        other: cell with another batch size.
        case: evidence, whose prompts and draft length are compared.
    """
    if other.texts != case.cell.texts:
        return None
    outlook = Outlook.of(other)
    cost = outlook.costs.get(case.best.max_draft_len) if outlook else None
    return cost.verify_s / outlook.plain.verify_s if outlook and cost else None


def _long_context(case: Evidence) -> str | None:
    plain = {one.low: one for one in case.cell.plain.contexts if one.steps >= ENOUGH_STEPS}
    both = [(plain[one.low], one) for one in case.best.contexts if one.steps >= ENOUGH_STEPS and one.low in plain]
    if len(both) < 2 or both[-1][1].low < LONG_CONTEXT:
        return None
    (short_plain, short), (long_plain, long) = both[0], both[-1]
    before, after = _gain(short_plain, short), _gain(long_plain, long)
    if after >= CONTEXT_LOSS * before:
        return None
    return (
        f"Context too long: decoding gains {before:.2f}x at {short.low} to {short.high - 1} tokens and {after:.2f}x at "
        f"{long.low} to {long.high - 1}. There a step takes {long.step_s / short.step_s:.2f} times as long (a plain "
        f"one {long_plain.step_s / short_plain.step_s:.2f}) and emits {long.tokens_per_row:.2f} tokens per row instead "
        f"of {short.tokens_per_row:.2f}."
    )


def _gain(plain: ContextCost, drafted: ContextCost) -> float:
    return drafted.tokens_per_row / plain.tokens_per_row * plain.step_s / drafted.step_s


def _dear_host(case: Evidence) -> str | None:
    share = case.best.time_share.host
    if share < DEAR_HOST:
        return None
    return (
        f"The host is slow: {share:.0%} of the time goes to neither drafting nor the target. Fewer, larger steps "
        "help, and fewer threads where other work shares the cores."
    )


def _long_prompt(case: Evidence) -> str | None:
    share = case.cell.plain.prompt_share
    if share < LONG_PROMPT:
        return None
    return (
        f"Prompts dominate: {share:.0%} of a plain request passes before its first token, which no draft shortens: at "
        f"most {1 / share:.2f}x is possible with outputs of this length."
    )


def _slow_categories(case: Evidence) -> str | None:
    slow = [c for c in case.best.categories if c.speed_up.value < 1]
    if not slow or len(slow) == len(case.best.categories):
        return None
    names = ", ".join(f"{c.name} ({c.speed_up.value:.2f}x, acceptance length {c.acceptance.length:.2f})" for c in slow)
    return f"Slower than plain decoding in: {names}. Requests can set their own speculation."


FINDINGS: tuple[Callable[[Evidence], str | None], ...] = (
    _poor_draft,
    _seldom_drafted,
    _dear_draft,
    _low_position,
    _dear_verify,
    _long_context,
    _dear_host,
    _long_prompt,
    _slow_categories,
)


def _table(table: Sequence[Forecast]) -> list[str]:
    head = "  draft length  tokens per row       step  speed-up"
    return [
        head,
        *(f"{p.draft_len:14d}{p.tokens_per_row:16.2f}{_ms(p.step_s):>11}{p.speed_up:9.2f}x  {p.basis}" for p in table),
    ]


def _advice(case: Evidence, table: Sequence[Forecast]) -> str:
    if _undecided(case.best):
        return "Recommended: measure again with more --repeat, on a machine without other work."
    promising = max(table, key=lambda line: line.speed_up)
    chosen, tree = case.cell.chosen, best_tree(case.cell)
    best = tree if tree and tree.speed_up.value > case.best.speed_up.value else case.best
    measured = best.speed_up.value
    if max(promising.speed_up, measured, chosen.speed_up.value if chosen else 0.0) <= 1:
        return "Recommended: no drafts here (--method none)."
    if promising.basis == "estimated" and promising.speed_up > WORTH_CHANGING * measured:
        return (
            f"Recommended: measure --max-draft-len {promising.draft_len}, estimated at {promising.speed_up:.2f}x; "
            f"until then {best.shape}, measured at {measured:.2f}x."
        )
    if chosen and WORTH_CHANGING * chosen.speed_up.value >= measured:
        return (
            f"Recommended: the controller (--adaptive, the default) with --max-draft-len {chosen.max_draft_len}, "
            f"measured at {chosen.speed_up.value:.2f}x."
        )
    branches = f" --tree-top-k {best.tree_top_k}" if best.tree_top_k > 1 else ""
    fixed = f"--max-draft-len {best.max_draft_len}{branches}{' --no-adaptive' if chosen else ''}"
    return f"Recommended: {fixed}, measured at {measured:.2f}x."


def _explain_loads(loads: Sequence[Load]) -> str:
    """Explanation of a server's speed-up by load."""
    compared = [load for load in loads if load.speed_up is not None]
    if not compared:
        raise ConfigError("this run has no baseline to explain a speed-up by; measure with --url and --baseline-url")
    lines = []
    for (name, temperature, kind), group in groupby(compared, key=_axis):
        rising = sorted(group, key=lambda load: load.level)
        lines.append(f"{name}, temperature {temperature:g}, {kind} load:")
        for load in rising:
            assert load.speed_up is not None
            lines.append(f"  {load.label}: {factor(load.speed_up)}, {load.tokens_per_second:.1f} tokens/s")
        slower = [load for load in rising if load.speed_up is not None and load.speed_up.value < 1]
        if slower:
            lines.append(
                f"  From {slower[0].label} on the baseline is faster: verification is no longer free when the batch "
                "fills the machine. Draft less or not at all from there on; `sametoken bench MODEL --batch` shows the "
                "cost of each step."
            )
    return "\n".join(lines)


def _axis(load: Load) -> tuple[str, float, str]:
    return load.workload, load.temperature, load.kind


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
