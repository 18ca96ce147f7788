"""One forward of a target in one process and in two ranks of this host, and drafts of a model, measured in turns.

    python benchmarks/ranks.py MODEL [ROUNDS]
    python benchmarks/ranks.py MODEL --draft DRAFT [ROUNDS]

One process has two threads, each rank has one. Prints milliseconds of a forward with its logits, the fastest and the
median, as a table in Markdown: ranks sum through shared memory and, for comparison, through gloo's loopback. With a
draft model: milliseconds of a draft of 4 tokens, which rank 0 computes alone or both ranks, and tokens a second.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

from sametoken import LLM, SamplingParams
from sametoken.kernels.cpu.threads import serial_torch
from sametoken.model.compiled import Committed
from sametoken.parallel.messages import Draws, sampling_of
from sametoken.parallel.shared import MEMORY_SWITCH
from sametoken.runtime.cache import Span
from sametoken.speculation.draft import chain_mask

START = 64  # tokens before those of the forward
LENGTH, TOKENS = 4, 32  # of a draft, and of an answer
PLAIN = {"method": "none"}
MEMORY = {"shared memory": "on", "gloo": "off"}
GREEDY = sampling_of(Draws(None, None, None, None, None, None))
WAYS = {"one process": (1, "on"), "two ranks, shared memory": (2, "on"), "two ranks, gloo": (2, "off")}


def loaded(model: str, ranks: int, memory: str, draft: str | None = None, speculative: object = PLAIN) -> LLM:
    """The target, alone unless a draft is given."""
    os.environ[MEMORY_SWITCH] = memory
    torch.set_num_threads(2)
    options = {"dtype": "bfloat16", "max_batch_size": 2, "max_seq_len": 256}
    return LLM(model, draft, speculative, tensor_parallel_size=ranks, **options)


def milliseconds(llm: LLM, rows: int) -> float:
    """Of one forward of a chain."""
    runner = llm.engine.runner
    span = Span(torch.tensor([0]), [0], torch.tensor([START]), chain_mask(1, rows), rows, START + rows)
    begin = time.perf_counter()
    runner.decoder.logits(runner.decoder.run(torch.arange(rows), runner.cache, [span]).last)
    return 1e3 * (time.perf_counter() - begin)


def drafting(model: str, draft: str, rounds: int) -> None:
    """Prints what drafts take that one rank or both compute."""
    ways = {f"{ranks} of 2 ranks, {way}": (ranks, memory) for way, memory in MEMORY.items() for ranks in (1, 2)}
    llms, found = {}, {name: ([], []) for name in ways}
    for name, (ranks, memory) in ways.items():
        speculative = {"max_draft_len": LENGTH, "adaptive": False, "draft_tensor_parallel_size": ranks}
        llms[name] = loaded(model, 2, memory, draft, speculative)
    prompt = next(iter(llms.values())).render_chat([{"role": "user", "content": "Hi! I would like a latte, please."}])
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    torch.set_num_threads(1)
    for _ in range(rounds):
        for name, llm in llms.items():
            guesser = llm.engine.drafters["draft_target"].guesser
            read = Committed([0], [START], [[5, 6, 7]])
            for _ in range(2):
                begin = time.perf_counter()
                guesser.guess(read, LENGTH, GREEDY)
            found[name][0].append(1e3 * (time.perf_counter() - begin))
            (done,) = llm.generate([prompt], params)
            found[name][1].append(TOKENS / done.seconds)
    print("| computed by | ms of a draft, fastest and median | tokens/s, best and median |\n|---|---|---|")
    for name, (drafts, speeds) in found.items():
        cells = (
            f"{min(drafts):.1f}, {statistics.median(drafts):.1f} | {max(speeds):.1f}, {statistics.median(speeds):.1f}"
        )
        print(f"| {name} | {cells} |")
    for llm in llms.values():
        llm.close()


def main() -> None:
    arguments = sys.argv[1:]
    if "--draft" in arguments:
        model, _, draft, *rest = arguments
        drafting(model, draft, int(rest[0]) if rest else 6)
        return
    model, rounds = arguments[0], int(arguments[1]) if len(arguments) > 1 else 14
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
