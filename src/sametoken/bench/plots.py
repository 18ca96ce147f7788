"""Figures of runs: speed-up by draft length, acceptance by position, time by part, latency by load.

The title of a figure states its finding; model, machine and date stand below the title.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sametoken.bench.compare import SpeedOfRounds
from sametoken.bench.figure import COLOURS, INK, Chart, finish, render
from sametoken.bench.record import Cell, Load, Run
from sametoken.bench.variant import Expectation, Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

APART = 0.08  # distance between marks of one position, in draft tokens
TREES = 0.5  # greatest distance of a tree from the chain of its length, in draft tokens
ASIDE = 0.06  # distance between marks of one batch size, in doublings


def charts(runs: Sequence[Run]) -> list[Chart]:
    """All figures for the data of the runs.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    cells = [cell for run in runs for cell in run.cells]
    loads = [load for run in runs for load in run.loads]
    drawn = []
    for name, caption, draw in [*_of_batches(runs), *_of_cells(cells), *_of_loads(loads)]:
        drawn.append(Chart(name, caption, *render(name, draw, _origin(runs))))
    return drawn


def _origin(runs: Sequence[Run]) -> str:
    """Model, machine and date of the measurements, one line for each different combination."""
    lines = []
    for run in runs:
        draft = run.settings.get("draft")
        model = f"{run.settings.get('model', 'a server')}{f' with {draft}' if draft else ''}"
        at = run.environment
        machine = at.device if run.kind == "server" else f"{at.cpu}, {at.threads} threads, {at.dtype}"
        busy = f"; the machine was busy with other work (load average {at.load:.1f})" if at.busy else ""
        lines.append(f"{model}; {machine}; {run.created[:10]}{busy}")
    return "\n".join(dict.fromkeys(lines))


Drawing = tuple[str, str, Callable[["Axes"], None]]


def _of_batches(runs: Sequence[Run]) -> Iterator[Drawing]:
    """Figures of equal texts at several batch sizes of one run."""
    found: list[list[Cell]] = []
    for run in runs:
        texts = {cell.texts: [other for other in run.cells if other.texts == cell.texts] for cell in run.cells}
        found += [same for same in texts.values() if len(same) > 1]
    for number, cells in enumerate(found, 1):
        yield (
            f"load{'' if len(found) == 1 else f'-{number}'}",
            "Tokens per second against the number of requests that run together: plain decoding, the best fixed draft "
            f"length of each batch, and what the controller chose; {cells[0].texts}.",
            partial(_load, cells=sorted(cells, key=lambda cell: cell.batch)),
        )


def _of_cells(cells: Sequence[Cell]) -> Iterator[Drawing]:
    for number, chunk in enumerate(_chunks(cells), 1):
        suffix = "" if len(cells) <= len(COLOURS) else f"-{number}"
        yield (
            f"speed-up{suffix}",
            "Speed-up over plain decoding against the longest draft, with 95 % intervals; below 1 drafts cost time.",
            partial(_speed_up, cells=chunk),
        )
        yield (
            f"acceptance{suffix}",
            "Guesses accepted at each position: solid of all guesses there, dashed of those that were reached.",
            partial(_acceptance, cells=chunk),
        )
    expecting = [cell for cell in cells if _expectations(cell)]
    for number, chunk in enumerate(_chunks(expecting), 1):
        yield (
            f"expected{'' if len(expecting) <= len(COLOURS) else f'-{number}'}",
            "Chance that was expected of guesses, and the share of them that was accepted: on the dotted line both are "
            "equal.",
            partial(_expected, cells=chunk),
        )
    for number, cell in enumerate(cells, 1):
        suffix = "" if len(cells) == 1 else f"-{number}"
        yield (
            f"time{suffix}",
            f"Where the time per token goes, {cell.label}.",
            partial(_time, cell=cell),
        )


