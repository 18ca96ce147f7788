"""What a step costs on this CPU, as ratios measured in one run: linears, nodes, overhead, transformers, memory, start.

    python benchmarks/cpu_step.py [--shapes 15m,1b] [--rounds 5] [--out docs/benchmarks]
    python benchmarks/cpu_step.py --host MODEL [--draft DRAFT] [--rounds 3]

Models have random weights of a Llama shape, written to a temporary directory so that transformers reads the same
files. Every figure is the median over interleaved rounds; foreign load is logged beside them.

--host prints what part of a decoding step the host takes: everything but the compiled forward, output layer and draft.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sametoken import LLM, AsyncLLM, SamplingParams
from sametoken.embedded import TARGET
from sametoken.engine.report import StepReport
from sametoken.engine.runner import Runner
from sametoken.kernels.cpu.variant import library
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, PageTable, Span

SHAPES: dict[str, dict[str, int]] = {
    "15m": {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
KV_HEADS = {"15m": 6, "1b": 8}
VOCABULARY = 32000
CONTEXT = 256


def write_checkpoint(shape: str, directory: Path) -> None:
    """A random bfloat16 Llama with the embedded tokenizer beside it (its ids are the first of the vocabulary)."""
    import shutil

    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=KV_HEADS[shape],
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=shape == "15m",
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TARGET / name, directory / name)


def busy() -> tuple[float, float]:
    """CPU seconds of the whole machine and of this process."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (sum(ticks) - ticks[3] - ticks[4]) / 100, usage.ru_utime + usage.ru_stime


class Timed:
    """Named figures over interleaved rounds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def run(self, name: str, work: Callable[[], Any], repeats: int) -> None:
        work()
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        self.seconds.setdefault(name, []).append((time.perf_counter() - begin) / repeats)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, above: str, below: str) -> dict[str, float]:
        """Median and range of the ratio of two figures, round by round."""
        ratios = [a / b for a, b in zip(self.seconds[above], self.seconds[below], strict=True)]
        return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def linears(decoder: Decoder, rows: int) -> Callable[[], None]:
    """Every linear of one step and nothing else."""
    config = decoder.config
    x = torch.randn(rows, config.hidden_size, dtype=decoder.dtype)
    a = torch.randn(rows, config.num_heads * config.head_dim, dtype=decoder.dtype)
    m = torch.randn(rows, config.intermediate_size, dtype=decoder.dtype)

    def run() -> None:
        for block in decoder.blocks:
            block.qkv(x), block.out(a), block.gate_up(x), block.down(m)
        decoder.embed.project(x) if decoder.head is None else decoder.head(x)

    return run


def step(decoder: Decoder, nodes: int) -> Callable[[], None]:
    """Forward and logits of `nodes` nodes after CONTEXT tokens, one sequence."""
    config = decoder.config
    table = PageTable(1, 64, 32, 32, "cpu")
    table.extend(0, list(range(1, 33)))  # 1024 slots side by side
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, table, decoder.dtype, "cpu")
    width = max(nodes, decoder.least_rows)
    ancestor_mask = torch.ones(1, width, width, dtype=torch.bool).tril()
    tokens, row, start = torch.arange(width), torch.tensor([0]), torch.tensor([CONTEXT])

    def run() -> None:
        hidden = decoder(tokens, cache, cache.view([Span(row, [0], start, ancestor_mask, width, CONTEXT + width)])).last
        decoder.logits(hidden)

    return run


def overhead(llm: LLM, batch: int) -> float:
    """Seconds per step outside the target's forward: plan, draw, verify, commit, text."""
    inside = 0.0
    decoder, runner = llm.engine.runner.decoder, llm.engine.runner
    forward, logits = decoder.forward, decoder.logits

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal inside
            begin = time.perf_counter()
            result = work(*args)
            inside += time.perf_counter() - begin
            return result

        return run

    assert isinstance(runner, Runner)
    decoder.forward, decoder.logits = timed(forward), timed(logits)  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, stop=["never said"])
    begin = time.perf_counter()
    done = llm.generate([[1, 5 + i] for i in range(batch)], params)
    total = time.perf_counter() - begin
    decoder.forward, decoder.logits = forward, logits  # type: ignore[method-assign]
    return (total - inside) / done[0].speculation.target_forwards


