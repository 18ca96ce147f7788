"""What Prometheus is told, under vLLM's names with the prefix `sametoken_`.

Counters of speculation are sums over requests, those that still run included, so they move while a long answer streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Counts
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sametoken import __version__
from sametoken.engine.engine import EngineLoad
from sametoken.engine.request import Request, SpeculationStats

PREFIX = "sametoken_"
SPEC = f"{PREFIX}spec_decode_"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
PER_TOKEN = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Totals(NamedTuple):
    """What all requests so far have cost and gained.

    Attributes:
        speculation: of every forward. `prompt_tokens`, `cached_tokens`, `generated`: tokens.
    """

    speculation: SpeculationStats
    prompt_tokens: int
    cached_tokens: int
    generated: int


class Watched(Protocol):
    """What is asked when Prometheus looks."""

    def totals(self) -> Totals: ...

    def load(self) -> EngineLoad: ...


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        model: the served name.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        about = Gauge(f"{PREFIX}info", "1; what is served.", ["model", "version"], registry=self.registry)
        about.labels(model, __version__).set(1)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to a place in the batch.", SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self._gap = self._histogram(
            "inter_token_latency_seconds",
            "Time between two emissions of a sequence over the tokens of the later one, once per token.",
            PER_TOKEN,
        )
        self._ended = self._counts("request_success", "Sequences that ended, by reason.", "finished_reason")
        self._errors = self._counts(
            "request_errors", "Requests answered with an error, by status and code.", "status", "code"
        )

    def _histogram(self, name: str, purpose: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, purpose, buckets=buckets, registry=self.registry)

    def _counts(self, name: str, purpose: str, *labels: str) -> Counts:
        return Counts(PREFIX + name, purpose, labels, registry=self.registry)

    def watch(self, watched: Watched) -> None:
        """Asks this whenever Prometheus looks."""
        self.registry.register(_Live(watched))

    def saw_emission(self, seconds: float, tokens: int) -> None:
        """A sequence emitted tokens so long after its emission before."""
        for _ in range(tokens):
            self._gap.observe(seconds / tokens)

    def saw_first(self, request: Request) -> None:
        """A sequence emitted for the first time."""
        if request.first_token is not None and request.seated is not None:
            self._ttft.observe(request.first_token - request.arrived)
            self._queued.observe(request.seated - request.arrived)

    def saw_end(self, request: Request) -> None:
        """A sequence ended; one that is left by its caller has no reason of its own and counts as abort."""
        self._ended.labels(request.finish_reason or "abort").inc()
        if request.finished is not None:
            self._whole.observe(request.finished - request.arrived)

    def saw_error(self, status: int, code: str | None) -> None:
        self._errors.labels(str(status), code or "").inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)


class _Live(Collector):
    """Metrics that are looked up, not counted along."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        totals, load = self._watched.totals(), self._watched.load()
        yield from _gauges(load)
        yield from _tokens(totals)
        yield from _speculation(totals.speculation)
        yield _labelled(
            f"{PREFIX}engine_step_seconds",
            "Time of the engine's steps: on drafts, on the target, on the rest. draft / all is the drafter's share.",
            "part",
            {"draft": load.draft_s, "verify": load.verify_s, "other": load.other_s},
        )

    def describe(self) -> Iterable[Metric]:
        """Nothing: it need not be asked before the engine runs."""
        return ()


def _gauges(load: EngineLoad) -> Iterator[Metric]:
    yield GaugeMetricFamily(f"{PREFIX}num_requests_running", "Sequences in the batch.", load.running)
    yield GaugeMetricFamily(f"{PREFIX}num_requests_waiting", "Sequences that wait for a place.", load.waiting)
    used = load.pages_used / max(1, load.pages)
    yield GaugeMetricFamily(f"{PREFIX}kv_cache_usage_perc", "Used share of the cache's pages, 0 to 1.", used)
    yield GaugeMetricFamily(
        f"{SPEC}draft_len", "Longest draft that the last step allowed, in tokens; 0 is off.", load.draft_len
    )


def _tokens(totals: Totals) -> Iterator[Metric]:
    for name, purpose, value in (
        ("prompt_tokens", "Prompt tokens of requests taken.", totals.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens that lay in the cache already.", totals.cached_tokens),
        ("generation_tokens", "Tokens generated.", totals.generated),
    ):
        yield CounterMetricFamily(PREFIX + name, purpose, value)


def _speculation(stats: SpeculationStats) -> Iterator[Metric]:
    for name, purpose, value in (
        ("num_drafts", "Forwards with a draft.", stats.drafts),
        ("num_draft_tokens", "Draft tokens proposed.", stats.drafted),
        ("num_accepted_tokens", "Draft tokens that became output.", stats.accepted),
    ):
        yield CounterMetricFamily(SPEC + name, purpose, value)
    positions = len(stats.drafted_lengths) - 1
    for name, purpose, lengths in (
        ("num_draft_tokens", "Forwards whose draft reached this position.", stats.drafted_lengths),
        (
            "num_accepted_tokens",
            "Forwards whose draft was accepted at least this far; the first guess is position 0.",
            stats.accepted_lengths,
        ),
    ):
        yield _by_position(name, purpose, lengths, positions)
    yield _labelled(f"{SPEC}drafted_by", "Forwards with a draft, by who made it.", "method", stats.drafted_by)
    yield _labelled(
        f"{SPEC}plain_forwards", "Forwards without a draft though it was allowed, by reason.", "reason", stats.plain
    )
    yield _acceptance_length(stats.emitted_lengths)


def _by_position(name: str, purpose: str, lengths: Sequence[int], positions: int) -> Metric:
    """How many came at least so far; `lengths[n]` of them came n far. A position that none reached is said to be 0."""
    reached = {str(position): sum(lengths[position + 1 :]) for position in range(positions)}
    return _labelled(f"{SPEC}{name}_per_pos", purpose, "position", reached)


def _labelled(name: str, purpose: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = CounterMetricFamily(name, purpose, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _acceptance_length(lengths: Sequence[int]) -> Metric:
    """Histogram of the tokens that a forward emitted, bonus included; `lengths[n]` of them emitted n."""
    counts = Counter(dict(enumerate(lengths)))
    most = max(counts, default=1)
    buckets = [(str(float(upto)), float(sum(counts[n] for n in range(1, upto + 1)))) for upto in range(1, most + 1)]
    total = float(sum(counts.values()))
    value = float(sum(length * count for length, count in counts.items()))
    family = HistogramMetricFamily(f"{SPEC}acceptance_length", "Tokens emitted per forward of the target.")
    family.add_metric([], [*buckets, ("+Inf", total)], sum_value=value)
    return family
