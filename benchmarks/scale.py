"""Throughput and latency of workers behind NVIDIA Dynamo, simulated step by step, and held against a run.

    python benchmarks/scale.py check --dynamo-python FILE [--out docs/benchmarks/scale.json]
    python benchmarks/scale.py plan

`check` measures what steps of this engine cost, in as many engines at a time as there will be workers; predicts what
clients see who ask again as soon as they are answered, and who ask at random times; and runs both behind Dynamo.
`plan` simulates one worker of a 70B target on four H100 with costs from data sheets, for 10^6 requests per hour.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx

HERE = Path(__file__).resolve()
LAUNCH = HERE.parents[1] / "deploy" / "dynamo" / "launch.sh"
WORKERS, CLIENTS, TOKENS, ROWS = 2, 8, 96, (1, 2, 4, 6, 8)
LIMIT, SPECULATIVE = 8, {"max_draft_len": 3, "adaptive": False}
READY_S = 120.0


class Costs(NamedTuple):
    """What a worker's work takes.

    Attributes:
        rows: seconds of a step by the number of rows in it; in between a straight line, beyond the last one goes on.
        prompt: seconds of a request's prompt. fixed: seconds of a request outside of the engine.
        advance: how often a row went on by 1, 2, ... tokens in a step.
    """

    rows: dict[int, float]
    prompt: float
    fixed: float
    advance: tuple[float, ...]

    def step(self, rows: int, prompts: int) -> float:
        """Seconds of a step with so many rows, and prompts read in it."""
        known = sorted(self.rows)
        if len(known) == 1:
            return self.rows[known[0]] + prompts * self.prompt
        above = next((place for place, each in enumerate(known) if each >= rows), len(known) - 1)
        low, high = known[max(0, above - 1)], known[max(1, above)]
        slope = (self.rows[high] - self.rows[low]) / (high - low)
        return self.rows[low] + (max(rows, known[0]) - low) * slope + prompts * self.prompt


class Load(NamedTuple):
    """Who asks: `clients` who ask again at once, or `rate` requests per second at random times.

    Attributes:
        tokens: of every answer. requests: how many are simulated or sent.
    """

    tokens: int
    requests: int
    clients: int = 0
    rate: float = 0.0


class Seen(NamedTuple):
    """What clients saw: answers' tokens per second, and seconds of a request."""

    tokens_per_second: float
    median: float
    p95: float

    @classmethod
    def of(cls, spans: Sequence[tuple[float, float]], tokens: int) -> Seen:
        """Of begin and end of each request; the first and last tenth are no steady state."""
        tenth = len(spans) // 10
        spans = sorted(spans, key=lambda span: span[1])[tenth:-tenth]
        seconds = sorted(end - begin for begin, end in spans)
        passed = spans[-1][1] - spans[0][1]
        return cls((len(spans) - 1) * tokens / passed, statistics.median(seconds), seconds[int(0.95 * len(seconds))])


def simulate(costs: Costs, load: Load, workers: int, limit: int, seed: int = 0) -> Seen:
    """Requests go to the workers in turn; a worker steps with all its rows, `limit` at most, and reads new prompts."""
    draw, turn, order = random.Random(seed), count(), count()
    weights, sizes = costs.advance, range(1, len(costs.advance) + 1)
    waiting: list[deque[float]] = [deque() for _ in range(workers)]
    rows: list[list[tuple[int, float]]] = [[] for _ in range(workers)]  # tokens left, when it was asked
    busy, spans = [False] * workers, []
    events: list[tuple[float, int, int]] = []  # when, order, worker; -1: somebody asks
    left = load.requests

    def ask(now: float) -> None:
        heapq.heappush(events, (now, next(order), -1))

    def step(worker: int, now: float) -> None:
        new = 0
        while waiting[worker] and len(rows[worker]) < limit:
            rows[worker].append((load.tokens, waiting[worker].popleft()))
            new += 1
        busy[worker] = bool(rows[worker])
        if rows[worker]:
            heapq.heappush(events, (now + costs.step(len(rows[worker]), new), next(order), worker))

    for _ in range(load.clients):
        ask(0.0)
    if load.rate:
        ask(draw.expovariate(load.rate))
    while events:
        now, _, worker = heapq.heappop(events)
        if worker < 0:
            if not left:
                continue
            left -= 1
            worker = next(turn) % workers
            waiting[worker].append(now)
            if load.rate:
                ask(now + draw.expovariate(load.rate))
            if not busy[worker]:
                step(worker, now)
            continue
        going = []
        for (tokens, asked), by in zip(rows[worker], draw.choices(sizes, weights, k=len(rows[worker])), strict=True):
            if tokens > by:
                going.append((tokens - by, asked))
                continue
            spans.append((asked, now + costs.fixed))
            if load.clients:
                ask(now + costs.fixed)
        rows[worker] = going
        step(worker, now)
    return Seen.of(spans, load.tokens)


