"""`sametoken bench compare`: comparison of two results of `sametoken bench --out`."""

from __future__ import annotations

import json

from sametoken.commands.options import Argument, Option, Values
from sametoken.errors import ConfigError

ARGUMENT = Argument(list[str], "two directories or files that `sametoken bench --out` wrote, A and B.", "RUNS")
OPTIONS = (Option("json", bool, False, "print one JSON object per setting instead of a table."),)
EXAMPLES = {
    "compare two directories": "sametoken bench compare before after",
    "let a script read the ratios": "sametoken bench compare before after --json",
}


def command(places: list[str], values: Values) -> int:
    """Compare the speed of two results: tokens per second of B over A, for every setting that both have."""
    if len(places) != 2:
        raise ConfigError(f"got {len(places)} results, expected two: sametoken bench compare A B")
    from sametoken.bench.compare import compare, table
    from sametoken.bench.record import read_runs
    from sametoken.commands.bench import print_table

    found = compare(read_runs(places[:1]), read_runs(places[1:]))
    if values["json"]:
        for each in found:
            print(json.dumps(each.to_json()))
    else:
        print_table(table(found))
    return 0
