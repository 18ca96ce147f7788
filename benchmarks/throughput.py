"""Tokens per second at load beside vLLM and llama.cpp: decoding in batches, and prompts of several lengths.

    python benchmarks/deepen.py embedded MODEL --copies 8 --parameters 1.0e9 --positions 40960
    python benchmarks/throughput.py --model MODEL --llama-cpp DIR --vllm-python PATH --out throughput.json
        [--precisions bf16,int8,int4] [--decode 1,4,16,64] [--prompts 512,4096] [--rounds 3]

A decode cell continues so many random prompts of 32 tokens together and is timed while all of them decode, plain and
with the draft model: ours with the controller (`auto`), the others with drafts of fixed length. A prompt cell is the
time to the first token of one random prompt. Engines run as in peers.py: each in a process of its own, one at a time,
in turns within a round, and ratios are taken within a round. CPU time that others used is logged with each attempt.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers import add_places, machine
from peers_engines.cells import FOREIGN_LIMIT, Attempt, Cell, Goal, ratio, speeds
from peers_engines.host import EngineError, Hosts
from peers_engines.launches import Peers, launch
from peers_engines.report import columns, show_spread

from sametoken.checkpoint.hub import read_config, resolve
from sametoken.embedded import draft, target
from sametoken.errors import SametokenError

# What competes with ours at each precision, and in which modes.
RIVALS = {
    "bf16": (("vllm", "bf16"), ("llama.cpp", "bf16")),
    "int8": (("llama.cpp", "q8_0"),),
    "int4": (("llama.cpp", "q4_0"),),
}
STEP_TOKENS = 2048  # tokens of a step of ours at most, as the others have it by default
SLACK = 16  # positions that an engine may want past the last token beside a draft


class Work(NamedTuple):
    """What a cell does in a round: `decode` rows together, or read a `prompt` of so many tokens."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"

    def request(self, number: int, args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
        """Random prompts that no other round has, so that nothing is found in a cache."""
        dice = random.Random(f"{self} {number}")
        rows, length = (self.size, args.prompt_len) if self.kind == "decode" else (1, self.size)
        prompts = [[dice.randrange(300, vocabulary) for _ in range(length)] for _ in range(rows)]
        return {"prompts": prompts, "max_tokens": args.new_tokens if self.kind == "decode" else 1}

    def figures(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What counts of an engine's answer: the tokens of its decoding, or those of the prompt."""
        if self.kind == "decode":
            return {name: answer[name] for name in ("timed_tokens", "seconds", "steps")}
        return {"timed_tokens": self.size, "seconds": answer["first_seconds"], "steps": 1}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the target, bfloat16")
    parser.add_argument("--draft", default="embedded", help="directory of the draft model")
    parser.add_argument("--precisions", default="bf16,int8,int4", help=f"some of {', '.join(RIVALS)}")
    parser.add_argument("--modes", default="plain,draft", help="of decoding: plain, draft")
    parser.add_argument("--decode", default="1,4,16,64", help="numbers of rows; empty for none")
    parser.add_argument("--prompts", default="512,4096", help="numbers of tokens; empty for none")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens of each prompt that is continued")
    parser.add_argument("--new-tokens", type=int, default=64, help="by which each prompt is continued")
    parser.add_argument("--draft-len", type=int, default=4, help="tokens that engines draft, ours at most")
    parser.add_argument("--rounds", type=int, default=3)
    add_places(parser)
    parser.add_argument("--made", type=Path, help="directory of converted models; default `made` beside --out")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all attempts; logs lie beside it")
    return parser.parse_args()


def cells_of(kind: str, precisions: Sequence[str], modes: Sequence[str]) -> list[Cell]:
    """The cells of a kind of work, ours last; prompts are read plainly."""
    return [
        Cell(engine, dtype, "auto" if (engine, mode) == ("sametoken", "draft") else mode)
        for precision in precisions
        for engine, dtype in (*RIVALS[precision], ("sametoken", precision))
        for mode in (modes if kind == "decode" else ("plain",))
    ]


def goals(cells: Sequence[Cell]) -> Iterator[Goal]:
    """Ours over the better of the others: plain over plain, and with the draft over anything that they do."""
    for cell in cells:
        rivals = [c for c in cells if (c.engine, c.dtype) in RIVALS.get(cell.dtype, ())]
        below = tuple(c for c in rivals if cell.mode == "auto" or c.mode == "plain")
        if cell.engine == "sametoken" and below:
            yield Goal(cell, below, 1.0)


def measure(
    work: Sequence[Work], cells: Sequence[Cell], peers: Peers, args: argparse.Namespace
) -> tuple[dict[Work, list[Attempt]], dict[str, Any]]:
    """Runs the rounds of one kind of work. A cell that fails is absent from then on; the second result says why."""
    hosts, absent = Hosts(args.out.parent / "logs"), {}
    attempts: dict[Work, list[Attempt]] = {each: [] for each in work}
    vocabulary = read_config(peers.model)["vocab_size"]
    try:
        for number in range(args.rounds):
            for each in work:
                turned = [*cells[number % len(cells) :], *cells[: number % len(cells)]]
                for cell in (c for c in turned if c not in absent):
                    asked, warm = ({"mode": cell.mode} | each.request(n, args, vocabulary) for n in (number, -1))
                    try:
                        visit = hosts.ask(cell.host, launch(cell, peers), asked, [warm])
                    except EngineError as error:
                        absent[cell] = str(error)
                        print(f"{cell}: absent: {error}", flush=True)
                        continue
                    done = Attempt(number, cell, [each.figures(visit.answer)], visit.wall, visit.foreign)
                    attempts[each].append(done)
                    said = f"{done.speed:.1f} tokens/s, {done.foreign_cores:.2f} foreign cores"
                    print(f"round {number} {each} {cell}: {said}", flush=True)
    finally:
        hosts.close()
    return attempts, {"versions": hosts.versions, "absent": {str(cell): why for cell, why in absent.items()}}


def table(attempts: dict[Work, list[Attempt]], cells: Sequence[Cell]) -> str:
    """Speeds by cell and work, then the ratios."""
    rows = [["tokens/s", *map(str, attempts)]]
    for cell in cells:
        found = [speeds(each).get(cell) for each in attempts.values()]
        rows.append([str(cell), *("absent" if spread is None else show_spread(spread) for spread in found)])
    for goal in goals(cells):
        found = [ratio(goal, each) for each in attempts.values()]
        rows.append([str(goal), *("absent" if spread is None else show_spread(spread, "x") for spread in found)])
    return columns(rows) + f"\n* only attempts above {FOREIGN_LIMIT} cores of foreign load"


def record(attempts: dict[Work, list[Attempt]], cells: Sequence[Cell]) -> dict[str, Any]:
    """Everything of some work that is kept."""
    return {
        str(work): {
            "tokens_per_second": {str(cell): spread._asdict() for cell, spread in speeds(each).items()},
            "ratios": {str(goal): spread._asdict() for goal in goals(cells) if (spread := ratio(goal, each))},
            "attempts": [
                {"round": a.round, "cell": str(a.cell), "foreign_cores": a.foreign_cores, **a.answers[0]} for a in each
            ],
        }
        for work, each in attempts.items()
    }


def main() -> int:
    args = options()
    try:
        model, draft_directory = resolve(target(args.model)), resolve(draft(args.draft))
        config = read_config(model)
    except (SametokenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    made = args.made or args.out.parent / "made"
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    result: dict[str, Any] = {"command": sys.argv, "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine()}
    for kind, sizes in (("decode", args.decode), ("prompt", args.prompts)):
        work = [Work(kind, int(size)) for size in sizes.split(",") if size]
        if not work:
            continue
        most = max(each.size for each in work)
        rows, length = (most, args.prompt_len + args.new_tokens) if kind == "decode" else (1, most + 1)
        length = -(-(length + args.draft_len + SLACK) // 128) * 128
        common = {"threads": args.threads, "draft_len": args.draft_len, "max_len": length, "rows": rows}
        common |= {"step_tokens": STEP_TOKENS, "cache_gb": 1 + 2 * rows * length * token_bytes // 10**9}
        peers = Peers(model, draft_directory, args.llama_cpp, args.convert_python, args.vllm_python, made, common)
        cells = cells_of(kind, args.precisions.split(","), args.modes.split(","))
        attempts, about = measure(work, cells, peers, args)
        result |= {kind: about | record(attempts, cells)}
        print("\n" + table(attempts, cells) + "\n", flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
