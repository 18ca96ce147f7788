"""Throughput and latency of workers behind NVIDIA Dynamo, simulated step by step, and held against a run.

    python benchmarks/scale.py check --dynamo-python FILE [--out docs/benchmarks/scale.json]
    python benchmarks/scale.py plan

`check` measures what steps cost behind Dynamo with other loads than those that it predicts; predicts what clients see
who ask again as soon as they are answered, and who ask at random times; and runs both. All take turns, so that load of
other programs meets all of them.
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
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import httpx

HERE = Path(__file__).resolve()
LAUNCH = HERE.parents[1] / "deploy" / "dynamo" / "launch.sh"
WORKERS, CLIENTS, TOKENS = 2, 8, 96
FITS = 6  # rounds until costs fit
DRAWS = 20  # simulations of the requests of a round
ALONE, MEASURED = 1, (2, 6, 12)  # clients of the loads that costs come from
LIMIT, SPECULATIVE = 8, {"max_draft_len": 3, "adaptive": False}
READY_S = 120.0


class Costs(NamedTuple):
    """What a worker's work takes.

    Attributes:
        rows: seconds of a step by the number of rows in it; in between a straight line, beyond the last one goes on.
        alone: share of these seconds that a step takes while no other worker is busy; 1 where each has a machine.
        prompt: seconds of a request's prompt. fixed: seconds of a request outside of the engine.
        steps: of requests; drafts are accepted more for one text than for another.
    """

    rows: dict[int, float]
    prompt: float
    fixed: float
    steps: tuple[int, ...]
    alone: float = 1.0

    def step(self, rows: int, prompts: int, others: bool = True) -> float:
        """Seconds of a step with so many rows, and prompts read in it, while others are busy or not."""
        if not others:
            return self.alone * self.step(rows, prompts)
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

    def waits(self, seed: int) -> list[float]:
        """Seconds before each request that comes at a random time."""
        draw = random.Random(seed)
        return [draw.expovariate(self.rate) for _ in range(self.requests)] if self.rate else []


Spans = list[tuple[float, float]]  # begin and end of requests


class Seen(NamedTuple):
    """What clients saw: answers' tokens per second, and seconds of a request."""

    tokens_per_second: float
    median: float
    p95: float

    @classmethod
    def of(cls, runs: Sequence[Spans], tokens: int) -> Seen:
        """Of begin and end of each request; the first and last tenth of each run are no steady state."""
        seconds: list[float] = []
        passed, done = 0.0, 0
        for spans in runs:
            tenth = len(spans) // 10
            kept = sorted(spans, key=lambda span: span[1])[tenth:-tenth]
            seconds += [end - begin for begin, end in kept]
            passed, done = passed + kept[-1][1] - kept[0][1], done + len(kept) - 1
        seconds.sort()
        return cls(done * tokens / passed, statistics.median(seconds), seconds[int(0.95 * len(seconds))])


def simulate(costs: Costs, load: Load, workers: int, limit: int) -> Seen:
    """What clients see."""
    return Seen.of([simulated(costs, load, workers, limit)], load.tokens)


