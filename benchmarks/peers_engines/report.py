"""Attempts into tables, JSON and a chart."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers_engines.cells import FOREIGN_LIMIT, GOALS, Attempt, Cell, Goal, Spread, agreement, ratio, speeds

COLOURS = {"sametoken": "#1f6f8b", "transformers": "#e0a458", "llama.cpp": "#7a9e7e", "vllm": "#a26769"}


class Report(NamedTuple):
    """All that a run gave.

    Attributes:
        setup: what was compared and how, for the head of each table.
        cells: the cells that were asked for, in order. absent: why a cell has no attempts, or none after some round.
    """

    setup: Mapping[str, Any]
    cells: Sequence[Cell]
    attempts: Sequence[Attempt]
    absent: Mapping[Cell, str]

    def texts(self) -> dict[Cell, list[list[int]]]:
        """Each cell's tokens by prompt, of its first attempt."""
        found: dict[Cell, list[list[int]]] = {}
        for attempt in self.attempts:
            found.setdefault(attempt.cell, [answer["tokens"] for answer in attempt.answers])
        return found


def show_spread(spread: Spread, unit: str = "") -> str:
    """A median with its range; a star if every attempt was under foreign load."""
    return f"{spread.median:.2f}{unit} ({spread.low:.2f} to {spread.high:.2f}){'*' if spread.all_loaded else ''}"


def columns(rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, padded so that it can be read as it is; the first row is its head."""
    table = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def caption(setup: Mapping[str, Any]) -> str:
    """What the model is and how it was asked."""
    shortest, longest = setup["prompt_tokens"]
    return (
        f"{setup['target']}; draft: {setup['draft']}. Greedy, batch 1, {setup['prompts']} prompts of {shortest} to "
        f"{longest} tokens, {setup['max_tokens']} new tokens each without stopping, drafts of {setup['draft_len']}, "
        f"{setup['threads']} threads. Tokens per second after the first token; median (min to max) of the attempts "
        f"under {FOREIGN_LIMIT} cores of foreign load; * marks figures that have only attempts above it."
    )


def speed_table(report: Report) -> str:
    """Speeds, acceptance and equal texts by cell."""
    found, texts = speeds(report.attempts), report.texts()
    rows = [["cell", "tokens/s", "acceptance length", "kept", "= own plain", "= our bf16 plain"]]
    for cell in report.cells:
        if cell not in found:
            rows.append([str(cell), "absent", "", "", "", ""])
            continue
        spread, equal = found[cell], agreement(cell, texts)
        length = next(attempt.acceptance_length for attempt in report.attempts if attempt.cell == cell)
        same = ["" if n is None else f"{n}/{equal.prompts}" for n in (equal.own, equal.ours)]
        kept = f"{0 if spread.all_loaded else spread.kept}/{spread.tried}"
        rows.append([str(cell), show_spread(spread), f"{length:.2f}", kept, *same])
    return columns(rows)


def verdict(goal: Goal, spread: Spread | None) -> tuple[str, str, str, str]:
    """A goal's row: what, the ratio, the aim, and whether the median reaches it, which load leaves open."""
    aim = "" if goal.aim is None else f">= {goal.aim:g}"
    if spread is None:
        return str(goal), "absent", aim, ""
    reached = "reached" if goal.aim is not None and spread.median >= goal.aim else "missed"
    judged = "" if goal.aim is None else "open: loaded" if spread.all_loaded else reached
    return str(goal), show_spread(spread, "x"), aim, judged


def goal_table(report: Report) -> str:
    """Ratios of speeds, taken within each round."""
    rows = [verdict(goal, ratio(goal, report.attempts)) for goal in GOALS if goal.above in report.cells]
    return columns([("ratio", "median (min to max)", "aim", ""), *rows])


def text(report: Report) -> str:
    """Everything printed."""
    head = caption(report.setup)
    versions = "; ".join(f"{engine} {version}" for engine, version in report.setup["versions"].items())
    parts = [
        head + f" Versions: {versions}.",
        speed_table(report),
        "Ratios, round by round. " + head,
        goal_table(report),
    ]
    if report.absent:
        parts.append("Absent:\n" + "\n".join(f"- {cell}: {reason}" for cell, reason in report.absent.items()))
    return "\n\n".join(parts)


def to_json(report: Report) -> dict[str, Any]:
    """Everything kept, every attempt included."""
    ratios = {str(goal): (goal.aim, ratio(goal, report.attempts)) for goal in GOALS if goal.above in report.cells}
    texts = report.texts()
    return {
        "setup": dict(report.setup),
        "foreign_limit_cores": FOREIGN_LIMIT,
        "tokens_per_second": {str(cell): spread._asdict() for cell, spread in speeds(report.attempts).items()},
        "ratios": {name: {"aim": aim, **(s._asdict() if s else {"absent": True})} for name, (aim, s) in ratios.items()},
        "equal_prompts": {str(cell): agreement(cell, texts)._asdict() for cell in texts},
        "absent": {str(cell): reason for cell, reason in report.absent.items()},
        "attempts": [attempt.to_json() for attempt in report.attempts],
    }


def plot(report: Report, path: Path) -> None:
    """A bar per cell with its range."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = speeds(report.attempts)
    cells = [cell for cell in reversed(report.cells) if cell in found]
    spreads = [found[cell] for cell in cells]
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.32 * len(cells)), layout="constrained")
    ranges = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    axes.barh(
        [str(cell) + "*" * found[cell].all_loaded for cell in cells],
        [s.median for s in spreads],
        xerr=ranges,
        color=[COLOURS[cell.engine] for cell in cells],
        capsize=2,
    )
    for place, spread in enumerate(spreads):
        axes.annotate(f" {spread.median:.1f}", (spread.high, place), va="center", fontsize=8)
    axes.set_xlabel("tokens per second after the first, median and range")
    title = f"{report.setup['target']}. {report.setup['threads']} threads, batch 1, greedy"
    axes.set_title(textwrap.fill(title, 90), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(report: Report, out: Path) -> None:
    """peers.json, peers.md and peers.png."""
    (out / "peers.json").write_text(json.dumps(to_json(report), indent=1) + "\n")
    (out / "peers.md").write_text(text(report) + "\n")
    if report.attempts:
        plot(report, out / "peers.png")
