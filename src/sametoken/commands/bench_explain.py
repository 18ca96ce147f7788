"""`sametoken bench explain`: explanation of the speed of runs, from the results of `sametoken bench --out`."""

from __future__ import annotations

from sametoken.commands.options import Argument, Option, Values

ARGUMENT = Argument(list[str], "directories or files that `sametoken bench --out` wrote.", "RUNS...")
OPTIONS = (Option("last", bool, False, "explain the newest run only."),)
EXAMPLES = {
    "explain all runs of a directory": "sametoken bench explain results",
    "explain the newest": "sametoken bench explain results --last",
}


def command(places: list[str], values: Values) -> int:
    """Explain why runs are fast or slow, and recommend settings.

    The explanation has the costs of draft and verification, the acceptance, the batch and the context.
    """
    from sametoken.bench.explain import explain
    from sametoken.bench.record import read_runs

    runs = read_runs(places)
    for run in runs[-1:] if values["last"] else runs:
        print(f"{run.created}: {run.environment.command}\n{explain(run)}")
    return 0
