"""What decoding costs on a GPU: equal tokens first, then plain and speculative steps against the weight-read limit.

    python benchmarks/gpu.py [--shape 8b] [--device cuda] [--part equality|speed|all] [--out DIR]
    python benchmarks/gpu.py --device cpu --shape tiny        # the same program where there is no GPU

Weights are random and made in place. Everything is measured in one process, one after another, decoding only: the
difference of a long and a short run, so that the prompt does not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_models
import torch

from sametoken import LLM, Completion, SamplingParams
from sametoken.drafters.device import Plain, Proposer
from sametoken.engine.captured import decode_step
from sametoken.engine.runner import Runner
from sametoken.model.decoder import Decoder
from sametoken.options.sampling import RequestSpeculation
from sametoken.runtime.cache import KVCache, PageTable
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.runtime.graphs import GraphKey, Graphs
from sametoken.speculation.sampling import RowSampling, Sampling

PROMPT = list(range(3, 131))
CHANCES = (0.6, 0.8, 0.9)
DEPTH = 4
ROUNDS = 5
KEYS = 512
BATCHES = (1, 4, 16, 64)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Wall time of one `work`, the device's share included."""
    finish(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    finish(device)
    return (time.perf_counter() - begin) / repeats


def bandwidth(device: torch.device, elements: int) -> float:
    """Bytes per second that the device reads at best: the faster of a copy and a sum."""
    source = torch.ones(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    works: list[tuple[int, Callable[[], Any]]] = [
        (2, lambda: target.copy_(source)),
        (1, lambda: torch.sum(source.view(torch.float32))),
    ]
    best = 0.0
    for times, work in works:
        work()
        best = max(best, max(times * source.nbytes / seconds(work, device, 10) for _ in range(3)))
    return best


def read_bytes(decoder: Decoder) -> int:
    """What one step must read of the weights: everything but the embedding table."""
    return sum(weight.nbytes for name, weight in decoder.named_parameters() if not name.startswith("embed."))


def device_step(decoder: Decoder, proposer: Proposer, rounds: int) -> float:
    """Seconds of a step without the host: the same captured step replayed back to back."""
    device, shape = decoder.embed.weight.device, decoder.config
    table = PageTable(1, 65, 64, 32, device)
    table.extend(0, list(range(1, 65)))
    cache = KVCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, table, decoder.dtype, device)
    graph_slots = GraphSlots.empty(1, proposer.depth, proposer.nodes, device)
    runner, graphs = Runner(decoder, cache, ()), Graphs(device)
    greedy = RowSampling(SamplingParams(temperature=0), 0, PROMPT, shape.vocab_size, device=device)
    sampling = Sampling.of([greedy])
    key = GraphKey("bench", proposer.depth, 1, KEYS, (), decoder.dtype, decoder.embed.deterministic)
    run = partial(decode_step, runner, proposer, graph_slots, sampling, KEYS)

    def one() -> None:
        graphs.run(key, run, graph_slots.state)

    times = []
    for _ in range(rounds + 1):
        graph_slots.load([0], [6], table.spare, [len(PROMPT)], [proposer.depth], [gpu_models.CONTEXT])
        times.append(seconds(one, device, 20))
    return statistics.median(times[1:])


class Decoding:
    """Decoding of one sequence, the prompt's cost taken out.

    Attributes:
        tokens_per_s, step_s: medians over rounds; `done` is the last long run.
    """

    def __init__(self, llm: LLM, method: str, lengths: tuple[int, int], rounds: int) -> None:
        device = llm.engine.runner.device
        results: dict[int, Completion] = {}

        def say(count: int) -> None:
            params = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, speculative=RequestSpeculation(method=method)
            )
            results[count] = llm.generate(PROMPT, params)[0]

        for count in lengths:  # what is compiled or captured on the way
            say(count)
        rates, steps = [], []
        for _ in range(rounds):
            short, long = (seconds(partial(say, count), device) for count in lengths)
            forwards = [results[count].speculation.target_forwards for count in lengths]
            rates.append((lengths[1] - lengths[0]) / (long - short))
            steps.append((long - short) / (forwards[1] - forwards[0]))
        self.tokens_per_s, self.step_s = statistics.median(rates), statistics.median(steps)
        self.done = results[lengths[1]]


