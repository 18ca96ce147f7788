"""Counts differing tokens between ways of computing the same requests in bfloat16: the claim is zero.

    python benchmarks/reproducibility.py [--prompts 200] [--tokens 128] [--temperatures 0,0.8]

Ways: plain one by one (the reference); plain in a batch; speculative one by one and in a batch, chain and tree; with
the prompt read in pieces of 16; with suffix drafts; and with a page pool so small that sequences are preempted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from sametoken import LLM, RequestSpeculation, SamplingParams
from sametoken.embedded import DRAFT, TARGET

DRINKS = ("a latte", "two mochas", "a cappuccino", "an iced tea", "a flat white", "black coffee", "hot chocolate")
TASTES = ("with oat milk", "with an extra shot", "to go", "without sugar", "as large as you have")
FILMS = ("a comedy", "something scary", "a film for children", "an old western", "whatever starts at eight")
PLACES = ("in Dallas, Texas", "near the station", "in Portland", "close to my hotel")
TOPICS = ("my new dog", "the weather at the sea", "a job in a library", "learning the guitar", "my sister's wedding")
OPENINGS = ("Hi!", "Hello there.", "Good evening.", "So,")


def conversations(count: int) -> list[list[dict[str, str]]]:
    """The first `count` openings of the embedded model's domain, all different."""
    coffee = [f"{o} I would like {d} {t}, please." for o, d, t in itertools.product(OPENINGS, DRINKS, TASTES)]
    cinema = [f"{o} I want to see {f} {p} tonight." for o, f, p in itertools.product(OPENINGS, FILMS, PLACES)]
    chat = [f"{o} Can I tell you about {t}?" for o, t in itertools.product(OPENINGS, TOPICS)]
    turns = [turn for group in itertools.zip_longest(coffee, cinema, chat) for turn in group if turn]
    return [[{"role": "user", "content": turn}] for turn in turns[:count]]


def run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], method: str, batch: int, adaptive: bool = False
) -> list[list[int]]:
    """Output ids of every prompt, `batch` of them at a time."""
    asked = [replace(each, speculative=RequestSpeculation(method=method, adaptive=adaptive)) for each in params]
    outputs: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        part = slice(first, first + batch)
        outputs += [completion.token_ids for completion in llm.generate(prompts[part], asked[part])]
    return outputs


def differing(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(a != b for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--quantization", default="none", help="of the target")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    pair = (str(TARGET), str(DRAFT))
    tree = {"max_draft_len": 3, "tree_top_k": 3, "max_total_draft_tokens": 8}
    common = {"dtype": "bfloat16", "quantization": args.quantization}
    llm = LLM(*pair, **common)
    prompts = [llm.render_chat(conversation) for conversation in conversations(args.prompts)]
    small = {"max_tokens": 6 * (args.tokens + 64)}  # a third of what 16 rows need
    ways: dict[str, tuple[LLM, str, int]] = {
        "plain, batch 16": (llm, "none", 16),
        "chain of 4, one by one": (llm, "draft_target", 1),
        "chain of 4, batch 16": (llm, "draft_target", 16),
        "tree of 8, batch 7": (LLM(*pair, speculative=tree, **common), "draft_target", 7),
        "chain, prompt in pieces of 16": (LLM(*pair, max_num_tokens=16, **common), "draft_target", 3),
        "suffix, batch 16": (llm, "suffix", 16),
        "controller, batch 5": (llm, "auto", 5),
        "chain, preempted, batch 16": (LLM(*pair, kv_cache=small, **common), "draft_target", 16),
    }
    rows: list[dict[str, Any]] = []
    for temperature in map(float, args.temperatures.split(",")):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=args.tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        reference = run(llm, prompts, params, "none", 1)
        for name, (engine, method, batch) in ways.items():
            begin = time.perf_counter()
            got = run(engine, prompts, params, method, batch, adaptive=name.startswith("controller"))
            tokens, wrong = sum(map(len, got)), differing(reference, got)
            rows.append({"temperature": temperature, "way": name, "tokens": tokens, "differing": wrong})
            print(f"T {temperature}  {name:32} {tokens} tokens, {wrong} differ, {time.perf_counter() - begin:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")
    if any(row["differing"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