class HostTime:
    """How long steps take that decode a whole batch, and for how long of it the compiled model computes."""

    def __init__(self, llm: LLM) -> None:
        self.inside, self.batch, self.moments = 0.0, 0, list[tuple[float, float]]()
        kernels = library()
        for name in ("_forward", "_linear", "_guess", "_grow"):
            setattr(kernels, name, self._timed(getattr(kernels, name)))
        llm.engine.reports.append(self._hear)

    def _timed(self, call: Callable[..., int]) -> Callable[..., int]:
        def run(*arguments: Any) -> int:
            begin = time.perf_counter()
            status = call(*arguments)
            self.inside += time.perf_counter() - begin
            return status

        return run

    def _hear(self, report: StepReport) -> None:
        if len(report.plan.decode) == self.batch and not report.plan.prefill:
            self.moments.append((time.perf_counter(), self.inside))

    def over(self, batch: int, work: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of a step, and the host's share of them."""
        self.batch, self.moments = batch, []
        work()
        (begin, before), *_, (end, after) = self.moments
        return (end - begin) / (len(self.moments) - 1), 1 - (after - before) / (end - begin)


def print_host(model: str, draft: str | None, rounds: int) -> None:
    """Rows of a table: way to call, temperature, batch, milliseconds of a step and of its host part, share."""
    llm = LLM(model, draft, None if draft else {"method": "none"}, max_batch_size=64)
    timer, engine = HostTime(llm), AsyncLLM(llm)

    async def stream(prompts: list[str], params: list[SamplingParams]) -> None:
        async for _ in engine.run(llm.requests(prompts, params)):
            pass

    ways: dict[str, Callable[..., Any]] = {
        "generate": llm.generate,
        "stream": lambda *given: asyncio.run(stream(*given)),
    }
    found: dict[tuple[str, float, int], list[tuple[float, float]]] = {}
    for _, cell in itertools.product(range(rounds), itertools.product(ways, (0.0, 0.8), (1, 8, 64))):
        way, temperature, batch = cell
        common: Any = {"temperature": temperature, "top_p": 0.95, "max_tokens": 60, "ignore_eos": True}
        prompts = [f"Story {i}: once upon a time there" for i in range(batch)]
        params = [SamplingParams(**common, seed=i) for i in range(batch)]
        found.setdefault(cell, []).append(timer.over(batch, partial(ways[way], prompts, params)))
    for cell, each in found.items():
        step, share = (statistics.median(column) for column in zip(*each, strict=True))
        print("", *cell, f"{1e3 * step:.2f}", f"{1e3 * step * share:.2f}", f"{share:.1%}", "", sep=" | ", flush=True)
    asyncio.run(engine.close())


def measure(shape: str, rounds: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as path:
        write_checkpoint(shape, Path(path))
        memory = json.loads(child("memory", path)) if shape == "1b" else None
        llm = LLM(path, max_batch_size=16, max_seq_len=512)
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    decoder = llm.engine.runner.decoder
    prompt = list(range(3, 35))
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    timed, spent = Timed(), []
    steps = {nodes: step(decoder, nodes) for nodes in (1, 5, 16)}
    alone = linears(decoder, decoder.least_rows)
    repeats = 40 if shape == "15m" else 6
    ids = torch.tensor([prompt])
    read, long = step(decoder, CONTEXT), torch.arange(CONTEXT).unsqueeze(0)
    for _ in range(rounds):
        before = busy()
        timed.run("linears", alone, repeats)
        for nodes, work in steps.items():
            timed.run(f"step{nodes}", work, repeats)
        timed.run("prompt", read, 2)
        timed.run("prompt, transformers", lambda: theirs(long), 2)
        timed.run("ours", lambda: llm.generate(prompt, params), 1)
        timed.run(
            "transformers",
            lambda: theirs.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0),
            1,
        )
        after = busy()
        spent.append((after[0] - before[0]) - (after[1] - before[1]))
    figures: dict[str, Any] = {
        "milliseconds": {name: 1e3 * timed.median(name) for name in timed.seconds},
        "step1 / linears": timed.ratio("step1", "linears"),
        "step5 / step1": timed.ratio("step5", "step1"),
        "step16 / step1": timed.ratio("step16", "step1"),
        "transformers / ours": timed.ratio("transformers", "ours"),
        "prompt, transformers / ours": timed.ratio("prompt, transformers", "prompt"),
        "non-linear us a layer": 1e6 * (timed.median("step1") - timed.median("linears")) / decoder.config.num_layers,
        "foreign cpu seconds a round": spent,
        "memory": memory,
    }
    if shape == "15m":
        single = statistics.median(overhead(llm, 1) for _ in range(rounds))
        many = statistics.median(overhead(llm, 16) for _ in range(rounds))
        figures["overhead ms at batch 1"] = 1e3 * single
        figures["overhead ms per further row"] = 1e3 * (many - single) / 15
    return figures


def child(task: str, argument: str) -> str:
    """Runs one of the tasks below in a fresh process; returns the last line it prints."""
    command = [sys.executable, __file__, "--child", task, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak since it was reset)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def task_memory(path: str) -> None:
    """Peak resident memory of loading and generating, beside the weights and the cache that was touched."""
    LLM(str(TARGET)).generate([1], SamplingParams(temperature=0, max_tokens=4))  # libraries and their first-call arenas
    baseline = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    llm = LLM(path, max_batch_size=1, max_seq_len=512)
    llm.generate(list(range(3, 259)), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    cache = llm.engine.runner.cache
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    kv = 2 * cache.keys.numel() * cache.keys.element_size()
    used = resident("VmHWM") - baseline
    print(json.dumps({"weights": weights, "kv": kv, "peak": used, "peak / (weights + kv)": used / (weights + kv)}))


def first_token() -> float:
    """Seconds from process start to the embedded model's first token."""
    code = (
        "from sametoken import LLM, SamplingParams; from sametoken.embedded import TARGET, DRAFT;"
        "next(iter(LLM(str(TARGET), str(DRAFT)).stream('Hello', SamplingParams(max_tokens=4))))"
    )
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def help_seconds() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "sametoken.cli", "--help"], check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="15m,1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="directory for cpu_step.json")
    parser.add_argument("--host", metavar="MODEL")
    parser.add_argument("--draft")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host:
        return print_host(args.host, args.draft, args.rounds)
    if args.child:
        return task_memory(args.child[1])
    report: dict[str, Any] = {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t: "),
        "start": {
            "first token s": statistics.median(first_token() for _ in range(3)),
            "help s": statistics.median(help_seconds() for _ in range(5)),
        },
    }
    for shape in args.shapes.split(","):
        report[shape] = measure(shape, args.rounds)
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cpu_step.json").write_text(json.dumps(report, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
