"""Load of OpenAI-compatible servers: closed (constant concurrency) or open (Poisson arrivals), with a baseline."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sametoken.bench.client import NO_USAGE, TimedAnswer, ask
from sametoken.bench.measure import per_token, ratio_interval, spread
from sametoken.bench.record import Load
from sametoken.bench.workloads import Workload
from sametoken.client.client import Client
from sametoken.errors import SametokenError
from sametoken.interrupt import cancel_at_signals
from sametoken.prompts.files import PromptItem
from sametoken.prompts.sources import Conversation

Kind = Literal["closed", "open"]
Side = Literal["server", "baseline"]
WARM_UP = 2
NOTES = (
    "tokens are the servers' usage.completion_tokens, never chunks; failed requests are in no figure but failures",
    "rounds of server and baseline alternate; arrivals of an open load are the same for both",
    "speed-ups are geometric means over the rounds of baseline / server: seconds per output token for closed loads, "
    "mean latency for open ones; their 95 % interval is Student's t interval of the logarithms",
)


class Target(NamedTuple):
    """URLs of the measured servers, and their API key."""

    urls: dict[Side, str]
    api_key: str | None

    @classmethod
    def of(cls, url: str, baseline_url: str | None, api_key: str | None) -> Target:
        urls: dict[Side, str] = {"server": url}
        if baseline_url is not None:
            urls["baseline"] = baseline_url
        return cls(urls, api_key)


@dataclass(frozen=True, slots=True)
class Visit:
    """Loads and requests of a measurement.

    Attributes:
        target: servers.
        model: name of the model; None selects the first model that a server lists.
        closed: concurrencies of closed loads.
        rates: requests per second of open loads.
        temperatures: temperatures of sampling.
        requests: requests per load and round; None for one per prompt, and at least two per connection.
        output_len: greatest number of output tokens.
        repeat: number of rounds.
        seed: seed of the first request; each further request has the next one.
        timeout: seconds without a byte after which a request fails.
        ignore_eos: generate `output_len` tokens even after an end token.
        continuous_usage: request token counts in every chunk.
    """

    target: Target
    model: str | None
    closed: Sequence[int]
    rates: Sequence[float]
    temperatures: Sequence[float]
    requests: int | None
    output_len: int
    repeat: int
    seed: int
    timeout: float
    ignore_eos: bool
    continuous_usage: bool

    @property
    def levels(self) -> list[tuple[Kind, float]]:
        return [*(("closed", float(c)) for c in self.closed), *(("open", rate) for rate in self.rates)]

    def takes(self, workloads: int) -> int:
        """Number of rounds in all, the unit of progress."""
        return workloads * len(self.temperatures) * len(self.levels) * self.repeat * len(self.target.urls)


class Round(NamedTuple):
    """One run of all requests of a load, with its wall time."""

    answers: list[TimedAnswer]
    seconds: float

    @property
    def good(self) -> list[TimedAnswer]:
        return [answer for answer in self.answers if answer.failure is None]


def measure_loads(
    visit: Visit, workloads: Sequence[Workload], advance: Callable[[str], None]
) -> tuple[list[Load], bool]:
    """Measure all loads on all servers until SIGINT or SIGTERM.

    Args:
        visit: loads and requests.
        workloads: prompts.
        advance: function to call after every round with a description of it.

    Returns:
        Loads of complete rounds, and True if a signal ended the run.

    Raises:
        SametokenError: a server cannot be reached or counts no tokens, or all requests of a load failed.
    """
    loads: list[Load] = []
    return loads, asyncio.run(_measure(visit, workloads, advance, loads))


async def _measure(
    visit: Visit, workloads: Sequence[Workload], advance: Callable[[str], None], loads: list[Load]
) -> bool:
    with cancel_at_signals() as stop:
        try:
            await _measure_all(visit, workloads, advance, loads)
        except asyncio.CancelledError:
            if not stop:
                raise
    return bool(stop)


async def _measure_all(
    visit: Visit, workloads: Sequence[Workload], advance: Callable[[str], None], loads: list[Load]
) -> None:
    async with AsyncExitStack() as stack:
        clients: dict[Side, tuple[Client, str]] = {}
        for side, url in visit.target.urls.items():
            client = await stack.enter_async_context(Client(url, visit.target.api_key, visit.timeout))
            clients[side] = client, visit.model or await client.first_model()
        for workload in workloads:
            for temperature in visit.temperatures:
                for kind, level in visit.levels:
                    place = _Place(visit, workload, temperature, kind, level)
                    await place.measure(clients, advance, loads)


@dataclass(frozen=True, slots=True)
class _Place:
    """One load with one workload."""

    visit: Visit
    workload: Workload
    temperature: float
    kind: Kind
    level: float

    @property
    def count(self) -> int:
        fewest = 2 * int(self.level) if self.kind == "closed" else 1
        return self.visit.requests or max(len(self.workload.items), fewest)

    async def measure(
        self, clients: dict[Side, tuple[Client, str]], advance: Callable[[str], None], loads: list[Load]
    ) -> None:
        """Measure both sides in alternating order, and add the load of each from complete rounds."""
        for client, model in clients.values():
            await asyncio.gather(*(self._ask(client, model, i, time.perf_counter()) for i in range(WARM_UP)))
        rounds: dict[Side, list[Round]] = {side: [] for side in clients}
        try:
            for number in range(self.visit.repeat):
                for side in list(clients)[:: 1 if number % 2 else -1]:
                    taken = await self._round(*clients[side], number)
                    self._check(side, taken)
                    rounds[side].append(taken)
                    advance(f"{side}, {self.workload.name}, {self.kind} {self.level:g}, round {number + 1}")
        finally:
            if whole := min(map(len, rounds.values())):
                kept = {side: own[:whole] for side, own in rounds.items()}
                loads += [self._load(side, kept) for side in clients]

    async def _round(self, client: Client, model: str, number: int) -> Round:
        begin = time.perf_counter()
        if self.kind == "open":
            clock = random.Random(f"{self.visit.seed} {number}")
            due, at = [], begin
            for _ in range(self.count):
                at += clock.expovariate(self.level)
                due.append(at)
            answers = await asyncio.gather(*(self._ask(client, model, i, when) for i, when in enumerate(due)))
            return Round(list(answers), time.perf_counter() - begin)
        found: dict[int, TimedAnswer] = {}
        numbers = iter(range(self.count))

        async def worker() -> None:
            for i in numbers:
                found[i] = await self._ask(client, model, i, time.perf_counter())

        await asyncio.gather(*(worker() for _ in range(int(self.level))))
        return Round([found[i] for i in range(self.count)], time.perf_counter() - begin)

    async def _ask(self, client: Client, model: str, number: int, due: float) -> TimedAnswer:
        item = self.workload.items[number % len(self.workload.items)]
        path, body = self._request(item, model, number)
        return await ask(client, path, body, due)

    def _request(self, item: PromptItem, model: str, number: int) -> tuple[str, dict[str, Any]]:
        visit = self.visit
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": visit.output_len,
            "temperature": self.temperature,
            "seed": visit.seed + number,
            "stream_options": {"include_usage": True},
        }
        # Extensions are sent on request only: a strict server refuses unknown fields.
        if visit.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
        if visit.ignore_eos:
            body["ignore_eos"] = True
        if isinstance(item.source, Conversation):
            return "chat/completions", {**body, "messages": list(item.source.messages)}
        return "completions", {**body, "prompt": item.source}

    def _check(self, side: Side, taken: Round) -> None:
        url = self.visit.target.urls[side]
        reasons = Counter(answer.failure for answer in taken.answers if answer.failure is not None)
        if NO_USAGE in reasons and not taken.good:
            raise SametokenError(
                f"{url} sends no usage in spite of stream_options.include_usage: tokens cannot be counted "
                "(chunks are not tokens); expected a server, or a proxy before it, that passes usage on"
            )
        if not taken.good:
            reason, count = reasons.most_common(1)[0]
            raise SametokenError(f"{url}: all {len(taken.answers)} requests failed, {count} with: {reason}")

    def _load(self, side: Side, rounds: dict[Side, list[Round]]) -> Load:
        own = rounds[side]
        good = [answer for taken in own for answer in taken.good]
        tokens, seconds = sum(answer.tokens or 0 for answer in good), sum(taken.seconds for taken in own)
        emitted = [answer.emissions() for answer in good]
        gaps = [gap for emissions in emitted for gap in per_token(emissions)]
        means = [mean for emissions in emitted if (mean := _mean_gap(emissions)) is not None]
        compared = side == "server" and "baseline" in rounds
        pairs = list(zip(rounds["baseline"], own, strict=True)) if compared else []
        return Load(
            workload=self.workload.name,
            side=side,
            kind=self.kind,
            level=self.level,
            temperature=self.temperature,
            requests=self.count,
            failures=dict(Counter(a.failure for taken in own for a in taken.answers if a.failure is not None)),
            round_s=[taken.seconds for taken in own],
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            latency_s=spread([answer.latency for answer in good]),
            ttft_s=spread([answer.ttft for answer in good]),
            per_token_s=spread(means) if means else None,
            inter_token_s=spread(gaps) if gaps else None,
            inter_token_basis="measured" if all(answer.counted for answer in good) else "estimated",
            speed_up=ratio_interval([self._cost(a) / self._cost(b) for a, b in pairs]) if pairs else None,
            equal_texts=_equal(pairs) if pairs else None,
        )

    def _cost(self, taken: Round) -> float:
        """Seconds per token of a closed load; mean latency of an open one, whose token rate follows from arrivals."""
        if self.kind == "closed":
            return taken.seconds / sum(answer.tokens or 0 for answer in taken.good)
        return sum(answer.latency for answer in taken.good) / len(taken.good)


def _mean_gap(emissions: Sequence[tuple[float, int]]) -> float | None:
    """Mean seconds per token after the first emission; None if there is only one."""
    after = sum(count for _, count in emissions[1:])
    return (emissions[-1][0] - emissions[0][0]) / after if after else None


def _equal(pairs: Sequence[tuple[Round, Round]]) -> float:
    """Share of the requests that succeeded on both sides whose texts are equal."""
    both = [
        a.text == b.text
        for plain, fast in pairs
        for a, b in zip(plain.answers, fast.answers, strict=True)
        if a.failure is None and b.failure is None
    ]
    return sum(both) / len(both) if both else 0.0
