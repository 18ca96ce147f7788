"""Traces for OpenTelemetry: a span per request, with child spans queue, prefill, decode, draft and verify per sequence.

Spans are made when a request is complete, from times that the engine records in any case. Only this module imports
opentelemetry, and only if an endpoint for traces is configured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from sametoken.errors import ConfigError
from sametoken.server.exchange import Exchange

if TYPE_CHECKING:
    from sametoken.engine.request import Request

DEFAULT_PATH = "/v1/traces"  # path of a collector whose endpoint has none


class Interval(NamedTuple):
    """Part of a request, with times in seconds of `time.perf_counter`."""

    name: str
    begin: float
    end: float


class Traces:
    """Recorder of exchanges that exports a trace of each.

    Args:
        exporter: an OpenTelemetry `SpanExporter`.
        model: served name of the model.
    """

    def __init__(self, exporter: Any, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "sametoken"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer, self._model = self._provider.get_tracer("sametoken"), model
        self._propagator, self._trace = TraceContextTextMapPropagator(), trace

    def record(self, exchange: Exchange) -> None:
        """Make the spans of a complete exchange, in the trace that its `traceparent` names."""
        trace, now = self._trace, time.perf_counter()
        epoch = time.time_ns() - int(now * 1e9)  # Unix time of the clock's zero, in nanoseconds

        def moment(seconds: float) -> int:
            return epoch + int(seconds * 1e9)

        carried = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers}
        span = self._tracer.start_span(
            f"{exchange.method} {exchange.path}",
            self._propagator.extract(carried),
            trace.SpanKind.SERVER,
            {**_of_exchange(exchange), "gen_ai.request.model": self._model},
            start_time=moment(exchange.began),
        )
        within = trace.set_span_in_context(span)
        for request in exchange.sequences:
            about = {"sametoken.prompt": request.index, "sametoken.choice": request.choice}
            for name, begin, end in intervals(request, now):
                child = self._tracer.start_span(name, within, attributes=about, start_time=moment(begin))
                child.end(moment(end))
        if exchange.status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.end(moment(exchange.ended))

    def close(self) -> None:
        """Export the remaining spans; later exchanges are not recorded."""
        self._provider.shutdown()


def intervals(request: Request, now: float) -> Iterator[Interval]:
    """Parts of a sequence, as far as it was computed.

    `draft` and `verify` are sums over all steps of the sequence; they follow each other from its place in the batch on.
    """
    end = request.finished or now
    yield Interval("queue", request.arrived, request.seated or end)
    if request.seated is not None:
        first, stats = request.first_token or end, request.stats
        yield Interval("prefill", request.seated, first)
        if request.first_token is not None:
            yield Interval("decode", first, end)
        drafted = request.seated + stats.draft_s
        yield Interval("draft", request.seated, drafted)
        yield Interval("verify", drafted, drafted + stats.verify_s)


def _of_exchange(exchange: Exchange) -> dict[str, Any]:
    """Attributes of a request's span, under OpenTelemetry's names if there are such."""
    about: dict[str, Any] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status,
        "sametoken.request_id": exchange.id,
    }
    if exchange.sequences:
        requests, params = exchange.sequences, exchange.sequences[0].params
        stats = [request.stats for request in requests]
        about |= {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": sum(len(each.prompt_ids) for each in requests if each.choice == 0),
            "gen_ai.usage.output_tokens": sum(len(each.tokens) - len(each.prompt_ids) for each in requests),
            "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in requests],
            "sametoken.spec_decode.draft_tokens": sum(each.drafted for each in stats),
            "sametoken.spec_decode.accepted_tokens": sum(each.accepted for each in stats),
            "sametoken.spec_decode.target_forwards": sum(each.target_forwards for each in stats),
        }
        if params.max_tokens is not None:
            about["gen_ai.request.max_tokens"] = params.max_tokens
    return about


def exporter_of(endpoint: str) -> Any:
    """Make an exporter to a collector over HTTP.

    Args:
        endpoint: URL of the collector; the default path is `DEFAULT_PATH`.

    Raises:
        ConfigError: opentelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed: pip install 'sametoken[otel]'"
        ) from None
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + DEFAULT_PATH
    return OTLPSpanExporter(endpoint=endpoint)
