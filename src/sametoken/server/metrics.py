"""Prometheus metrics of `metric_table`, under our names and, if vLLM has an equal metric, under vLLM's name too.

Events are counted on the event loop. Counters of speculation are sums over requests, including those that still run,
so that they grow while a long reply streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sametoken import __version__
from sametoken.engine.engine import Engine, EngineLoad
from sametoken.engine.report import StepReport
from sametoken.engine.request import Request
from sametoken.server.errors import QUEUE_FULL
from sametoken.server.metric_table import METRICS, MetricSpec, Reading
from sametoken.server.tally import Snapshot, Tally, Totals

QUEUE_LIMIT = "max_num_queued_reqs"  # vLLM's word for `max_queue`
PREFIX, VLLM = "sametoken_", "vllm:"
ENGINE = {"engine": "0"}  # vLLM numbers its engines; there is one here
FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


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