def equality(shape: str, device: torch.device, count: int) -> dict[str, Any]:
    """Tokens of one prompt by every way through the engine, in bfloat16; random weights, whose margins are small."""
    decoder = gpu_models.random_decoder(shape, device, steady=False)
    decoder.set_deterministic(True)
    plain = SamplingParams(temperature=0.7, seed=5, max_tokens=count, ignore_eos=True)
    drafted = SamplingParams(**{**_fields(plain), "speculative": RequestSpeculation(method=gpu_models.REPLAY)})
    host, ahead = (gpu_models.assemble(decoder, ahead=each, depth=DEPTH) for each in (False, True))
    truth = host.generate(PROMPT, plain)[0].token_ids
    for llm in (host, ahead):
        gpu_models.replaying(llm, [*PROMPT, *truth], DEPTH, 0.7)
    ways = {
        "plain again": host.generate(PROMPT, plain)[0],
        "plain, captured": ahead.generate(PROMPT, plain)[0],
        "plain, batch of 3": host.generate([PROMPT[:9], PROMPT[:50], PROMPT], plain)[2],
        "plain, captured, batch of 3": ahead.generate([PROMPT[:9], PROMPT[:50], PROMPT], plain)[2],
        "speculative": host.generate(PROMPT, drafted)[0],
        "speculative, captured": ahead.generate(PROMPT, drafted)[0],
        "speculative, captured, batch of 3": ahead.generate([PROMPT] * 3, [drafted, plain, drafted])[0],
    }
    wrong = {name: next((i for i, (a, b) in enumerate(zip(w.token_ids, truth, strict=True)) if a != b), None)
             for name, w in ways.items()}  # fmt: skip
    rate = ways["speculative"].speculation.acceptance_rate
    return {"tokens": count, "first difference at": wrong, "acceptance rate": rate, "equal": not any(
        place is not None for place in wrong.values())}  # fmt: skip


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "seed", "max_tokens", "ignore_eos")}


