"""Runs the comparisons and writes docs/conformance.md: `python -m conformance`, or `make conformance`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from conformance import against_modelopt, against_speculators, against_vllm, results
from conformance.environments import ENVIRONMENTS
from conformance.peer import PeerError

ROOT = Path(__file__).resolve().parents[1]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / ".conformance", help="environments, heads, logs, results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "conformance.md", help="the table that is written")
    parser.add_argument("--only", help="comma-separated: " + ",".join(ENVIRONMENTS) + "; then no table is written")
    return parser.parse_args()


def main() -> int:
    args = options()
    wanted = args.only.split(",") if args.only else list(ENVIRONMENTS)
    begun = time.monotonic()
    found, versions = [], {}
    for name in wanted:
        python = ENVIRONMENTS[name].python(args.work)
        try:
            compared, versions[name] = COMPARISONS[name](python, args.work)
        except PeerError as error:
            compared = [results.Result(name, "all", "the peer runs", str(error), "differs")]
        for result in compared:
            print(f"{result.outcome:13} {result.peer}: {result.case}: {result.compared}: {result.found}", flush=True)
        found += compared
    seconds = time.monotonic() - begun
    results.write(found, versions, seconds, args.work, None if args.only else args.page)
    counted = Counter(result.outcome for result in found)
    print(", ".join(f"{number} {outcome}" for outcome, number in counted.items()), f"in {seconds:.0f} s")
    return 1 if counted["differs"] else 0


COMPARISONS = {
    "modelopt": against_modelopt.compare,
    "speculators": against_speculators.compare,
    "vllm": against_vllm.compare,
}

if __name__ == "__main__":
    sys.exit(main())
