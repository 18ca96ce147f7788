"""Does the controller keep up when load rises and falls? Tokens per second by number of streams, from one run.

    python benchmarks/ramp.py [--model PATH] [--draft PATH] [--streams 1,4,16,64,16,4,1] [--seconds 8] [--settle 2]
        [--lengths 2,4,8] [--workload high] [--tokens 64] [--out FILE]

So many streams decode for so many seconds; whoever ends is replaced. The controller goes through all phases in one go,
as a server would. The others (plain decoding and each fixed length) go through the same phases, and the best of a phase
is what the controller is compared with. What the first `--settle` seconds of a phase brought is left out. The whole is
done twice, in turns, and the first time is not counted: the controller measures then, and caches are cold.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from controller import make_llm, make_prompts

from sametoken import LLM, SamplingParams
from sametoken.speculation.params import RequestSpeculation


def rates(
    llm: LLM, prompts: Sequence[Sequence[int]], asked: RequestSpeculation, options: argparse.Namespace
) -> list[float]:
    """Tokens per second of each phase."""
    engine, found, going, begun = llm.engine, [], 0, 0
    for streams in options.streams:
        begin, tokens, since = time.perf_counter(), 0, 0.0
        while (now := time.perf_counter() - begin) < options.seconds:
            while going < streams:
                params = SamplingParams(
                    temperature=0.0, max_tokens=options.tokens, ignore_eos=True, seed=begun, speculative=asked
                )
                engine.add(llm.make_requests(list(prompts[begun % len(prompts)]), params)[0])
                going, begun = going + 1, begun + 1
            report = engine.step()
            going -= sum(emission.finished for emission in report.emissions)
            if now >= options.settle:
                tokens += sum(len(emission.token_ids) for emission in report.emissions)
                since = since or now
        found.append(tokens / (time.perf_counter() - begin - since))
    while engine.busy:
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("--workload", default="high", help="of benchmarks/controller.py")
    parser.add_argument("--streams", default="1,4,16,64,16,4,1")
    parser.add_argument("--lengths", default="2,4,8")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of a phase that are left out")
    parser.add_argument("--tokens", type=int, default=64, help="of a stream")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.streams = [int(streams) for streams in options.streams.split(",")]
    llm = make_llm(options.model, options.draft, options.workload, max(options.streams))
    prompts = make_prompts(llm, options.workload, 256)
    ways = {"plain": RequestSpeculation(enabled=False), "controller": RequestSpeculation(adaptive=True)}
    for length in map(int, options.lengths.split(",")):
        ways[f"fixed {length}"] = RequestSpeculation(max_draft_len=length, adaptive=False)
    for asked in ways.values():  # caches, and what the controller measures
        rates(llm, prompts, asked, argparse.Namespace(**vars(options) | {"seconds": options.settle, "settle": 0.0}))
    found = {name: rates(llm, prompts, asked, options) for name, asked in ways.items()}
    phases = []
    for phase, streams in enumerate(options.streams):
        best = max((name for name in ways if name != "controller"), key=lambda name: found[name][phase])
        ratio = found["controller"][phase] / found[best][phase]
        phases.append({"streams": streams, "best": best, "controller / best": ratio})
        speeds = "  ".join(f"{name} {values[phase]:.0f}" for name, values in found.items())
        print(f"{streams:>3} streams: {speeds}; controller / {best}: {ratio:.2f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"tokens per second": found, "phases": phases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
