"""How an engine in a process of its own answers the benchmark: JSON lines, timed by one clock.

Only the standard library: this runs in the peers' own environments too. The first argument is the engine's spec as
JSON; then every line of standard input is a request and is answered by one line.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Clock:
    """Notes when tokens of some rows came out. Speed is taken while all rows decode, which leaves the prompts out.

    That is from the moment at which every row has a token to that at which a row has all of its tokens. The first
    emission may hold several tokens (an engine that drafts before it has read the prompt), so it is counted, not taken
    to be one.
    """

    def __init__(self, rows: int = 1) -> None:
        self.begin = time.perf_counter()
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.marks: list[tuple[float, list[int]]] = []  # when, and how many tokens each row had

    def emit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """These tokens are there now, by row."""
        for row, new in tokens.items():
            self.tokens[row] += new
        if any(tokens.values()):
            self.marks.append((time.perf_counter(), [len(row) for row in self.tokens]))

    def answer(self, max_tokens: int) -> dict[str, Any]:
        """What the benchmark reads; tokens beyond `max_tokens`, which a draft may bring, count for the speed.

        Raises:
            RuntimeError: the engine ended early, or a row ended before all others had begun.
        """
        if (least := min(map(len, self.tokens))) < max_tokens:
            raise RuntimeError(f"{least} tokens came, expected {max_tokens}: the engine stopped by itself")
        first = next(i for i, (_, counts) in enumerate(self.marks) if all(counts))
        last = next(i for i, (_, counts) in enumerate(self.marks) if max(counts) >= max_tokens)
        if last < first:
            raise RuntimeError(f"a row had all of its {max_tokens} tokens before each row had one; ask for more tokens")
        (first_time, before), (last_time, after) = self.marks[first], self.marks[last]
        return {
            "tokens": [row[:max_tokens] for row in self.tokens],
            "timed_tokens": sum(after) - sum(before),
            "seconds": last_time - first_time,
            "steps": last - first,
            "first_seconds": first_time - self.begin,
        }


class Engine(Protocol):
    """What a child serves.

    Attributes:
        version: of the engine, and of what decides its speed.
    """

    version: str

    def run(self, mode: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Continues the prompts together, greedily, each by `max_tokens`; returns what `Clock.answer` returns."""
        ...


def die_with_parent() -> None:
    """Ends this process when its parent ends, however that was: a stopped engine would otherwise hold its memory on."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def serve(build: Callable[[dict[str, Any]], Engine]) -> None:
    """Builds the engine of the spec in argv[1] and answers requests until standard input ends.

    An engine that cannot be built or run is one line {"error": ...}; the details go to standard error.
    """
    die_with_parent()
    # Libraries print to standard output; the protocol keeps the real one for itself.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        engine = build(json.loads(sys.argv[1]))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
        raise
    print(json.dumps({"version": engine.version}), file=out)
    for line in sys.stdin:
        try:
            answer = engine.run(**json.loads(line))
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
            raise
        print(json.dumps(answer), file=out)
