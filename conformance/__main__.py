"""Runs the comparisons and writes docs/conformance.md: `python -m conformance`, or `make conformance`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from conformance import against_llama_cpp, against_modelopt, against_speculators, against_vllm, results
from conformance.environments import ENVIRONMENTS
from conformance.peer import PeerError

ROOT = Path(__file__).resolve().parents[1]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / ".conformance", help="environments, heads, logs, results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "conformance.md", help="the table that is written")
    parser.add_argument("--llama-cpp", type=Path, help="source tree of llama.cpp with llama-server in build/bin")
    parser.add_argument("--only", help="comma-separated: " + ",".join(ENVIRONMENTS) + "; the others keep their results")
    return parser.parse_args()


def main() -> int:
    args = options()
    wanted = args.only.split(",") if args.only else list(ENVIRONMENTS)
    comparisons = COMPARISONS | {"llama.cpp": partial(against_llama_cpp.compare, llama_cpp=args.llama_cpp)}
    if args.llama_cpp is None and "llama.cpp" in wanted:
        print("no --llama-cpp: not compared with llama.cpp")
        wanted.remove("llama.cpp")
    counted: Counter[str] = Counter()
    for name in wanted:
        python = ENVIRONMENTS[name].python(args.work)
        begun, versions = time.monotonic(), {}
        try:
            found, versions = comparisons[name](python, args.work)
        except PeerError as error:
            found = [results.Result(name, "all", "the peer runs", str(error), "differs")]
        for result in found:
            print(f"{result.outcome:13} {name}: {result.case}: {result.compared}: {result.found}", flush=True)
        counted.update(result.outcome for result in found)
        results.keep(name, results.Comparison(found, versions, time.monotonic() - begun), args.work, args.page)
    print(", ".join(f"{number} {outcome}" for outcome, number in counted.items()))
    return 1 if counted["differs"] else 0


COMPARISONS = {
    "modelopt": against_modelopt.compare,
    "speculators": against_speculators.compare,
    "vllm": against_vllm.compare,
}

if __name__ == "__main__":
    sys.exit(main())
