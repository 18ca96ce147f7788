"""Does the controller keep up when load rises and falls? Tokens per second by number of streams, from one run.

    python benchmarks/ramp.py [--model PATH] [--draft PATH] [--streams 1,4,16,64,16,4,1] [--seconds 8] [--settle 2]
        [--lengths 2,4,8] [--workload high] [--tokens 64] [--out FILE]

So many streams decode for so many seconds; whoever ends is replaced. The controller goes through all phases in one go,
as a server would. The others (plain decoding and each fixed length) go through the same phases, each with an engine of
its own, and the best of a phase is what the controller is compared with. They take turns of a second, so that all meet
the same machine. The time of the others' turns is not counted. What the first `--settle` seconds of a
phase brought is left out. Before, every engine goes through all phases for a second each: costs are measured then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

from controller import make_llm, make_prompts

from sametoken import SamplingParams
from sametoken.options.sampling import RequestSpeculation

TURN = 1.0  # seconds


class Load:
    """The streams of one way to draft, on an engine of their own."""

    def __init__(self, options: argparse.Namespace, asked: RequestSpeculation) -> None:
        self._llm = make_llm(options.model, options.draft, options.workload, max(options.streams))
        self._prompts = make_prompts(self._llm, options.workload, 256)
        self._asked, self._tokens = asked, options.tokens
        self._going = self._begun = 0

    def turn(self, streams: int, seconds: float) -> tuple[int, float]:
        """Decodes for so long; tokens, and the seconds that it took in fact."""
        engine, tokens, begin = self._llm.engine, 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < seconds:
            while self._going < streams:
                params = SamplingParams(
                    temperature=0.0, max_tokens=self._tokens, ignore_eos=True, seed=self._begun, speculative=self._asked
                )
                prompt = list(self._prompts[self._begun % len(self._prompts)])
                engine.add(self._llm.make_requests(prompt, params)[0])
                self._going, self._begun = self._going + 1, self._begun + 1
            report = engine.step()
            self._going -= sum(emission.finished for emission in report.emissions)
            tokens += sum(len(emission.token_ids) for emission in report.emissions)
        return tokens, taken


def rates(loads: Mapping[str, Load], streams: int, seconds: float, settle: float) -> dict[str, float]:
    """Tokens per second by way in one phase, in turns, without what came before `settle`."""
    for load in loads.values():
        load.turn(streams, settle)
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in loads}
    for _ in range(max(1, round((seconds - settle) / TURN))):
        for name, load in loads.items():
            found[name].append(load.turn(streams, TURN))
    return {name: sum(tokens for tokens, _ in each) / sum(taken for _, taken in each) for name, each in found.items()}


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
    ways = {"plain": RequestSpeculation(enabled=False), "controller": RequestSpeculation(adaptive=True)}
    for length in map(int, options.lengths.split(",")):
        ways[f"fixed {length}"] = RequestSpeculation(max_draft_len=length, adaptive=False)
    loads = {name: Load(options, asked) for name, asked in ways.items()}
    for load in loads.values():
        for streams in options.streams:
            load.turn(streams, TURN)
    phases = []
    for streams in options.streams:
        found = rates(loads, streams, options.seconds, options.settle)
        best = max((name for name in ways if name != "controller"), key=lambda name: found[name])
        ratio = found["controller"] / found[best]
        phases.append({"streams": streams, "best": best, "controller / best": ratio, "tokens per second": found})
        speeds = "  ".join(f"{name} {value:.0f}" for name, value in found.items())
        print(f"{streams:>3} streams: {speeds}; controller / {best}: {ratio:.2f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(phases, indent=1) + "\n")


if __name__ == "__main__":
    main()
