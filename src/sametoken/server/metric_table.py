"""Every metric that a server exports, as data: name, kind, vLLM's name, meaning, labels, where it is read.

vLLM's name is given only where the quantity is the same, so that a dashboard made for vLLM shows what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from sametoken.control.advice import PAUSES
from sametoken.engine.request import SpeculationStats
from sametoken.server.tally import Snapshot, Tally

SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
PER_TOKEN = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)
SAME, OURS = "same", ""


Reading = float | Mapping[str, float] | Tally  # a number, one per value of the label, or a histogram


class MetricSpec(NamedTuple):
    """One metric.

    Attributes:
        name: without prefix, and without the `_total` that Prometheus adds to counters.
        vllm: vLLM's name of the same quantity, without prefix: `SAME`, another, or `OURS` where vLLM has none.
        purpose: what it means.
        labels: besides `model_name`.
        buckets: of a histogram that is counted along.
        read: where it is looked up; None is counted along.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    vllm: str
    purpose: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()
    read: Callable[[Snapshot], Reading] | None = None

    @property
    def vllm_name(self) -> str:
        """vLLM's name without its prefix, "" for none."""
        return self.name if self.vllm == SAME else self.vllm


def _reached(lengths: Sequence[int], positions: int) -> dict[str, float]:
    """How many came at least so far, 0 included; `lengths[n]` of them came n far."""
    return {str(position): sum(lengths[position + 1 :]) for position in range(positions)}


def _positions(stats: SpeculationStats) -> int:
    return len(stats.drafted_lengths) - 1


