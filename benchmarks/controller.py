"""Is the controller ever slower than plain decoding, or than the best fixed draft length? Ratios from one run.

    python benchmarks/controller.py [--model PATH] [--draft PATH] [--batches 1,2,4,8,16,32] [--rounds 5] [--tokens 64]
        [--workloads high,low,zero,random,copy,mixed] [--lengths 1,2,4,8] [--widths 2,4] [--short] [--temperature 0]
        [--method ngram] [--quantization int8] [--clock wall|cpu] [--out docs/benchmarks]

Workloads: `high` are chat prompts that the embedded draft was trained for, `low` are 24 random tokens at temperature 1,
`zero` has a draft model that costs the same and is always wrong, `random` are 64 random tokens, `copy` a text of 24
tokens four times, `mixed` are copies, random tokens and chat in turns, for which drafters are compared alone and all
together (as with `--method auto`). `--widths` adds fixed trees of so many branches with twice as many guesses as
levels. Every round runs plain decoding, each fixed length and the controller once, in turns; ratios are taken within a
round, of the time of decoding alone: from the moment at which every prompt has been read to the end. One more run of
the controller before the first round lets it measure and learn, as a server would have; its ratio is reported as
`cold`. `--short` leaves the fixed lengths out but the one of 4, for 3 rounds. Foreign load is logged; on a busy machine
`--clock cpu --threads 1` counts the work of this process instead of the time it had to wait.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sametoken import LLM, SamplingParams
from sametoken.control.worth import Worth
from sametoken.drafters.base import Proposed
from sametoken.drafters.padded import Guess
from sametoken.engine.report import StepReport
from sametoken.heads.draft_model.drafts import DraftModelDrafter
from sametoken.options.sampling import RequestSpeculation
from sametoken.speculation.sampling import Sampling

LONGEST = 8
QUESTIONS = (
    "Hi! A large latte with oat milk, please.", "Can you help me book a table for two tonight?",
    "What is the weather like in Paris?", "I would like to order a pizza with mushrooms.",
    "My package has not arrived yet.", "Could you recommend a good film?", "I need a taxi to the airport at six.",
    "How much is a ticket to Boston?",
)  # fmt: skip


class Wrong(DraftModelDrafter):
    """Does all the work of a draft model and then proposes another token than it thinks of."""

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: Worth | None = None,
    ) -> Proposed:  # fmt: skip
        proposed, vocabulary = super().propose(rows, pending, limits, sampling, worth), self.decoder.config.vocab_size
        for row in rows:
            self._rows[row].children, self._rows[row].written = {0: {}}, {}
        wrong = [Guess([(token + 1) % vocabulary for token in tokens], parents) for tokens, parents in proposed.drafts]
        return proposed._replace(drafts=wrong)


def make_llm(model: str, draft: str | None, workload: str, rows: int, width: int = 1, **options: Any) -> LLM:
    """With drafts of up to `LONGEST` tokens on a path; with more branches than one, of twice as many in all.

    Args:
        options: of `LLM`; `method` is the speculation's.
    """
    settings = {"max_draft_len": LONGEST} | ({"method": options.pop("method")} if options.get("method") else {})
    if width > 1:
        settings |= {"tree_top_k": width, "max_total_draft_tokens": 2 * LONGEST}
    settings |= {"method": "auto"} if workload == "mixed" else {}
    llm = LLM(
        model, draft, settings, kv_cache={"enable_block_reuse": False},
        max_batch_size=rows, max_seq_len=512, max_num_tokens=rows * (1 + 2 * LONGEST) + 256, **options,
    )  # fmt: skip
    if workload == "zero":
        sound = llm.engine.drafters["draft_target"]
        assert isinstance(sound, DraftModelDrafter)
        wrong = Wrong(sound.decoder, sound.cache, max_draft_len=LONGEST)
        llm.engine.drafters["draft_target"] = wrong
    return llm


def make_prompts(llm: LLM, workload: str, count: int) -> list[list[int]]:
    if workload == "mixed":
        kinds = [make_prompts(llm, kind, count) for kind in ("copy", "random", "high")]
        return [kinds[i % len(kinds)][i] for i in range(count)]
    if workload in ("low", "random"):
        generator = torch.Generator().manual_seed(1)
        size = (24 if workload == "low" else 64,)
        vocab = llm.config.vocab_size
        return [torch.randint(300, vocab, size, generator=generator).tolist() for _ in range(count)]
    if workload == "copy":
        generator = torch.Generator().manual_seed(2)
        return [4 * torch.randint(300, 4000, (24,), generator=generator).tolist() for _ in range(count)]
    turns = [QUESTIONS[i % len(QUESTIONS)] + " Please." * (i // len(QUESTIONS)) for i in range(count)]
    return [llm.render_chat([{"role": "user", "content": turn}]) for turn in turns]


Way = tuple[LLM, RequestSpeculation]


def ways_of(llm: LLM, trees: Mapping[int, LLM], lengths: Sequence[int]) -> dict[str, Way]:
    """What a cell compares: plain decoding, fixed chains, fixed trees by branches, and the controller."""
    found: dict[str, Way] = {"plain": (llm, RequestSpeculation(enabled=False))}
    for method in ("auto", "ngram", "draft_target") if llm.speculative.method == "auto" else (None,):
        for n in lengths:
            name = f"fixed {n}" if method is None else f"{method} {n}"
            found[name] = llm, RequestSpeculation(max_draft_len=n, adaptive=False, method=method)
    for width, tree in trees.items():
        for n in lengths:
            if n > 1:
                found[f"fixed {n} x {width}"] = tree, RequestSpeculation(max_draft_len=n, adaptive=False)
    return found | {"controller": (llm, RequestSpeculation(adaptive=True))}


class Cell:
    """One workload at one batch size."""

    def __init__(
        self, ways: dict[str, Way], workload: str, batch: int, tokens: int, temperature: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.ways, self.tokens, self.clock = ways, tokens, clock
        self.temperature = 1.0 if workload == "low" else temperature
        self.prompts = make_prompts(ways["plain"][0], workload, batch)
        self.lengths: Counter[int] = Counter()
        self.plain: Counter[str] = Counter()
        self.acceptance: list[float] = []
        self.emitted: dict[str, float] = {}

    def run(self, name: str) -> float:
        """Seconds of decoding: from the end of the last prompt to the last token of all."""
        llm, speculative = self.ways[name]
        params = SamplingParams(
            temperature=self.temperature, seed=7, max_tokens=self.tokens, ignore_eos=True, speculative=speculative
        )
        engine, begin = llm.engine, self.clock()
        step = engine.step

        def watched() -> StepReport:
            nonlocal begin
            reads = engine.scheduler.waiting or any(r.remaining > 1 for r in engine.scheduler.running)
            report = step()
            if reads:
                begin = self.clock()
            return report

        engine.step = watched  # type: ignore[method-assign]
        try:
            done = llm.generate(self.prompts, params)
        finally:
            engine.step = step  # type: ignore[method-assign]
        seconds = self.clock() - begin
        forwards = sum(completion.speculation.target_forwards for completion in done)
        self.emitted[name] = self.tokens * len(done) / forwards
        if speculative.adaptive:
            for completion in done:
                self.lengths.update(dict(enumerate(completion.speculation.drafted_lengths)))
                self.plain.update(completion.speculation.plain)
        elif speculative.max_draft_len and speculative.enabled is not False:
            self.acceptance += [completion.speculation.acceptance_rate for completion in done]
        return seconds

    def measure(self, rounds: int) -> dict[str, Any]:
        ways = self.ways
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        first_plain = self.run("plain")
        first = self.run("controller")
        for lap in range(rounds):
            names = list(ways)
            for name in names[lap % len(names) :] + names[: lap % len(names)]:
                seconds[name].append(self.run(name))
        best = min((name for name in ways if name != "controller"), key=lambda name: statistics.median(seconds[name]))
        return {
            "speed-up": {name: ratio(seconds["plain"], seconds[name]) for name in ways if name != "plain"},
            "cold": first_plain / first,
            "best fixed": best,
            "controller / best fixed": ratio(seconds[best], seconds["controller"]),
            "guesses of fixed lengths accepted": statistics.mean(self.acceptance),
            "tokens a forward": self.emitted,
            "forwards of the controller by draft length": dict(sorted(self.lengths.items())),
            "its plain forwards by reason": dict(self.plain),
            "plain seconds": statistics.median(seconds["plain"]),
        }


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median and range over rounds."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def foreign() -> float:
    """CPU seconds that others have used since the machine started."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - usage.ru_utime - usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--workloads", default="high,low,zero")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lengths")
    parser.add_argument("--widths", default="", help="branches of fixed trees")
    parser.add_argument("--temperature", type=float, default=0.0, help="of high, zero, random and copy")
    parser.add_argument("--method", help="of drafting, if no draft says it")
    parser.add_argument("--quantization", help="of the target")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    lengths = [int(n) for n in (options.lengths or ("4" if options.short else "1,2,4,8")).split(",")]
    rounds = options.rounds or (3 if options.short else 5)
    widths = [int(width) for width in options.widths.split(",") if width]
    batches = [int(size) for size in options.batches.split(",")]
    cells: list[dict[str, Any]] = []
    for workload in options.workloads.split(","):
        own = {"method": options.method, "quantization": options.quantization}
        own = {name: value for name, value in own.items() if value}
        make = partial(make_llm, options.model, options.draft or None, workload, max(batches), **own)
        llm, trees = make(), {width: make(width) for width in widths}
        for batch in batches:
            before, begin = foreign(), time.perf_counter()
            ways = ways_of(llm, trees, lengths)
            figures = Cell(ways, workload, batch, options.tokens, options.temperature, clock).measure(rounds)
            figures["foreign cores"] = (foreign() - before) / (time.perf_counter() - begin)
            cells.append({"workload": workload, "batch": batch, **figures})
            show(cells[-1])
    worst = {
        "least controller / plain": min(cell["speed-up"]["controller"]["median"] for cell in cells),
        "least controller / best fixed": min(cell["controller / best fixed"]["median"] for cell in cells),
    }
    print(json.dumps(worst))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {
            "cpu": platform.processor(),
            "torch": torch.__version__,
            "threads": options.threads,
            "clock": options.clock,
        }
        about |= {"rounds": rounds, "tokens": options.tokens}
        about |= {"model": options.model, "draft": options.draft, "temperature": options.temperature}
        about |= own
        record = {"about": about, "worst": worst, "cells": cells}
        (options.out / "controller.json").write_text(json.dumps(record, indent=1) + "\n")


def show(cell: dict[str, Any]) -> None:
    speeds = " ".join(f"{name} {value['median']:.2f}" for name, value in cell["speed-up"].items())
    against = cell["controller / best fixed"]
    name = f"{cell['workload']:>5} x{cell['batch']:<3}"
    print(
        f"{name} {speeds} (cold {cell['cold']:.2f}); of the best, {cell['best fixed']}: "
        f"{against['median']:.2f} ({against['min']:.2f} to {against['max']:.2f}); "
        f"{cell['forwards of the controller by draft length']}; "
        f"tokens a forward {cell['tokens a forward']['controller']:.2f}; "
        f"plain: {cell['its plain forwards by reason']}; foreign {cell['foreign cores']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
