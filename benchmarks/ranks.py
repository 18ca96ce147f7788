"""One forward of a target in one process and in two ranks of this host, measured in turns.

    python benchmarks/ranks.py MODEL [ROUNDS]

One process has two threads, each rank has one. Prints milliseconds of a forward with its logits, the fastest and the
median, as a table in Markdown: ranks sum through shared memory and, for comparison, through gloo's loopback.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

from sametoken import LLM
from sametoken.kernels.cpu.threads import serial_torch
from sametoken.parallel.shared import MEMORY_SWITCH
from sametoken.runtime.cache import Span
from sametoken.speculation.draft import chain_mask

START = 64  # tokens before those of the forward
WAYS = {"one process": (1, "on"), "two ranks, shared memory": (2, "on"), "two ranks, gloo": (2, "off")}


def loaded(model: str, ranks: int, memory: str) -> LLM:
    """The target alone."""
    os.environ[MEMORY_SWITCH] = memory
    torch.set_num_threads(2)
    options = {"dtype": "bfloat16", "max_batch_size": 2, "max_seq_len": 256}
    return LLM(model, None, {"method": "none"}, tensor_parallel_size=ranks, **options)


def milliseconds(llm: LLM, rows: int) -> float:
    """Of one forward of a chain."""
    runner = llm.engine.runner
    span = Span(torch.tensor([0]), [0], torch.tensor([START]), chain_mask(1, rows), rows, START + rows)
    begin = time.perf_counter()
    runner.decoder.logits(runner.decoder.run(torch.arange(rows), runner.cache, [span]).last)
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    model, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 14
    llms = {name: loaded(model, *way) for name, way in WAYS.items()}
    print(f"| rows | {' | '.join(WAYS)} | of one process's speed |\n|---|{'---|' * (len(WAYS) + 1)}")
    for rows in (1, 5, 16):
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(rounds):
            for name, llm in llms.items():
                torch.set_num_threads(2 // WAYS[name][0])
                with serial_torch():
                    milliseconds(llm, rows)
                    found[name].append(milliseconds(llm, rows))
        best = [min(each) for each in found.values()]
        cells = [f"{low:.1f}, {statistics.median(each):.1f}" for low, each in zip(best, found.values(), strict=True)]
        print(f"| {rows} | {' | '.join(cells)} | {best[0] / best[1]:.2f}, {best[0] / best[2]:.2f} |", flush=True)
    for llm in llms.values():
        if llm.ranks is not None:
            llm.ranks.close()


if __name__ == "__main__":
    main()