def simulated(costs: Costs, load: Load, workers: int, limit: int, seed: int = 0, drawn: int = 0) -> Spans:
    """Requests go to the workers in turn; a worker steps with all its rows, `limit` at most, and reads new prompts.

    Args:
        seed: of the times of random requests. drawn: seed of the steps of requests.
    """
    draw, turn, order = random.Random(drawn), count(), count()
    waiting: list[deque[float]] = [deque() for _ in range(workers)]
    rows: list[list[tuple[int, float]]] = [[] for _ in range(workers)]  # steps left, when it was asked
    busy, spans = [False] * workers, []
    events: list[tuple[float, int, int]] = []  # when, order, worker; -1: somebody asks
    waits = iter(load.waits(seed))
    left = load.requests

    def ask(now: float) -> None:
        heapq.heappush(events, (now, next(order), -1))

    def step(worker: int, now: float) -> None:
        new = 0
        while waiting[worker] and len(rows[worker]) < limit:
            rows[worker].append((draw.choice(costs.steps), waiting[worker].popleft()))
            new += 1
        busy[worker] = bool(rows[worker])
        if rows[worker]:
            others = sum(busy) > 1
            heapq.heappush(events, (now + costs.step(len(rows[worker]), new, others), next(order), worker))

    for _ in range(load.clients):
        ask(0.0)
    for wait in islice(waits, 1):
        ask(wait)
    while events:
        now, _, worker = heapq.heappop(events)
        if worker < 0:
            if not left:
                continue
            left -= 1
            worker = next(turn) % workers
            waiting[worker].append(now)
            for wait in islice(waits, 1):
                ask(now + wait)
            if not busy[worker]:
                step(worker, now)
            continue
        going = []
        for left_steps, asked in rows[worker]:
            if left_steps > 1:
                going.append((left_steps - 1, asked))
                continue
            spans.append((asked, now + costs.fixed))
            if load.clients:
                ask(now + costs.fixed)
        rows[worker] = going
        step(worker, now)
    return spans


# --- what is measured


def prompt(number: int) -> str:
    return f"Tell me about {number} things that you like, and why."


def steps_of_requests() -> tuple[int, ...]:
    """How many steps requests take: of this engine, alone."""
    from sametoken import LLM, SamplingParams

    llm = LLM("embedded", "embedded-eagle3", SPECULATIVE, max_batch_size=LIMIT)
    prompts = [llm.render_chat([{"role": "user", "content": prompt(number)}]) for number in range(1000, 1100)]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    found = Counter(chunk.index for chunk in llm.stream(prompts, params) if chunk.token_ids)
    return tuple(found.values())


@contextmanager
def dynamo_of(python: str) -> Iterator[Dynamo]:
    """Workers behind Dynamo's frontend."""
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
            found = Dynamo(f"http://127.0.0.1:{first + WORKERS}", [first + each for each in range(WORKERS)])
            found.wait(process)
            yield found
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

    async def spans(self, load: Load, seed: int) -> Spans:
        """What clients see; requests before do not count."""
        numbers = count(1000 * seed)
        async with httpx.AsyncClient(timeout=READY_S, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(self.ask(client, next(numbers), load.tokens) for _ in range(2 * WORKERS)))
            if load.clients:
                left = iter(range(load.requests))

                async def ask_again() -> Spans:
                    return [await self.ask(client, next(numbers), load.tokens) for _ in left]

                found = await asyncio.gather(*(ask_again() for _ in range(load.clients)))
                return [span for each in found for span in each]
            asked = []
            for wait in load.waits(seed):
                await asyncio.sleep(wait)
                asked.append(asyncio.create_task(self.ask(client, next(numbers), load.tokens)))
            return list(await asyncio.gather(*asked))


def mean(runs: Sequence[Spans]) -> float:
    """Seconds of a request."""
    return statistics.fmean(end - begin for spans in runs for begin, end in spans)


