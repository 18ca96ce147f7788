"""What a step with a tree of guesses costs beside one with a chain of as many, and what each brings. One run, in turns.

    python benchmarks/trees.py [--model PATH] [--draft PATH] [--batch 1] [--rounds 5] [--tokens 128] [--threads 2]

Every shape guesses 8 tokens a step. Prints milliseconds of a step (the median of the rounds), of the chain's step, the
tokens that a forward emits, and the speed beside plain decoding, as a table in Markdown for temperatures 0 and 1.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from sametoken import LLM, SamplingParams
from sametoken.options.sampling import RequestSpeculation

SHAPES = {
    "chain of 8": {"max_draft_len": 8},
    "4 levels, 2 branches": {"max_draft_len": 4, "tree_top_k": 2, "max_total_draft_tokens": 8},
    "3 levels, 3 branches": {"max_draft_len": 3, "tree_top_k": 3, "max_total_draft_tokens": 8},
}
QUESTION = "Could you recommend a good film?"


def measured(llm: LLM, args: argparse.Namespace, temperature: float, drafts: bool) -> tuple[float, float]:
    """Milliseconds of a forward, and the tokens that it emits for each row."""
    prompts = [llm.render_chat([{"role": "user", "content": QUESTION + " Please." * row}]) for row in range(args.batch)]
    speculative = RequestSpeculation(adaptive=False) if drafts else RequestSpeculation(enabled=False)
    params = SamplingParams(
        temperature=temperature, seed=7, max_tokens=args.tokens, ignore_eos=True, speculative=speculative
    )
    begin = time.perf_counter()
    done = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    emitted = statistics.mean(each.speculation.acceptance_length for each in done) if drafts else 1.0
    return 1e3 * seconds / args.tokens * emitted, emitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="embedded")
    for name, default in (("batch", 1), ("rounds", 5), ("tokens", 128), ("threads", torch.get_num_threads())):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = {"kv_cache": {"enable_block_reuse": False}, "max_batch_size": args.batch, "max_seq_len": 512}
    llms = {name: LLM(args.model, args.draft, shape, **options) for name, shape in SHAPES.items()}
    heads = "temperature", "guesses", "ms a step", "of the chain's", "tokens a forward", "of plain"
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for temperature in (0.0, 1.0):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("plain", *SHAPES)}
        for turn in range(args.rounds + 1):
            for name in found:
                each = measured(llms.get(name, llms["chain of 8"]), args, temperature, name in llms)
                found[name] += [each] if turn else []  # the first turn warms up
        step = {name: statistics.median(each[0] for each in turns) for name, turns in found.items()}
        for name in SHAPES:
            emitted = found[name][0][1]
            speed = step["plain"] / step[name] * emitted
            ratio = step[name] / step["chain of 8"]
            print(f"| {temperature:g} | {name} | {step[name]:.2f} | {ratio:.2f} | {emitted:.2f} | {speed:.2f} |")


if __name__ == "__main__":
    main()
