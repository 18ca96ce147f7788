"""Prometheus metrics, under our names and, if vLLM has an equal metric, under vLLM's name too.

Events are counted on the event loop. Counters of speculation are sums over requests, including those that still run,
so that they grow while a long reply streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sametoken import __version__
from sametoken.control.confidence import BINS
from sametoken.engine.engine import Engine, EngineLoad
from sametoken.engine.report import StepReport
from sametoken.engine.request import Request
from sametoken.engine.stats import SpeculationStats
from sametoken.server.errors import QUEUE_FULL
from sametoken.server.tally import Snapshot, Tally, Totals

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
PER_TOKEN = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)
SAME, OURS = "same", ""


Key = str | tuple[str, ...]  # the value of the only label, or of each
Reading = float | Mapping[str, float] | Mapping[Key, float] | Tally  # a number, one for each key, or a histogram
QUEUE_LIMIT = "max_num_queued_reqs"  # vLLM's word for `max_queue`
PREFIX, VLLM = "sametoken_", "vllm:"
ENGINE = {"engine": "0"}  # vLLM numbers its engines; there is one here
FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class MetricSpec(NamedTuple):
    """One metric.

    Attributes:
        kind: counter, gauge or histogram.
        name: name without prefix, and without the `_total` that Prometheus adds to counters.
        vllm: vLLM's name of the quantity, without prefix: `SAME`, another name, or `OURS` if vLLM does not have it.
        purpose: description of the metric.
        labels: names of labels in addition to `model_name`.
        buckets: upper ends of the buckets of a histogram to which the server adds each observation.
        read: function that reads the value at a scrape; None if the server counts events as they occur.
    """

    kind: str
    name: str
    vllm: str
    purpose: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()
    read: Callable[[Snapshot], Reading] | None = None

    @property
    def vllm_name(self) -> str:
        """vLLM's name without its prefix, or ""."""
        return self.name if self.vllm == SAME else self.vllm


def _reached(lengths: Sequence[int], positions: int) -> dict[str, float]:
    """Number of drafts longer than each position, counted from 0; `lengths[n]` drafts have length n."""
    return {str(position): sum(lengths[position + 1 :]) for position in range(positions)}


def _positions(stats: SpeculationStats) -> int:
    return len(stats.drafted_lengths) - 1


def _by_chance(stats: SpeculationStats, of: str) -> dict[Key, float]:
    """Counts of one field of `Reliability`, by drafter and upper end of the bin."""
    found = {drafter: getattr(seen, of) for drafter, seen in list(stats.reliability.items())}
    return {(drafter, f"{(i + 1) / BINS:g}"): n for drafter, counts in found.items() for i, n in enumerate(counts)}


def _acceptance_length(stats: SpeculationStats) -> Tally:
    """Histogram of tokens emitted per forward; `emitted_lengths[n]` forwards emitted n tokens."""
    first, *longer = stats.emitted_lengths[1:] or [0]
    total = sum(length * count for length, count in enumerate(stats.emitted_lengths))
    counts = [sum(stats.emitted_lengths[:1]) + first, *longer, 0]
    return Tally(range(1, len(counts)), counts, total)


