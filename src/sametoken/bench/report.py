"""Report of runs: one self-contained HTML page, dark and light, and its figures as PNGs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from sametoken.bench.explain import explain
from sametoken.bench.figure import INK, Chart
from sametoken.bench.plots import charts
from sametoken.bench.record import Run
from sametoken.bench.tables import Table, tables, verdicts
from sametoken.errors import ConfigError

HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sametoken bench</title>
<style>
:root {{ color-scheme: light dark; --ink: #2b2f36; --paper: #fff; --line: #d5d9df; --soft: #f4f5f7; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #dfe3e8; --paper: #16181c; --line: #3a3f47; --soft: #20242a; }}
}}
body {{ color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 66rem;
  margin: 2rem auto; padding: 0 1rem; }}
figure {{ margin: 1.5rem 0; }}
figure svg {{ width: 100%; height: auto; max-width: 46rem; display: block; }}
figcaption {{ opacity: .8; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .75rem 0 1.5rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ background: var(--soft); padding: .75rem 1rem; overflow-x: auto; white-space: pre-wrap; }}
.bad {{ color: #d64545; font-weight: 600; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_report(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Write `report.html` and the figures' PNGs into a directory, which is created.

    Raises:
        ConfigError: matplotlib is not installed, or a file cannot be written.
    """
    drawn = charts(runs)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        page = directory / "report.html"
        page.write_text(render_page(runs, drawn), encoding="utf-8")
        files = [page]
        for chart in drawn:
            files.append(directory / f"{chart.name}.png")
            files[-1].write_bytes(chart.png)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; expected a directory that can be written") from error
    return files


def render_page(runs: Sequence[Run], drawn: Sequence[Chart]) -> str:
    """HTML page: figures, then for every run its tables, explanation and environment."""
    parts = ["<h1>sametoken bench</h1>", *(_figure(chart) for chart in drawn)]
    for run in runs:
        parts.append(f"<h2>Run of {escape(run.created)}</h2>\n<pre>{escape(run.environment.command)}</pre>")
        mark = ' class="bad"' if run.mismatches else ""
        parts += [f"<p{mark}>{escape(verdict)}</p>" for verdict in verdicts(run)]
        parts += [_table(table) for table in tables(run)]
        if run.cells or any(load.speed_up for load in run.loads):
            parts.append(f"<details><summary>Why</summary><pre>{escape(explain(run))}</pre></details>")
        parts.append(_environment(run))
    return HTML.format(body="\n".join(parts))


def _figure(chart: Chart) -> str:
    svg = chart.svg[chart.svg.index("<svg") :].replace(INK, "currentColor")
    # Superfluous in an inline image; each names an address.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(chart.caption)}" ', 1)
    return f"<figure>{svg}<figcaption>{escape(chart.caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    grid = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<h3>{escape(table.title)}</h3><div class="wide">{grid}</div>'


def _environment(run: Run) -> str:
    made = run.environment
    rows = [
        ("sametoken", f"{made.sametoken} {made.commit or ''}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ("machine", f"{made.cpu}, {made.cores} cores, {made.platform}"),
        ("device, dtype, threads", f"{made.device}, {made.dtype or 'its own'}, {made.threads or 'its own'}"),
        ("load average before, after", f"{made.load_before:.2f}, {made.load_after:.2f}"),
        ("seed", str(run.seed)),
        *(("estimated", name) for name, basis in run.basis.items() if basis == "estimated"),
        *(("note", note) for note in run.notes),
    ]
    lines = "\n".join(f"{name}: {value}" for name, value in rows)
    return f"<details><summary>Where and how it was measured</summary><pre>{escape(lines)}</pre></details>"