def _acceptance_length(stats: SpeculationStats) -> Tally:
    """`emitted_lengths[n]` forwards emitted n tokens."""
    first, *longer = stats.emitted_lengths[1:] or [0]
    total = sum(length * count for length, count in enumerate(stats.emitted_lengths))
    counts = [sum(stats.emitted_lengths[:1]) + first, *longer, 0]
    return Tally(range(1, len(counts)), counts, total)


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("info", "gauge", OURS, "1; what is served.", ("model", "version")),
    # The engine now.
    MetricSpec(
        "num_requests_running",
        "gauge",
        SAME,
        "Sequences in the batch.",
        read=lambda now: now.load.running,
    ),
    MetricSpec(
        "num_requests_waiting",
        "gauge",
        SAME,
        "Sequences that wait for a place.",
        read=lambda now: now.load.waiting,
    ),
    MetricSpec(
        "kv_cache_usage_perc",
        "gauge",
        SAME,
        "Used share of the cache's pages, 0 to 1.",
        read=lambda now: now.load.pages_used / max(1, now.load.pages),
    ),
    MetricSpec(
        "num_preemptions",
        "counter",
        SAME,
        "Sequences that lost their place because the cache was full.",
        read=lambda now: now.load.preemptions,
    ),
    MetricSpec(
        "engine_step_seconds",
        "counter",
        OURS,
        "Time of the engine's steps: on drafts, on the target, on the rest. draft / all is the drafter's share.",
        ("part",),
        read=lambda now: {
            "draft": now.load.draft_s,
            "verify": now.load.verify_s,
            "other": now.load.other_s,
        },
    ),
    # Tokens.
    MetricSpec(
        "prompt_tokens",
        "counter",
        SAME,
        "Prompt tokens of requests taken.",
        read=lambda now: now.totals.prompt_tokens,
    ),
    MetricSpec(
        "prefix_cache_queries",
        "counter",
        SAME,
        "Prompt tokens that were looked up in the cache.",
        read=lambda now: now.totals.prompt_tokens,
    ),
    MetricSpec(
        "prefix_cache_hits",
        "counter",
        SAME,
        "Prompt tokens that were in the cache already.",
        read=lambda now: now.totals.cached_tokens,
    ),
    MetricSpec(
        "generation_tokens",
        "counter",
        SAME,
        "Tokens generated.",
        read=lambda now: now.totals.generated,
    ),
    MetricSpec(
        "request_prompt_tokens",
        "histogram",
        SAME,
        "Prompt tokens of a sequence that ended.",
        buckets=TOKENS,
    ),
    MetricSpec(
        "request_generation_tokens",
        "histogram",
        SAME,
        "Tokens generated for a sequence that ended.",
        buckets=TOKENS,
    ),
    MetricSpec(
        "request_max_num_generation_tokens",
        "histogram",
        SAME,
        "Tokens generated for a prompt that ended, of its longest choice.",
        buckets=TOKENS,
    ),
    MetricSpec(
        "request_params_n",
        "histogram",
        SAME,
        "Choices that were asked for, per prompt that ended.",
        buckets=CHOICES,
    ),
    MetricSpec(
        "request_params_max_tokens",
        "histogram",
        SAME,
        "`max_tokens` of a sequence that ended.",
        buckets=TOKENS,
    ),
    # Times.
    MetricSpec(
        "time_to_first_token_seconds",
        "histogram",
        SAME,
        "From arrival to the first token.",
        buckets=SECONDS,
    ),
    MetricSpec(
        "request_queue_time_seconds",
        "histogram",
        SAME,
        "From arrival to a place in the batch.",
        buckets=SECONDS,
    ),
    MetricSpec(
        "request_prefill_time_seconds",
        "histogram",
        SAME,
        "From a place to the first token.",
        buckets=SECONDS,
    ),
    MetricSpec(
        "request_decode_time_seconds",
        "histogram",
        SAME,
        "From the first token to the last.",
        buckets=SECONDS,
    ),
    MetricSpec(
        "request_inference_time_seconds",
        "histogram",
        SAME,
        "From a place to the last token.",
        buckets=SECONDS,
    ),
    MetricSpec(
        "e2e_request_latency_seconds",
        "histogram",
        SAME,
        "From arrival to the last token.",
        buckets=SECONDS,
    ),
    MetricSpec(
        "request_time_per_output_token_seconds",
        "histogram",
        SAME,
        "Decode time of a sequence that ended over its tokens after the first.",
        buckets=PER_TOKEN,
    ),
    MetricSpec(
        "inter_token_latency_seconds",
        "histogram",
        OURS,
        "Time between two emissions of a sequence over the tokens of the later one, once per token.",
        buckets=PER_TOKEN,
    ),
    MetricSpec(
        "inter_output_latency_seconds",
        "histogram",
        "inter_token_latency_seconds",
        "Time between two emissions of a sequence, however many tokens they have.",
        buckets=PER_TOKEN,
    ),
    # Ends.
    MetricSpec("request_success", "counter", SAME, "Sequences that ended, by reason.", ("finished_reason",)),
    MetricSpec(
        "request_errors",
        "counter",
        OURS,
        "Requests answered with an error, by status and code.",
        ("status", "code"),
    ),
    # Speculation.
    MetricSpec(
        "spec_decode_draft_len",
        "gauge",
        OURS,
        "Longest draft that the last step allowed, in tokens; 0 is off.",
        read=lambda now: now.load.draft_len,
    ),
    MetricSpec(
        "spec_decode_num_drafts",
        "counter",
        SAME,
        "Forwards with a draft.",
        read=lambda now: now.totals.speculation.drafts,
    ),
    MetricSpec(
        "spec_decode_num_draft_tokens",
        "counter",
        SAME,
        "Draft tokens proposed.",
        read=lambda now: now.totals.speculation.drafted,
    ),
    MetricSpec(
        "spec_decode_num_accepted_tokens",
        "counter",
        SAME,
        "Draft tokens that became output.",
        read=lambda now: now.totals.speculation.accepted,
    ),
    MetricSpec(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        OURS,
        "Forwards whose draft reached this position.",
        ("position",),
        read=lambda now: _reached(now.totals.speculation.drafted_lengths, _positions(now.totals.speculation)),
    ),
    MetricSpec(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        SAME,
        "Forwards whose draft was accepted at least this far; the first guess is position 0.",
        ("position",),
        read=lambda now: _reached(now.totals.speculation.accepted_lengths, _positions(now.totals.speculation)),
    ),
    MetricSpec(
        "spec_decode_drafted_by",
        "counter",
        OURS,
        "Forwards with a draft, by who made it.",
        ("method",),
        read=lambda now: now.totals.speculation.drafted_by,
    ),
    MetricSpec(
        "spec_decode_plain_forwards",
        "counter",
        OURS,
        "Forwards without a draft though it was allowed, by reason.",
        ("reason",),
        read=lambda now: now.totals.speculation.plain,
    ),
    MetricSpec(
        "spec_decode_paused",
        "gauge",
        OURS,
        "1 while hardly any of the last forwards drafted though it was allowed, by reason.",
        ("reason",),
        read=lambda now: {reason: float(now.load.paused == reason) for reason in PAUSES},
    ),
    MetricSpec(
        "spec_decode_acceptance_length",
        "histogram",
        OURS,
        "Tokens emitted per forward of the target.",
        read=lambda now: _acceptance_length(now.totals.speculation),
    ),
)