def costs_of(runs: dict[int, list[Spans]], steps: tuple[int, ...]) -> Costs:
    """Costs of a step with which loads of so many clients take the seconds that they took; a prompt's share is in them.

    Clients do not divide evenly among workers, so the seconds of a step follow from a simulation of these loads. One
    client keeps one worker busy at a time, which has the whole machine then.
    """
    measured = {clients: mean(each) for clients, each in runs.items()}
    rows = {clients // WORKERS: measured[clients] / statistics.fmean(steps) for clients in MEASURED}
    alone = measured[ALONE] / measured[MEASURED[0]]
    for _ in range(FITS):
        for clients, seconds in measured.items():
            costs = Costs(rows, 0.0, 0.0, steps, alone)
            miss = seconds / mean([simulated(costs, Load(TOKENS, 800, clients=clients), WORKERS, LIMIT)])
            if clients == ALONE:
                alone *= miss
            else:
                rows = rows | {clients // WORKERS: rows[clients // WORKERS] * miss}
    return Costs(rows, 0.0, 0.0, steps, alone)


def predicted(costs: Costs, load: Load, rounds: int) -> Seen:
    """What clients will see who ask at the times of the rounds; steps of requests are drawn several times."""
    if load.clients:
        return Seen.of([simulated(costs, load._replace(requests=4000), WORKERS, LIMIT)], load.tokens)
    seeds = [seed_of(number) for number in range(1, rounds + 1)]
    runs = [simulated(costs, load, WORKERS, LIMIT, seed, drawn) for seed in seeds for drawn in range(DRAWS)]
    return Seen.of(runs, load.tokens)


def seed_of(number: int) -> int:
    """The seed of the loads that are predicted, in a round."""
    return 10 * number + 2


def check(arguments: argparse.Namespace) -> None:
    """Prediction and measurement."""
    steps, asked = steps_of_requests(), arguments.requests
    measured: dict[int, list[Spans]] = {clients: [] for clients in (ALONE, *MEASURED)}
    checked: dict[Load, list[Spans]] = {Load(TOKENS, asked, clients=CLIENTS): []}
    with dynamo_of(arguments.dynamo_python) as dynamo:
        for number in range(arguments.rounds + 1):  # the first warms up
            for clients, runs in measured.items():
                runs.append(asyncio.run(dynamo.spans(Load(TOKENS, asked, clients=clients), 10 * number + 1)))
            for load, runs in [*checked.items()]:
                runs.append(asyncio.run(dynamo.spans(load, seed_of(number))))
            if number == 0:
                (busy,) = checked.values()
                rate = 0.6 * Seen.of(busy, TOKENS).tokens_per_second / TOKENS
                checked[Load(TOKENS, asked, rate=round(rate, 2))] = [[]]
    costs = costs_of({clients: runs[1:] for clients, runs in measured.items()}, steps)
    rows = []
    for load, runs in checked.items():
        seen = Seen.of(runs[1:], TOKENS)
        expected = predicted(costs, load, arguments.rounds)
        rows.append({"load": load._asdict(), "predicted": expected._asdict(), "measured": seen._asdict()})
        print(f"{load.clients} clients" if load.clients else f"{load.rate:.2f} requests/s")
        for name, value, found in zip(Seen._fields, expected, seen, strict=True):
            print(f"  {name:18} predicted {value:8.3f}  measured {found:8.3f}  miss {value / found - 1:+.1%}")
    print("seconds of a step, by rows:", {number: round(each, 5) for number, each in costs.rows.items()})
    print(f"seconds of a step while the other worker is idle / while it is busy: {costs.alone:.2f}")
    record = {"workers": WORKERS, "tokens": TOKENS, "cores": os.cpu_count(), "costs": costs._asdict(), "runs": rows}
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

    draw, lengths = random.Random(0), range(1, verified + 1)
    weights = [1.0] if verified == 1 else [acceptance_of(length, acceptance) for length in lengths]
    steps = tuple(steps_until(ANSWER, lambda: draw.choices(lengths, weights)[0]) for _ in range(500))
    prompt_s = (1 - hits) * PROMPT * 2 * WEIGHTS / (GPUS * FLOPS)
    return Costs({rows: step(rows) for rows in (1, 16, 64, 128, 192, 256)}, prompt_s, 0.03, steps)


def steps_until(tokens: int, advance: Callable[[], int]) -> int:
    """Steps in which a row gets so many tokens."""
    steps = 0
    while tokens > 0:
        tokens, steps = tokens - advance(), steps + 1
    return steps


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

            steps = statistics.fmean(costs.steps)
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
    checked = commands.add_parser("check")
    checked.add_argument("--dynamo-python", required=True, help="Python with sametoken and ai-dynamo")
    checked.add_argument("--rounds", type=int, default=5)
    checked.add_argument("--requests", type=int, default=60, help="of each load in each round")
    checked.add_argument("--out", type=Path)
    planned = commands.add_parser("plan")
    planned.add_argument("--p95", type=float, default=10.0, help="seconds")
    planned.add_argument("--seconds", type=float, default=120.0, help="that are simulated")
    arguments = parser.parse_args()
    {"check": check, "plan": plan}[arguments.command](arguments)


if __name__ == "__main__":
    main()