# --- what is measured


def prompt(number: int) -> str:
    return f"Tell me about {number} things that you like, and why."


async def engine() -> None:
    """A process with an engine: standard input says how many rows, standard output when they went on, and how far."""
    from sametoken import LLM, SamplingParams
    from sametoken.engine.async_llm import AsyncLLM

    llm = LLM("embedded", "embedded-eagle3", SPECULATIVE, max_batch_size=LIMIT)
    async with AsyncLLM(llm) as running:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        for line in sys.stdin:
            rows, first = map(int, line.split())
            prompts = [llm.render_chat([{"role": "user", "content": prompt(first + row)}]) for row in range(rows)]
            began, moments, advance = time.perf_counter(), [], Counter[int]()
            async for chunk in running.stream(prompts, params):
                moments.append(time.perf_counter())
                advance[len(chunk.token_ids)] += 1
                if chunk.completion:  # fewer rows from now on
                    break
            steps = len(moments) / rows
            print(json.dumps([began, moments[rows - 1], moments[-1], steps, advance]), flush=True)


def measured(rounds: int) -> Costs:
    """Costs of a step while all workers compute."""
    words = [sys.executable, str(HERE), "engine"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    engines = [subprocess.Popen(words, **pipes) for _ in range(WORKERS)]
    steps: dict[int, list[float]] = {rows: [] for rows in ROWS}
    firsts: list[float] = []
    advance: Counter[int] = Counter()
    try:
        for number in range(rounds + 1):
            for rows in ROWS:
                for each in engines:
                    print(rows, 100 * number + rows, file=each.stdin, flush=True)
                for each in engines:
                    began, first, last, taken, found = json.loads(each.stdout.readline())
                    if number:  # the first round warms up
                        steps[rows].append((last - first) / (taken - 1))
                        advance.update({int(by): times for by, times in found.items()})
                        if rows == 1:
                            firsts.append(first - began)
    finally:
        for each in engines:
            each.stdin.close()
            each.wait()
    seconds = {rows: statistics.median(each) for rows, each in steps.items()}
    share = [advance[by] / advance.total() for by in range(1, max(advance) + 1)]
    return Costs(seconds, max(0.0, statistics.median(firsts) - seconds[1]), 0.0, tuple(share))


def run_dynamo(python: str, loads: Callable[[Dynamo], Sequence[Load]]) -> list[tuple[Load, Seen]]:
    """Loads on workers behind Dynamo's frontend, one after the other."""
    first = 20_000 + random.randrange(10_000)
    environ = {
        **os.environ, "PYTHON": python, "WORKERS": str(WORKERS), "DYN_HTTP_PORT": str(first + WORKERS),
        "SYSTEM_PORT": str(first), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    options = ["--max-batch-size", str(LIMIT), "--max-draft-len", str(SPECULATIVE["max_draft_len"])]
    words = [str(LAUNCH), "--model", "embedded", "--draft", "embedded-eagle3", "--no-adaptive", *options]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(words, env=environ, stdout=log, stderr=log)
        try:
            dynamo = Dynamo(f"http://127.0.0.1:{first + WORKERS}", [first + each for each in range(WORKERS)])
            dynamo.wait(process)
            return [(load, asyncio.run(dynamo.seen(load))) for load in loads(dynamo)]
        finally:
            process.terminate()
            process.wait()


class Dynamo(NamedTuple):
    """A frontend, and the system ports of its workers."""

    url: str
    ports: list[int]

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                ready = [
                    httpx.get(f"http://127.0.0.1:{port}/health").json()["status"] == "ready" for port in self.ports
                ]
                if all(ready) and httpx.get(f"{self.url}/v1/models").json()["data"]:
                    return
            time.sleep(0.2)
        raise SystemExit(f"Dynamo was not ready within {READY_S:g} s; see docs/dynamo.md")

    async def ask(self, client: httpx.AsyncClient, number: int, tokens: int) -> tuple[float, float]:
        """Begin and end of a request."""
        message = {"role": "user", "content": prompt(number)}
        body = {"model": "embedded", "messages": [message], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        began = time.perf_counter()
        answer = await client.post(f"{self.url}/v1/chat/completions", json=body)
        found = answer.raise_for_status().json()["usage"]["completion_tokens"]
        assert found == tokens, f"{found} tokens, expected {tokens}"
        return began, time.perf_counter()

    async def seen(self, load: Load) -> Seen:
        """What clients see; requests before do not count."""
        draw, numbers = random.Random(1), count(1000)
        async with httpx.AsyncClient(timeout=READY_S, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(self.ask(client, next(numbers), load.tokens) for _ in range(2 * WORKERS)))
            if load.clients:
                left = iter(range(load.requests))

                async def ask_again() -> list[tuple[float, float]]:
                    return [await self.ask(client, next(numbers), load.tokens) for _ in left]

                found = await asyncio.gather(*(ask_again() for _ in range(load.clients)))
                spans = [span for each in found for span in each]
            else:
                asked = []
                for _ in range(load.requests):
                    await asyncio.sleep(draw.expovariate(load.rate))
                    asked.append(asyncio.create_task(self.ask(client, next(numbers), load.tokens)))
                spans = list(await asyncio.gather(*asked))
        return Seen.of(spans, load.tokens)

    def fixed(self) -> float:
        """Seconds that a request for one token takes, the least of several."""

        async def least() -> float:
            async with httpx.AsyncClient(timeout=READY_S) as client:
                spans = [await self.ask(client, number, 1) for number in range(40)]
            return min(end - begin for begin, end in spans)

        return asyncio.run(least())


def check(arguments: argparse.Namespace) -> None:
    """Prediction and measurement."""
    costs, limit = measured(arguments.rounds), LIMIT
    record: dict[str, Any] = {"workers": WORKERS, "clients": CLIENTS, "tokens": TOKENS, "cores": os.cpu_count()}
    found: list[Costs] = []

    def loads(dynamo: Dynamo) -> list[Load]:
        fixed = dynamo.fixed() - costs.step(1, 1)
        found.append(costs._replace(fixed=max(0.0, fixed)))
        busy = Load(TOKENS, arguments.requests, clients=CLIENTS)
        most = simulate(found[0], busy, WORKERS, limit).tokens_per_second / TOKENS
        return [busy, Load(TOKENS, arguments.requests, rate=0.6 * most)]

    rows = []
    for load, seen in run_dynamo(arguments.dynamo_python, loads):
        predicted = simulate(found[0], load._replace(requests=20 * load.requests), WORKERS, limit)
        rows.append({"load": load._asdict(), "predicted": predicted._asdict(), "measured": seen._asdict()})
        print(f"{load.clients} clients" if load.clients else f"{load.rate:.2f} requests/s")
        for name, expected, value in zip(Seen._fields, predicted, seen, strict=True):
            print(f"  {name:18} predicted {expected:8.3f}  measured {value:8.3f}  miss {expected / value - 1:+.1%}")
    record |= {"costs": found[0]._asdict(), "runs": rows}
    print(json.dumps(record["costs"]))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


# --- on paper

WEIGHTS, KV_TOKEN = 70e9, 327_680  # bytes: 70B in fp8; 80 layers, 8 key heads of 128, keys and values in bfloat16
GPUS, BANDWIDTH, FLOPS = 4, 3.35e12 * 0.7, 1.979e15 * 0.45  # H100 SXM: share of the data sheet that is reached
PROMPT, ANSWER, PER_HOUR, DRAFT, BATCH = 1000, 250, 1e6, 4, 256
HEAD = 0.12  # time of a draft of 4 by a one-layer head, as a share of the target's forward


def paper(acceptance: float, hits: float) -> Costs:
    """A worker of `GPUS`: `acceptance` tokens per row and step (1 is no draft), and a share of prompts in the cache."""
    verified = 1 if acceptance == 1 else 1 + DRAFT
    share = 1.0 + HEAD * (verified > 1)

    def step(rows: int) -> float:
        read = (WEIGHTS + rows * (PROMPT + ANSWER / 2) * KV_TOKEN) / (GPUS * BANDWIDTH)
        return share * max(read, rows * verified * 2 * WEIGHTS / (GPUS * FLOPS))

    weights = [1.0] if acceptance == 1 else [acceptance_of(length, acceptance) for length in range(1, verified + 1)]
    prompt_s = (1 - hits) * PROMPT * 2 * WEIGHTS / (GPUS * FLOPS)
    return Costs({rows: step(rows) for rows in (1, 16, 64, 128, 192, 256)}, prompt_s, 0.03, tuple(weights))


def acceptance_of(length: int, mean: float) -> float:
    """Share of steps with so many tokens where each guess holds with the same chance and the mean is `mean`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**each for each in range(DRAFT + 1)) < mean else (low, middle)
    return low ** (length - 1) * ((1 - low) if length <= DRAFT else 1)


def plan(arguments: argparse.Namespace) -> None:
    """The fewest workers with a p95 below the limit, for several acceptance lengths and hit rates."""
    print(f"{PER_HOUR:.0f} requests/h of {PROMPT} + {ANSWER} tokens, p95 <= {arguments.p95:g} s")
    print("acceptance  hits  workers  GPUs  p95 s  median s")
    for acceptance in (1.0, 2.0, 3.0):
        for hits in (0.0, 0.5, 0.9):
            costs = paper(acceptance, hits)

            steps = ANSWER / sum(by * share for by, share in enumerate(costs.advance, 1))
            most = 1 / (costs.prompt + steps * costs.step(BATCH, 0) / BATCH)  # requests per second and worker

            def seen(workers: int, costs: Costs = costs) -> Seen:
                rate = PER_HOUR / 3600 / workers
                return simulate(costs, Load(ANSWER, int(rate * arguments.seconds), rate=rate), 1, BATCH)

            low = high = math.ceil(PER_HOUR / 3600 / most)
            while seen(high).p95 > arguments.p95:
                low, high = high + 1, high + max(1, high // 8)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if seen(middle).p95 <= arguments.p95 else (middle + 1, high)
            found = seen(low)
            print(f"{acceptance:10.1f}  {hits:4.1f}  {low:7}  {low * GPUS:4}  {found.p95:5.2f}  {found.median:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("engine")
    checked = commands.add_parser("check")
    checked.add_argument("--dynamo-python", required=True, help="Python with sametoken and ai-dynamo")
    checked.add_argument("--rounds", type=int, default=6)
    checked.add_argument("--requests", type=int, default=160)
    checked.add_argument("--out", type=Path)
    planned = commands.add_parser("plan")
    planned.add_argument("--p95", type=float, default=10.0, help="seconds")
    planned.add_argument("--seconds", type=float, default=120.0, help="that are simulated")
    arguments = parser.parse_args()
    if arguments.command == "engine":
        asyncio.run(engine())
    else:
        {"check": check, "plan": plan}[arguments.command](arguments)


if __name__ == "__main__":
    main()
