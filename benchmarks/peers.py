"""This engine beside transformers, llama.cpp and vLLM: same weights, prompts, lengths and drafts, one at a time.

    python benchmarks/deepen.py embedded MODEL --copies 8 --parameters 1.0e9
    python benchmarks/peers.py --model MODEL --draft embedded --llama-cpp DIR --vllm-python PATH --out OUT

Every engine has a process of its own, which is stopped while another one computes. A round asks every cell for every
prompt, prompt by prompt, so that the cells of a ratio run within a minute or two of each other; a cell's speed in a
round is over all prompts, and ratios are taken within a round. CPU time that others used is logged with each attempt.
Writes peers.json (every attempt), peers.md and peers.png to --out. An engine that is not there is reported as absent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from peers_engines import report as reports
from peers_engines.cells import CELLS, Attempt, Cell
from peers_engines.host import EngineError, Hosts
from peers_engines.launches import Peers, launch
from peers_engines.report import Report

from sametoken.checkpoint.hub import read_config, resolve
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.embedded import draft, target
from sametoken.errors import ConfigError, SametokenError
from sametoken.prompts.files import read_items
from sametoken.prompts.sources import BUILT_IN, Conversation, Source, as_turn

WARM_UP_TOKENS = 8
SLACK = 16  # positions that an engine may want past the last token beside a draft


def add_places(parser: argparse.ArgumentParser) -> None:
    """Options that say where the engines are, and how many threads each has."""
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp source tree with its programs in build/bin")
    parser.add_argument("--convert-python", default=sys.executable, help="interpreter for llama.cpp's converter")
    parser.add_argument("--vllm-python", help="interpreter that has vLLM for CPU")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the target, bfloat16")
    parser.add_argument("--draft", default="embedded", help="directory of the draft")
    parser.add_argument("--engines", help="comma-separated; default all: sametoken,transformers,llama.cpp,vllm")
    parser.add_argument("--cells", default="*", help="comma-separated patterns of engine/dtype/mode, e.g. '*/bf16/*'")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--prompts", help="JSON lines with prompt or messages; default six built-in chat turns")
    parser.add_argument("--draft-len", type=int, default=4, help="tokens that every engine drafts (K)")
    add_places(parser)
    parser.add_argument("--made", type=Path, help="directory of converted and quantised models; default OUT/made")
    parser.add_argument("--out", type=Path, required=True, help="directory for results, logs and converted models")
    return parser.parse_args()


def chosen(engines: str | None, patterns: str) -> list[Cell]:
    """The cells of these engines that match a pattern.

    Raises:
        ConfigError: an engine is unknown or nothing is left.
    """
    known = list(dict.fromkeys(cell.engine for cell in CELLS))
    wanted = engines.split(",") if engines else known
    if unknown := [engine for engine in wanted if engine not in known]:
        raise ConfigError(f"--engines {unknown[0]!r}: expected some of {', '.join(known)}")
    cells = [c for c in CELLS if c.engine in wanted and any(fnmatch(str(c), p) for p in patterns.split(","))]
    if not cells:
        raise ConfigError(f"--cells {patterns!r} matches none of: {', '.join(map(str, CELLS))}")
    return cells


def prompt_ids(file: str | None, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the prompts, which every engine gets."""
    given = [item.source for item in read_items(file, "--prompts")[1]] if file else None
    sources: Sequence[Source] = given or [as_turn(turn) for turn in BUILT_IN[:6]]

    def ids(source: Source) -> list[int]:
        if not isinstance(source, Conversation):
            return tokenizer.encode(source)
        return tokenizer.encode(tokenizer.apply_chat_template(source.messages), add_special_tokens=False)

    return [ids(source) for source in sources]


def describe(directory: Path) -> str:
    """A model in words; one that was made large says so."""
    config = read_config(directory)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    words = f"{directory.name}, {config['hidden_size']} wide, {config['num_hidden_layers']} layers, {size / 1e9:.3g} GB"
    made = directory / "deepened.json"
    if not made.exists():
        return words
    how = json.loads(made.read_text())
    return (
        f"{words} (widened from {how['source_hidden_size']} by copies and deepened from {how['source_layers']} layers "
        "by identity blocks: the small model's text at the large one's cost)"
    )


def measure(cells: Sequence[Cell], prompts: Sequence[list[int]], peers: Peers, args: argparse.Namespace) -> Report:
    """Runs the rounds. A cell that fails is absent from then on; what it gave in whole rounds before is kept."""
    absent: dict[Cell, str] = {}
    attempts: list[Attempt] = []
    hosts = Hosts(args.out / "logs")
    setup = {
        "target": describe(peers.model),
        "draft": describe(peers.draft),
        "prompts": len(prompts),
        "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        "max_tokens": args.max_tokens,
        "draft_len": args.draft_len,
        "threads": args.threads,
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": machine(),
        "versions": hosts.versions,
    }
    result = Report(setup, cells, attempts, absent)
    try:
        for number in range(args.rounds):
            attempts += one_round(number, [c for c in cells if c not in absent], prompts, (hosts, peers, absent), args)
            reports.write(result, args.out)  # so that an interrupted run keeps what it has
    finally:
        hosts.close()
    return result


def one_round(
    number: int,
    cells: Sequence[Cell],
    prompts: Sequence[list[int]],
    engines: tuple[Hosts, Peers, dict[Cell, str]],
    args: argparse.Namespace,
) -> list[Attempt]:
    """Every prompt through every cell; returns the attempts of the cells that answered all of them."""
    hosts, peers, absent = engines
    attempts = {cell: Attempt(number, cell) for cell in cells}
    for place, prompt in enumerate(prompts):
        for cell in cells:
            if cell in absent:
                continue
            modes = dict.fromkeys(other.mode for other in cells if other.host == cell.host)
            warm_ups = [request(mode, prompt, WARM_UP_TOKENS) for mode in modes for _ in range(2)]
            try:
                visit = hosts.ask(cell.host, launch(cell, peers), request(cell.mode, prompt, args.max_tokens), warm_ups)
            except EngineError as error:
                absent[cell] = str(error)
                print(f"{cell}: absent: {error}", flush=True)
                continue
            attempt = attempts[cell]
            attempt.answers.append(visit.answer | {"tokens": visit.answer["tokens"][0]})
            attempt.wall += visit.wall
            attempt.foreign += visit.foreign
            speed = visit.answer["timed_tokens"] / visit.answer["seconds"]
            load = visit.foreign / visit.wall
            print(f"round {number} prompt {place} {cell}: {speed:.2f} tokens/s, {load:.2f} foreign cores", flush=True)
    return [attempt for cell, attempt in attempts.items() if cell not in absent]


def request(mode: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"mode": mode, "prompts": [prompt], "max_tokens": max_tokens}


def machine() -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t: ")
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> int:
    args = options()
    try:
        model, draft_directory = resolve(target(args.model)), resolve(draft(args.draft))
        cells = chosen(args.engines, args.cells)
        prompts = prompt_ids(args.prompts, load_tokenizer(model))
        args.out.mkdir(parents=True, exist_ok=True)
    except (SametokenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    longest = max(map(len, prompts)) + args.max_tokens + args.draft_len + SLACK
    common = {"threads": args.threads, "draft_len": args.draft_len, "max_len": -(-longest // 128) * 128}
    peers = Peers(
        model,
        draft_directory,
        args.llama_cpp,
        args.convert_python,
        args.vllm_python,
        args.made or args.out / "made",
        common,
    )
    print("\n" + reports.text(measure(cells, prompts, peers, args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