def transformers_rate(shape: str, device: torch.device, lengths: tuple[int, int], rounds: int) -> float:
    """Tokens per second of `generate` on a model of the same shape and dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**gpu_models.SHAPES[shape], max_position_embeddings=gpu_models.CONTEXT, dtype=torch.bfloat16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    ids = torch.tensor([PROMPT], device=device)

    def say(count: int) -> None:
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)

    say(lengths[0])
    rates = []
    for _ in range(rounds):
        short, long = (seconds(partial(say, count), device) for count in lengths)
        rates.append((lengths[1] - lengths[0]) / (long - short))
    return statistics.median(rates)


def speed(
    shape: str, device: torch.device, lengths: tuple[int, int], rounds: int, note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The table of one sequence, then the one of batches; `note` gets every row when it is measured."""
    decoder = gpu_models.random_decoder(shape, device, steady=True)
    rate = bandwidth(device, 2**30 if device.type == "cuda" else 2**22)
    limit = read_bytes(decoder) / rate
    report: dict[str, Any] = {"bandwidth GB/s": rate / 1e9, "weight-read limit ms": 1e3 * limit, "rows": []}
    note(report)

    def add(row: dict[str, Any]) -> None:
        report["rows"].append(row)
        note(row)

    for fixed in (False, True):
        decoder.set_deterministic(fixed)
        alone = {depth: device_step(decoder, proposer, rounds) for depth, proposer in (
            (0, Plain()), (DEPTH, gpu_models.Replay(PROMPT, DEPTH, 0.9, device).captured()))}  # fmt: skip
        report[f"five nodes / plain, {_mode(fixed)}"] = alone[DEPTH] / alone[0]
        for ahead in (True, False):
            llm = gpu_models.assemble(decoder, ahead=ahead, depth=DEPTH)
            often = rounds if ahead else 1  # eager steps are slow, and there for comparison
            plain = Decoding(llm, "none", lengths, often)
            add(_row("plain", fixed, ahead, plain, (alone[0], limit, plain.tokens_per_s)))
            for chance in CHANCES if ahead else CHANCES[1:2]:
                gpu_models.replaying(llm, [*PROMPT, *plain.done.token_ids], DEPTH, chance)
                found = Decoding(llm, gpu_models.REPLAY, lengths, often)
                row = _row(f"draft, {chance} a token", fixed, ahead, found, (alone[DEPTH], limit, plain.tokens_per_s))
                add({**row, "same text": found.done.token_ids == plain.done.token_ids})
            if ahead:
                gpu_models.replaying(llm, [*PROMPT, *plain.done.token_ids], DEPTH, 0.8)
                for batch in BATCHES:
                    add(_batch(llm, batch, lengths, fixed))
    del decoder, llm
    report["transformers tokens/s"] = transformers_rate(shape, device, lengths, max(1, rounds // 2))
    note({"transformers tokens/s": report["transformers tokens/s"]})
    return report


def _batch(llm: LLM, batch: int, lengths: tuple[int, int], fixed: bool) -> dict[str, Any]:
    """Tokens per second of `batch` sequences together, plain and with a draft that is right four times in five."""
    row: dict[str, Any] = {"what": f"batch of {batch}", "mode": _mode(fixed), "steps": "captured"}
    if batch > gpu_models.ROWS:
        return row
    for method in ("none", gpu_models.REPLAY):
        times, texts = {}, {}
        for count in (*lengths, *lengths):  # the first two compile and capture
            params = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, speculative=RequestSpeculation(method=method)
            )
            begin = time.perf_counter()
            texts[count] = [each.token_ids for each in llm.generate([PROMPT] * batch, params)]
            times[count] = time.perf_counter() - begin
        row[f"{method}: tokens/s"] = batch * (lengths[1] - lengths[0]) / (times[lengths[1]] - times[lengths[0]])
        row[f"{method}: rows alike"] = sum(text == texts[lengths[1]][0] for text in texts[lengths[1]])
    row["speed-up"] = row[f"{gpu_models.REPLAY}: tokens/s"] / row["none: tokens/s"]
    return row


def _mode(fixed: bool) -> str:
    return "deterministic" if fixed else "free"


def _row(name: str, fixed: bool, ahead: bool, found: Decoding, timing: tuple[float, float, float]) -> dict[str, Any]:
    alone, limit, plain = timing
    stats = found.done.speculation
    return {
        "what": name,
        "mode": _mode(fixed),
        "steps": "captured" if ahead else "eager",
        "tokens/s": found.tokens_per_s,
        "speed-up": found.tokens_per_s / plain,
        "acceptance length": stats.acceptance_length,
        "step ms": 1e3 * found.step_s,
        "% of limit": 100 * limit / found.step_s,
        "device ms": 1e3 * alone,
        "overhead ms": 1e3 * (found.step_s - alone),
        "idle %": 100 * max(0.0, 1 - alone / found.step_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(gpu_models.SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="all", choices=("all", "equality", "speed"))
    parser.add_argument("--tokens", type=int, default=256, help="of a long run; a short one is a quarter")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="directory for gpu.jsonl")
    args = parser.parse_args()
    device = torch.device(args.device)
    report: dict[str, Any] = {
        "command": sys.argv,
        "shape": args.shape,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }

    def note(found: dict[str, Any]) -> None:
        """A line on standard output and in the file at once: a run that is cut off keeps its lines."""
        line = json.dumps({name: round(x, 4) if isinstance(x, float) else x for name, x in found.items()})
        print(line, flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            with (args.out / "gpu.jsonl").open("a") as file:
                file.write(line + "\n")

    note(report)
    with torch.inference_mode():
        if args.part != "speed":
            report["equality"] = equality("tiny" if args.shape == "tiny" else "1b", device, args.tokens)
            note(report["equality"])
        if args.part != "equality":
            lengths = (args.tokens // 4, args.tokens)
            report["speed"] = speed(args.shape, device, lengths, args.rounds, note)
    return 0 if report.get("equality", {"equal": True})["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
