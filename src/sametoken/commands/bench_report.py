"""`sametoken bench report`: figures of runs as one page and as PNGs."""

from __future__ import annotations

from sametoken.checkpoint.paths import user_path
from sametoken.commands.options import Argument, Option, Values

ARGUMENT = Argument(list[str], "directories or files that `sametoken bench --out` wrote.", "RUNS...")
OPTIONS = (Option("out", str, None, "directory for report.html and the PNGs; without it: the first of RUNS.", "DIR"),)
EXAMPLES = {
    "draw all runs of a directory": "sametoken bench report results",
    "write the page elsewhere": "sametoken bench report results --out page",
}


def command(places: list[str], values: Values) -> int:
    """Draw runs as one HTML page without further files: speed-up, acceptance, latency by load, parts of the time."""
    from sametoken.bench.record import read_runs
    from sametoken.bench.report import write_report

    runs = read_runs(places)
    first = user_path(places[0])
    out = user_path(values["out"]) if values["out"] else first if first.is_dir() else first.parent
    for file in write_report(runs, out):
        print(file)
    return 0