def _of_loads(loads: Sequence[Load]) -> Iterator[Drawing]:
    for kind, words in (("closed", "requests kept going"), ("open", "requests per second")):
        chosen = [load for load in loads if load.kind == kind]
        if chosen:
            yield (
                f"latency-{kind}",
                f"Latency against load ({words}): median, and dashed the 95th percentile.",
                partial(_latency, loads=chosen, words=words),
            )


def _chunks(cells: Sequence[Cell]) -> list[Sequence[Cell]]:
    """Cells of each figure, at most as many as colours."""
    return [cells[at : at + len(COLOURS)] for at in range(0, len(cells), len(COLOURS))]


def _load(axes: Axes, cells: Sequence[Cell]) -> None:
    """Draw tokens per second by batch size, with the slowest and the fastest round."""
    batches = [cell.batch for cell in cells]
    best = [max(cell.shaped, key=lambda one: one.tokens_per_second) for cell in cells]
    chosen = [cell.chosen for cell in cells if cell.chosen is not None]
    lines = {
        "plain decoding": ([cell.plain for cell in cells], "s", ":"),
        "best fixed draft length of the batch (its number; x2: with 2 branches)": (best, "o", "--"),
    }
    if len(chosen) == len(cells):
        lines["the controller, which chooses the length of every step"] = (chosen, "D", "-")
    for number, (label, (variants, marker, style)) in enumerate(lines.items()):
        places = [batch * 2 ** (ASIDE * (number - 1)) for batch in batches]
        speeds = [one.tokens_per_second for one in variants]
        rounds = [SpeedOfRounds.of(one.tokens_per_second, one.round_s).rounds for one in variants]
        spread = (
            [speed - min(own) for speed, own in zip(speeds, rounds, strict=True)],
            [max(own) - speed for speed, own in zip(speeds, rounds, strict=True)],
        )
        look: dict[str, Any] = {"color": COLOURS[number], "marker": marker, "linestyle": style, "label": label}
        axes.errorbar(places, speeds, spread, capsize=3, **look)
    for batch, one in zip(batches, best, strict=True):
        axes.annotate(
            one.shape, (batch, one.tokens_per_second), (-10, 4), textcoords="offset points",
            ha="center", fontsize=8, color=COLOURS[1],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch}" for batch in batches])
    axes.set_ylim(bottom=0)
    finish(
        axes,
        _load_finding(cells, best),
        f"requests that run together ({cells[0].texts}; bars: slowest and fastest round)",
        "tokens per second",
    )


def _load_finding(cells: Sequence[Cell], best: Sequence[Variant]) -> str:
    """Lowest ratios of the controller to the best fixed length and to plain decoding; without it, gains of drafts."""
    pairs = [(cell.chosen, cell.plain, one) for cell, one in zip(cells, best, strict=True) if cell.chosen is not None]
    if len(pairs) < len(cells):
        gains = [one.tokens_per_second / cell.plain.tokens_per_second for cell, one in zip(cells, best, strict=True)]
        first, last = cells[0].batch, cells[-1].batch
        return (
            f"With drafts {gains[0]:.2f} times as fast as plain at batch {first}, {gains[-1]:.2f} times at batch {last}"
        )
    of_best = min(chosen.tokens_per_second / one.tokens_per_second for chosen, _, one in pairs)
    of_plain = min(chosen.tokens_per_second / plain.tokens_per_second for chosen, plain, _ in pairs)
    return f"The controller: at least {of_best:.2f} of the best fixed length, {of_plain:.2f} of plain decoding"