counter, gauge, histogram = (partial(MetricSpec, kind) for kind in ("counter", "gauge", "histogram"))
# fmt: off
METRICS: tuple[MetricSpec, ...] = (
    gauge("info", OURS, "Always 1; the labels name the model and the version.", ("model", "version")),
    # The engine now.
    gauge("num_requests_running", SAME, "Sequences in the batch.", read=lambda now: now.load.running),
    gauge("num_requests_waiting", SAME, "Sequences that wait for a place in the batch.",
        read=lambda now: now.load.waiting),
    gauge("num_requests_waiting_by_reason", SAME, "Waiting sequences by reason, which is always `capacity` here.",
        ("reason",), read=lambda now: {"capacity": now.load.waiting, "deferred": 0}),
    gauge("cache_config_info", SAME, "Always 1; the labels describe the KV cache.",
        ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "enable_prefix_caching")),
    histogram("iteration_tokens_total", SAME, "Tokens of a step: of prompts that were read, and generated.",
        buckets=TOKENS),
    gauge("kv_cache_usage_perc", SAME, "Used share of the cache's pages, 0 to 1.",
        read=lambda now: now.load.pages_used / max(1, now.load.pages)),
    gauge("suffix_store_bytes", OURS, "Estimated memory of finished outputs that suffix lookup searches, in bytes.",
        read=lambda now: now.load.remembered),
    counter("num_preemptions", SAME, "Times that a sequence lost its place in the batch because the cache was full.",
        read=lambda now: now.load.preemptions),
    histogram("request_num_preemptions", SAME, "Preemptions of a sequence that ended.", buckets=CHOICES),
    counter("engine_step_seconds", OURS,
        "Seconds of the engine's steps: for drafts, for the target, for the rest.",
        ("part",),
        read=lambda now: {"draft": now.load.draft_s, "verify": now.load.verify_s, "other": now.load.other_s}),
    # Tokens.
    counter("prompt_tokens", SAME, "Prompt tokens of accepted requests.", read=lambda now: now.totals.prompt_tokens),
    counter("prefix_cache_queries", SAME, "Prompt tokens that were looked up in the cache.",
        read=lambda now: now.totals.prompt_tokens),
    counter("prefix_cache_hits", SAME, "Prompt tokens that were found in the cache.",
        read=lambda now: now.totals.cached_tokens),
    counter("generation_tokens", SAME, "Tokens generated.", read=lambda now: now.totals.generated),
    histogram("request_prompt_tokens", SAME, "Prompt tokens of a sequence that ended.", buckets=TOKENS),
    histogram("request_generation_tokens", SAME, "Tokens generated for a sequence that ended.", buckets=TOKENS),
    histogram("request_max_num_generation_tokens", SAME,
        "Tokens of the longest choice of a prompt that ended.", buckets=TOKENS),
    histogram("request_params_n", SAME, "`n` of a prompt that ended: its number of choices.", buckets=CHOICES),
    histogram("request_params_max_tokens", SAME, "`max_tokens` of a sequence that ended.", buckets=TOKENS),
    # Times.
    histogram("time_to_first_token_seconds", SAME, "From arrival to the first token.", buckets=SECONDS),
    histogram("request_queue_time_seconds", SAME, "From arrival to a place in the batch.", buckets=SECONDS),
    histogram("request_prefill_time_seconds", SAME, "From a place in the batch to the first token.", buckets=SECONDS),
    histogram("request_decode_time_seconds", SAME, "From the first token to the last.", buckets=SECONDS),
    histogram("request_inference_time_seconds", SAME, "From a place in the batch to the last token.", buckets=SECONDS),
    histogram("e2e_request_latency_seconds", SAME, "From arrival to the last token.", buckets=SECONDS),
    histogram("request_time_per_output_token_seconds", SAME,
        "Of a sequence that ended: decode time / number of tokens after the first.", buckets=PER_TOKEN),
    histogram("inter_token_latency_seconds", OURS,
        "Time between two outputs of a sequence / number of tokens of the later one, once per token.",
        buckets=PER_TOKEN),
    histogram("inter_output_latency_seconds", "inter_token_latency_seconds",
        "Time between two outputs of a sequence, however many tokens they have.", buckets=PER_TOKEN),
    # Ends.
    counter("request_success", SAME, "Sequences that ended, by reason.", ("finished_reason",)),
    counter("admission_rejections", SAME, "Requests that were refused because the queue was full, by its limit.",
        ("reason",)),
    counter("request_errors", OURS, "Requests answered with an error, by status and code.", ("status", "code")),
    # Speculation.
    gauge("spec_decode_draft_len", OURS, "Longest draft that the last step allowed, in tokens; 0 means no drafting.",
        read=lambda now: now.load.draft_len),
    counter("spec_decode_num_drafts", SAME, "Forwards with a draft.", read=lambda now: now.totals.speculation.drafts),
    counter("spec_decode_num_draft_tokens", SAME, "Draft tokens proposed.",
        read=lambda now: now.totals.speculation.drafted),
    counter("spec_decode_num_accepted_tokens", SAME, "Draft tokens that were accepted.",
        read=lambda now: now.totals.speculation.accepted),
    counter("spec_decode_num_draft_tokens_per_pos", OURS, "Forwards whose draft reached this position.",
        ("position",),
        read=lambda now: _reached(now.totals.speculation.drafted_lengths, _positions(now.totals.speculation))),
    counter("spec_decode_num_accepted_tokens_per_pos", SAME,
        "Forwards whose guess at this position was accepted; the first guess is position 0.", ("position",),
        read=lambda now: _reached(now.totals.speculation.accepted_lengths, _positions(now.totals.speculation))),
    counter("spec_decode_drafted_by", OURS, "Forwards with a draft, by drafter.", ("method",),
        read=lambda now: now.totals.speculation.drafted_by),
    counter("spec_decode_plain_forwards", OURS, "Forwards without a draft although one was allowed, by reason.",
        ("reason",), read=lambda now: now.totals.speculation.plain),
    gauge("spec_decode_paused", OURS,
        "1 while almost none of the last forwards had a draft although one was allowed, by reason.", ("reason",),
        read=lambda now: {"gain": float(now.load.paused == "gain")}),
    counter("spec_decode_guesses_by_chance", OURS,
        "Guesses whose earlier guesses were all accepted, by drafter and expected chance, the upper bound of a bin of "
        "0.1.",
        ("method", "chance"), read=lambda now: _by_chance(now.totals.speculation, "tried")),
    counter("spec_decode_guesses_expected_by_chance", OURS,
        "The sum of the chances that were expected of these guesses.", ("method", "chance"),
        read=lambda now: _by_chance(now.totals.speculation, "expected")),
    counter("spec_decode_guesses_accepted_by_chance", OURS, "Of these guesses, those that were accepted.",
        ("method", "chance"), read=lambda now: _by_chance(now.totals.speculation, "accepted")),
    histogram("spec_decode_acceptance_length", OURS, "Tokens emitted per forward of the target; also without a draft.",
        read=lambda now: _acceptance_length(now.totals.speculation)),
)
# fmt: on


