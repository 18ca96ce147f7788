"""Metrics of llama-server, under its names, for its dashboards."""

from __future__ import annotations

from collections.abc import Iterator

from sametoken.server.worker import Worker

LLAMACPP = "llamacpp:"


def metrics_text(worker: Worker) -> str:
    """All metrics in Prometheus' text format."""
    lines = []
    for kind, name, value, purpose in _metrics(worker):
        lines += [
            f"# HELP {LLAMACPP}{name} {purpose}",
            f"# TYPE {LLAMACPP}{name} {kind}",
            f"{LLAMACPP}{name} {value:g}",
        ]
    return "\n".join(lines) + "\n"


def _metrics(worker: Worker) -> Iterator[tuple[str, str, float, str]]:
    totals, load, seconds = worker.totals(), worker.load(), worker.metrics.seconds
    stats = totals.speculation
    read, reading = totals.prompt_tokens - totals.cached_tokens, seconds("request_prefill_time_seconds")
    decoding = seconds("request_decode_time_seconds")
    yield "counter", "prompt_tokens_total", read, "Prompt tokens that were computed."
    yield "counter", "prompt_tokens_cached_total", totals.cached_tokens, "Prompt tokens that were in the prefix cache."
    yield "counter", "prompt_seconds_total", reading, "Seconds of reading prompts, of requests that ended."
    yield "counter", "tokens_predicted_total", totals.generated, "Generated tokens."
    yield "counter", "tokens_predicted_seconds_total", decoding, "Seconds of generating, of requests that ended."
    yield "counter", "n_decode_total", stats.target_forwards, "Forwards that emitted tokens, counted for each request."
    yield "counter", "n_tokens_max", worker.longest, "Tokens of the longest request, prompt and output."
    yield "counter", "spec_decode_num_drafts_total", sum(stats.drafted_by.values()), "Forwards with a draft."
    yield "counter", "spec_decode_num_draft_tokens_total", stats.drafted, "Draft tokens that were verified."
    yield "counter", "spec_decode_num_accepted_tokens_total", stats.accepted, "Draft tokens that became output."
    new_read, new_reading, new_tokens, new_decoding = worker.since(read, reading, totals.generated, decoding)
    speed = new_read / new_reading if new_reading else 0
    yield "gauge", "prompt_tokens_seconds", speed, "Prompt tokens per second since the previous scrape."
    speed = new_tokens / new_decoding if new_decoding else 0
    yield (
        "gauge",
        "predicted_tokens_seconds",
        speed,
        "Generated tokens per second since the previous scrape.",
    )
    running = len([request for request in worker.requests if request.row is not None])
    yield "gauge", "requests_processing", running, "Requests that have a place in the batch."
    yield "gauge", "requests_deferred", len(worker.requests) - running, "Requests that wait for a place."
    yield "gauge", "n_busy_slots_per_decode", load.running, "Places of the batch that are in use."
