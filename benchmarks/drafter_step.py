"""Time of the model-free drafters per step and per prompt token, at contexts of 1k to 32k tokens.

    python benchmarks/drafter_step.py [--json FILE]

A step is one `propose` and one `observe` of a row. The text repeats passages of itself among heavy-tailed noise. Every
number is the median of the steps (or chunks), so that other work on the machine weighs little.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from sametoken.drafters.ngram import NgramDrafter
from sametoken.drafters.padded import Guess
from sametoken.drafters.suffix import SuffixDrafter

CONTEXTS = (1_024, 4_096, 16_384, 32_768)
STEPS, CHUNK, DRAFT = 500, 256, 8


def repeating_text(length: int, seed: int = 0) -> list[int]:
    """Half fresh tokens with a heavy tail, half passages of 8 to 64 tokens copied from before."""
    generator = random.Random(seed)
    text = [0]
    while len(text) < length:
        size = generator.randint(8, 64)
        if generator.random() < 0.5:
            start = generator.randrange(len(text))
            text += text[start : start + size]
        else:
            text += [int(1 / (generator.random() + 1e-4)) for _ in range(size)]
    return text[:length]


def measure(drafter: NgramDrafter | SuffixDrafter, text: list[int], context: int) -> dict[str, float]:
    """Microseconds per prompt token, per proposal, per observed token; draft tokens that came true per step."""
    drafter.admit(0, [])
    prompt, propose, observe, right = [], [], [], 0
    for start in range(0, context, CHUNK):
        begin = time.perf_counter()
        drafter.observe([0], [text[start : start + CHUNK]], None)
        prompt.append((time.perf_counter() - begin) / CHUNK)
    for place in range(context, context + STEPS):
        begin = time.perf_counter()
        [guess] = drafter.propose([0], [text[place]], [DRAFT], None).drafts
        middle = time.perf_counter()
        drafter.observe([0], [[text[place]]], None)
        propose.append(middle - begin)
        observe.append(time.perf_counter() - middle)
        right += accepted(guess, text[place + 1 : place + 1 + DRAFT])
    return {
        "prompt_us_per_token": statistics.median(prompt) * 1e6,
        "propose_us": statistics.median(propose) * 1e6,
        "observe_us": statistics.median(observe) * 1e6,
        "right_per_step": right / STEPS,
    }


def accepted(guess: Guess, truth: list[int]) -> int:
    """Length of the path that agrees with what really follows."""
    depths = {0: 0}
    for node, (token, parent) in enumerate(zip(*guess, strict=True), 1):
        depth = depths.get(parent)
        if depth is not None and depth < len(truth) and token == truth[depth]:
            depths[node] = depth + 1
    return max(depths.values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the results to this file")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    text = repeating_text(max(CONTEXTS) + STEPS + DRAFT)
    results = []
    print(
        f"{'drafter':8} {'context':>7} {'prompt us/token':>16} {'propose us':>11} {'observe us':>11} {'right/step':>11}"
    )
    for context in CONTEXTS:
        for name, drafter in (("ngram", NgramDrafter(max_draft_len=DRAFT)), ("suffix", SuffixDrafter(budget=DRAFT))):
            row = measure(drafter, text, context)
            results.append({"drafter": name, "context": context, **row})
            print(
                f"{name:8} {context:7} {row['prompt_us_per_token']:16.2f} {row['propose_us']:11.1f} "
                f"{row['observe_us']:11.1f} {row['right_per_step']:11.2f}"
            )
    report = {
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": STEPS,
        "draft_tokens": DRAFT,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