class Watched(Protocol):
    """Source of the values that are read at each Prometheus scrape."""

    def totals(self) -> Totals: ...

    def load(self) -> EngineLoad: ...


class Metrics(Collector):
    """Metrics of one server, in a registry of their own.

    Args:
        model: served name of the model.
    """

    def __init__(self, model: str) -> None:
        self._label = {"model_name": model}
        self._watched: Watched | None = None
        self._tallies = {spec.name: Tally(spec.buckets) for spec in METRICS if spec.buckets}
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            spec.name: Counter() for spec in METRICS if spec.labels and spec.read is None
        }
        self._counts["info"][model, __version__] = 1
        self._counts["admission_rejections"][QUEUE_LIMIT,] = 0
        self._gap, self._pause = (
            self._tallies[name] for name in ("inter_token_latency_seconds", "inter_output_latency_seconds")
        )
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def watch(self, watched: Watched) -> None:
        """Set the source of the values that are read at each Prometheus scrape."""
        self._watched = watched

    def watch_engine(self, engine: Engine, longest: int) -> None:
        """Count the steps of an engine, whose sequences have at most `longest` tokens.

        Steps are counted on the engine's own thread, which alone adds to their histogram.
        """
        blocks = engine.scheduler.blocks
        tokens = (blocks.pages - 1) * blocks.page_size
        facts = (blocks.page_size, blocks.pages - 1, tokens, f"{tokens / longest:.2f}", blocks.reuse)
        self._counts["cache_config_info"][tuple(map(str, facts))] = 1
        engine.reports.append(self._saw_step)

    def _saw_step(self, report: StepReport) -> None:
        read = sum(len(piece.tokens) for piece in report.plan.prefill)
        tokens = read + sum(len(emission.token_ids) for emission in report.emissions)
        if tokens:
            self._add("iteration_tokens_total", tokens)

    def saw_emission(self, seconds: float, tokens: int) -> None:
        """Count an emission of a sequence: `tokens` tokens, `seconds` after its previous emission."""
        self._gap.add(seconds / tokens, tokens)
        self._pause.add(seconds)

    def saw_first(self, request: Request) -> None:
        """Count the first emission of a sequence."""
        if request.first_token is not None and request.seated is not None:
            self._add("time_to_first_token_seconds", request.first_token - request.arrived)
            self._add("request_queue_time_seconds", request.seated - request.arrived)

    def saw_end(self, requests: Sequence[Request]) -> None:
        """Count the sequences of a job that ended; a sequence without a finish reason counts as abort."""
        longest: dict[int, int] = {}
        for request in requests:
            tokens = len(request.tokens) - len(request.prompt_ids)
            longest[request.index] = max(tokens, longest.get(request.index, 0))
            self._counts["request_success"][request.finish_reason or "abort",] += 1
            self._add("request_prompt_tokens", len(request.prompt_ids))
            self._add("request_generation_tokens", tokens)
            self._add("request_num_preemptions", request.preemptions)
            if request.params.max_tokens is not None:
                self._add("request_params_max_tokens", request.params.max_tokens)
            self._times(request, tokens)
        for most in longest.values():
            self._add("request_max_num_generation_tokens", most)
            self._add("request_params_n", requests[0].params.n)

    def _times(self, request: Request, tokens: int) -> None:
        """Add the times of a sequence that ended, in seconds; no prefill or decode time without a first token."""
        if request.finished is None:
            return
        self._add("e2e_request_latency_seconds", request.finished - request.arrived)
        if request.seated is None or request.first_token is None:
            return
        self._add("request_prefill_time_seconds", request.first_token - request.seated)
        self._add("request_decode_time_seconds", request.finished - request.first_token)
        self._add("request_inference_time_seconds", request.finished - request.seated)
        if tokens > 1:
            each = (request.finished - request.first_token) / (tokens - 1)
            self._add("request_time_per_output_token_seconds", each)

    def seconds(self, name: str) -> float:
        """Sum of the observations of a histogram, in seconds."""
        return self._tallies[name].total

    def _add(self, name: str, value: float) -> None:
        self._tallies[name].add(value)

    def saw_error(self, status: int, code: str | None) -> None:
        """Count a request that was answered with an error."""
        self._counts["request_errors"][str(status), code or ""] += 1
        self._counts["admission_rejections"][QUEUE_LIMIT,] += code == QUEUE_FULL

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric under our name and under vLLM's."""
        now = Snapshot(self._watched.totals(), self._watched.load()) if self._watched else None
        found: Reading | Mapping[tuple[str, ...], int]
        for spec in METRICS:
            if spec.read is None:
                found = self._tallies[spec.name] if spec.buckets else self._counts[spec.name]
            elif now is not None:
                found = spec.read(now)
            else:
                continue
            yield _family(PREFIX + spec.name, spec, self._label, found)
            if spec.vllm_name:
                yield _family(VLLM + spec.vllm_name, spec, ENGINE | self._label, found)

    def describe(self) -> Iterable[Metric]:
        """No metrics, so that registration does not call `collect` before the engine runs."""
        return ()


def _family(
    name: str, spec: MetricSpec, fixed: Mapping[str, str], found: Reading | Mapping[tuple[str, ...], int]
) -> Metric:
    """Metric as an object of Prometheus' client.

    Args:
        name: name with prefix.
        fixed: labels of every sample, with their values.
        found: one value, or a value for each combination of the metric's own labels.
    """
    labels = [*fixed, *spec.labels]
    if isinstance(found, Tally):
        histogram = HistogramMetricFamily(name, spec.purpose, labels=labels)
        histogram.add_metric([*fixed.values()], found.buckets(), sum_value=found.total)
        return histogram
    family = FAMILIES[spec.kind](name, spec.purpose, labels=labels)
    values = found if isinstance(found, Mapping) else {(): found}
    for key, value in sorted(values.items()):
        own = (key,) if isinstance(key, str) else key
        family.add_metric([*fixed.values(), *own], value)
    return family
