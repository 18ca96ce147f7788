"""Traces of requests, as OpenTelemetry's own exporters and a collector's protocol see them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.errors import ConfigError
from sametoken.options.server import ServerConfig
from sametoken.server import run as server_run
from sametoken.server import traces
from server_checks import Running, running, wait_until

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed (extra otel)")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="its exporter is not installed (extra otel)")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ASKED = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CARRIED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}


@pytest.fixture
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target, tiny_pair.draft, {"max_draft_len": 3, "adaptive": False}, max_batch_size=2)


@contextmanager
def traced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(server_run, "exporter_of", lambda endpoint: exporter)
    with running(llm, otlp_traces_endpoint="http://localhost:4318") as server:
        yield server, exporter


def spans(server: Running, exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """What was exported, once so many spans are there."""
    provider = server.server._traces._provider  # type: ignore[union-attr]

    def found() -> bool:
        provider.force_flush()
        return len(exporter.get_finished_spans()) >= count

    wait_until(found)
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_and_its_parts_below(llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with traced(llm, monkeypatch) as (server, exporter):
        begin = time.time_ns()
        server.post("/v1/completions", {**ASKED, "stream": stream}, headers=CARRIED)
        found = spans(server, exporter, 6)
        end = time.time_ns()
    by_name = {span.name: span for span in found}
    assert by_name.keys() == {"POST /v1/completions", "queue", "prefill", "decode", "draft", "verify"}
    whole = by_name.pop("POST /v1/completions")
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int(PARENT, 16)
    assert whole.kind.name == "SERVER"
    assert whole.attributes is not None
    assert whole.attributes["sametoken.request_id"] == "mine"
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.usage.output_tokens"] == 12
    assert whole.attributes["sametoken.spec_decode.draft_tokens"] > 0  # type: ignore[operator]
    times = {name: (span.start_time or 0, span.end_time or 0) for name, span in by_name.items()}
    slack = 1_000_000  # ns: two clocks are read one after the other
    assert begin - slack <= (whole.start_time or 0) < (whole.end_time or 0) <= end + slack
    for name, span in by_name.items():
        assert span.parent is not None
        assert span.parent.span_id == whole.context.span_id, name
        assert (whole.start_time or 0) - slack <= times[name][0] <= times[name][1], name
        assert times[name][1] <= (whole.end_time or 0) + slack, name
    assert times["queue"][1] == times["prefill"][0] == times["draft"][0]
    assert times["prefill"][1] == times["decode"][0]
    assert times["draft"][1] == times["verify"][0]
    assert times["draft"][0] < times["draft"][1] < times["verify"][1] <= times["decode"][1] + slack


def test_choices_refusals_and_probes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(llm, monkeypatch) as (server, exporter):
        server.get("/health")
        server.post("/v1/completions", {"promt": 1})
        server.post("/v1/completions", {**ASKED, "n": 2}, headers={"traceparent": "nonsense"})
        found = spans(server, exporter, 12)
    assert len(found) == 12
    refused, whole = (span for span in found if span.name == "POST /v1/completions")
    assert refused.attributes is not None
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.parent is whole.parent is None
    queued = [dict(span.attributes or {}) for span in found if span.name == "queue"]
    assert [each["sametoken.choice"] for each in queued] == [0, 1]


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector of OTLP over HTTP, and what it was sent."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("path", ["", "/", "/own/path"])
def test_a_collector_gets_what_is_left_when_the_server_ends(llm: LLM, path: str) -> None:
    with collector() as (url, received):
        with running(llm, otlp_traces_endpoint=url + path) as server:
            server.post("/v1/completions", ASKED, headers=CARRIED)
        (sent,) = received
    assert sent[0] == (path if len(path) > 1 else "/v1/traces")
    (resource,) = sent[1].resource_spans
    service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
    assert service == "sametoken"
    exported = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in exported} == {TRACE}
    assert len(exported) == 6


@pytest.mark.thorough
def test_a_collector_that_is_away_harms_nobody(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    with running(llm, otlp_traces_endpoint="http://127.0.0.1:9") as server:
        assert server.post("/v1/completions", ASKED).status_code == 200
        begin = time.monotonic()
    assert time.monotonic() - begin < 20


def test_without_an_endpoint_there_are_no_traces(llm: LLM) -> None:
    with running(llm) as server:
        assert server.server._traces is None


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"is not installed: pip install 'sametoken\[otel\]'"):
        traces.exporter_of("http://localhost:4318")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_endpoint_of_another_protocol_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected an http:// or https:// URL of OTLP over HTTP"):
        ServerConfig(otlp_traces_endpoint=endpoint)