def _speed_up(axes: Axes, cells: Sequence[Cell]) -> None:
    beyond = 1 + max(variant.max_draft_len for cell in cells for variant in cell.fixed)  # for the controller
    for number, (cell, colour) in enumerate(zip(cells, COLOURS, strict=False)):
        aside = APART * (number - (len(cells) - 1) / 2)
        label = f"{cell.label}, {cell.speculative[0].method}"
        lengths = [variant.max_draft_len + aside for variant in cell.fixed]
        _with_intervals(axes, lengths, cell.fixed, color=colour, marker="o", label=label)
        trees = [variant for variant in cell.shaped if variant not in cell.fixed]
        for variant in trees:
            branches = sorted({tree.tree_top_k for tree in trees})
            place = variant.max_draft_len + aside + TREES * (1 + branches.index(variant.tree_top_k)) / len(branches)
            _with_intervals(axes, [place], [variant], color=colour, marker="^", mfc="white")
            axes.annotate(f"x{variant.tree_top_k}", (place, variant.speed_up.value), (5, 3),
                          textcoords="offset points", fontsize=8)  # fmt: skip
        if cell.chosen is not None:
            _with_intervals(axes, [beyond + aside], [cell.chosen], color=colour, marker="D")
    axes.axhline(1, color=INK, linewidth=1, linestyle=":", label="plain decoding; below it drafts cost time")
    ticks = {variant.max_draft_len: f"{variant.max_draft_len}" for cell in cells for variant in cell.fixed}
    if any(len(cell.shaped) > len(cell.fixed) for cell in cells):
        axes.plot([], [], " ", color=INK, marker="^", mfc="white", label="triangles: trees; x2: 2 branches a level")
    if any(cell.chosen for cell in cells):
        ticks[beyond] = "chosen"
        axes.plot([], [], " ", color=INK, marker="D", label="chosen: the controller chooses the length of every step")
    axes.set_xticks(sorted(ticks), [ticks[place] for place in sorted(ticks)])
    best = max((one for cell in cells for one in cell.speculative), key=lambda one: one.speed_up.value)
    gain = best.speed_up.value
    title = "At best" if gain >= 1 else "Drafts cost time: at best"
    length = "chosen length" if best.chosen else f"{best.max_draft_len} tokens"
    length += f" and {best.tree_top_k} branches" if best.tree_top_k > 1 else ""
    title += f" {gain:.2f} times the speed of plain decoding, with drafts of {length}"
    finish(axes, title, "longest draft (tokens)", "speed-up")


def _with_intervals(axes: Axes, places: Sequence[float], variants: Sequence[Variant], **look: Any) -> None:
    """Draw speed-ups and their 95 % intervals."""
    found = [variant.speed_up for variant in variants]
    below = [one.value - (one.value if one.low is None else one.low) for one in found]
    above = [(one.value if one.high is None else one.high) - one.value for one in found]
    axes.errorbar(places, [one.value for one in found], (below, above), capsize=3, **look)


def _acceptance(axes: Axes, cells: Sequence[Cell]) -> None:
    # One line for all batch sizes, which do not change the accepted guesses.
    firsts: list[float] = []
    distinct = {f"{cell.texts}, {cell.speculative[0].method}": cell for cell in cells}
    for (name, cell), colour in zip(distinct.items(), COLOURS, strict=False):
        longest = max(cell.fixed, key=lambda variant: variant.max_draft_len)
        places = [one.position for one in longest.acceptance.positions]
        of_all = [one.unconditional for one in longest.acceptance.positions]
        of_reached = [math.nan if one.conditional is None else one.conditional for one in longest.acceptance.positions]
        axes.plot(places, of_all, color=colour, marker="o", label=name)
        axes.plot(
            [place + APART for place in places], of_reached, color=colour, linestyle="--", marker="s", mfc="white"
        )
        firsts.append(of_all[0])
    axes.plot([], [], color=INK, marker="o", label="solid: share of all drafts")
    axes.plot(
        [], [], color=INK, linestyle="--", marker="s", mfc="white", label="dashed: share of drafts that got there"
    )
    axes.set_ylim(0, 1.02)
    axes.set_xticks(sorted({p for cell in cells for v in cell.speculative for p in range(1, v.max_draft_len + 1)}))
    shares = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(firsts), max(firsts))))
    finish(
        axes,
        f"The first draft token is accepted in {shares} of the drafts",
        "position in the draft",
        "accepted (share)",
    )


def _expectations(cell: Cell) -> dict[str, list[Expectation]]:
    """Expectations over all variants together, one per bin, by drafter."""
    found: dict[str, dict[float, list[Expectation]]] = {}
    for each in (one for variant in cell.speculative for one in variant.acceptance.reliability):
        found.setdefault(each.drafter, {}).setdefault(each.low, []).append(each)
    return {drafter: [_joined(bins[low]) for low in sorted(bins)] for drafter, bins in found.items()}


def _joined(parts: Sequence[Expectation]) -> Expectation:
    tried = sum(part.tried for part in parts)
    expected, accepted = (
        sum(part.tried * getattr(part, name) for part in parts) / tried for name in ("expected", "accepted")
    )
    return replace(parts[0], tried=tried, expected=expected, accepted=accepted)


def _expected(axes: Axes, cells: Sequence[Cell]) -> None:
    """Draw a mark for each bin, larger for more guesses."""
    bins = [(f"{cell.label}, {name}", found) for cell in cells for name, found in _expectations(cell).items()]
    most, everything = max(one.tried for _, found in bins for one in found), [one for _, found in bins for one in found]
    for number, (label, found) in enumerate(bins):
        colour = COLOURS[number % len(COLOURS)]
        sizes = [15 + 150 * one.tried / most for one in found]
        places, shares = [one.expected for one in found], [one.accepted for one in found]
        axes.plot(places, shares, color=colour, linewidth=1)
        axes.scatter(places, shares, sizes, color=colour, alpha=0.7, label=label)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", label="as many as expected; below it fewer")
    axes.plot([], [], " ", label=f"larger marks: more guesses, up to {most}")
    guesses = sum(one.tried for one in everything)
    error = sum(one.tried * abs(one.expected - one.accepted) for one in everything) / guesses
    finish(
        axes,
        f"Real acceptance differs from the expected by {error:.2f} on average ({guesses} guesses)",
        "expected chance of a guess",
        "accepted (share)",
    )


def _time(axes: Axes, cell: Cell) -> None:
    """Draw bars of milliseconds per token, divided by the shares of the time."""
    labels = [variant.label for variant in cell.variants]
    left = [0.0] * len(labels)
    parts = {"draft": "making drafts", "verify": "the target's forward, with verification", "host": "everything else"}
    for (part, meaning), colour in zip(parts.items(), COLOURS, strict=False):
        widths = [1000 / v.tokens_per_second * getattr(v.time_share, part) for v in cell.variants]
        axes.barh(labels, widths, left=left, color=colour, label=f"{part}: {meaning}")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    plain, *drafted = (1000 / v.tokens_per_second for v in cell.variants)
    finish(
        axes,
        f"{min(drafted):.1f} ms per token with drafts, {plain:.1f} ms without ({cell.label})",
        "milliseconds per token of all requests",
        "",
    )


def _latency(axes: Axes, loads: Sequence[Load], words: str) -> None:
    ordered = sorted(loads, key=lambda load: (load.side, load.workload, load.temperature, load.level))
    groups = groupby(ordered, key=lambda load: (load.side, load.workload, load.temperature))
    for number, ((side, workload, temperature), group) in enumerate(groups):
        found, colour = list(group), COLOURS[number % len(COLOURS)]
        levels = [load.level for load in found]
        label = f"{side}, {workload}, temperature {temperature:g}"
        axes.plot(levels, [load.latency_s.p50 for load in found], color=colour, marker="o", label=label)
        axes.plot(levels, [load.latency_s.p95 for load in found], color=colour, linestyle="--", marker="s", mfc="white")
    axes.plot([], [], color=INK, marker="o", label="solid: median")
    axes.plot([], [], color=INK, linestyle="--", marker="s", mfc="white", label="dashed: 95th percentile")
    axes.set_ylim(bottom=0)
    ours = sorted((load for load in loads if load.side == "server"), key=lambda load: load.level) or ordered
    low, high = ours[0], ours[-1]
    finish(
        axes,
        f"Median latency {low.latency_s.p50:.2f} s at {low.label}, {high.latency_s.p50:.2f} s at {high.label}",
        words,
        "seconds per request",
    )
