"""Reader of a running server's metrics: names of the metrics of sametoken, vLLM and SGLang, and counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import NamedTuple

from sametoken.errors import SametokenError

SAME_ON_EVERY_RANK = ("tp_rank", "pp_rank", "moe_ep_rank")  # SGLang's labels of ranks with equal values

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


class Names(NamedTuple):
    """Names of metrics of a server, without its prefix; "" for those that it lacks."""

    server: str
    prefix: str
    running: str = "num_requests_running"
    waiting: str = "num_requests_waiting"
    prompt_tokens: str = "request_prompt_tokens_sum"
    prompts: str = "request_prompt_tokens_count"
    drafts: str = "spec_decode_num_drafts_total"
    shorter: str = ""  # option that bounds the length of drafts
    by_load: str = ""  # option that shortens drafts under load
    turn_on: str = ""  # option that turns speculation on


SERVERS = (  # sametoken first, since its servers export vLLM's names too
    Names(
        "sametoken", "sametoken_", shorter="--max-draft-len", by_load="--adaptive or --draft-len-schedule",
        turn_on="--draft HEAD, or --method ngram",
    ),
    Names(
        "vLLM", "vllm:", shorter="num_speculative_tokens in --speculative-config",
        by_load="num_speculative_tokens_per_batch_size in --speculative-config", turn_on="--speculative-config",
    ),
    Names(
        "SGLang", "sglang:", "num_running_reqs", "num_queue_reqs", "prompt_tokens_total", "num_requests_total",
        "spec_verify_calls_total", "--speculative-num-steps", "--speculative-adaptive", "--speculative-algorithm",
    ),
)  # fmt: skip


class Scrape(NamedTuple):
    """One scrape of a server's metrics.

    Attributes:
        names: names of the server's metrics.
        samples: labels and values, by name without the prefix.
    """

    names: Names
    samples: Samples

    def total(self, name: str, **labels: str) -> float:
        """Sum over the engines, of samples with these labels; 0 without samples."""
        return sum(value for own, value in self._of(name) if all(own.get(key) == labels[key] for key in labels))

    def mean(self, name: str) -> float:
        """Mean over the engines; 0 without samples."""
        values = [value for _, value in self._of(name)]
        return sum(values) / len(values) if values else 0.0

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums over the engines by value of a label."""
        found: dict[str, float] = {}
        for own, value in self._of(name):
            found[own.get(label, "")] = found.get(own.get(label, ""), 0.0) + value
        return found

    def _of(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        for own, value in self.samples.get(name, ()):
            if all(own.get(rank, "0") == "0" for rank in SAME_ON_EVERY_RANK):
                yield own, value


class Counters(NamedTuple):
    """Counters of one scrape, or their differences between two.

    Attributes:
        generated: number of generated tokens.
        prompt_tokens: number of prompt tokens.
        prompts: number of prompts.
        drafts: number of drafts.
        drafted: number of draft tokens.
        accepted: number of accepted draft tokens.
        draft_s: seconds spent on drafts.
        engine_s: seconds of all steps.
        positions: number of drafts accepted up to a position, by position.
        reached: number of drafts of at least that length, by position.
        plain: number of forwards without a draft, by reason.
    """

    generated: float
    prompt_tokens: float
    prompts: float
    drafts: float
    drafted: float
    accepted: float
    draft_s: float
    engine_s: float
    positions: dict[str, float]
    reached: dict[str, float]
    plain: dict[str, float]

    def since(self, before: Counters) -> Counters:
        """Differences to earlier counters.

        Raises:
            SametokenError: a counter has decreased.
        """
        if self.generated < before.generated or self.drafts < before.drafts:
            raise SametokenError("the server was restarted between the two scrapes; run this again")
        numbers = [now - then for now, then in zip(self[:8], before[:8], strict=True)]
        tables = [
            {key: value - then.get(key, 0.0) for key, value in now.items()}
            for now, then in zip(self[8:], before[8:], strict=True)
        ]
        return Counters(*numbers, *tables)  # type: ignore[arg-type]  # eight numbers and three tables


def read(text: str) -> Scrape:
    """Read metrics in Prometheus' text format.

    Raises:
        SametokenError: the text is malformed, or has no metrics of a known server.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if isfinite(sample.value) and sample.value >= 0:  # valid counts and seconds
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise SametokenError(f"/metrics is not in Prometheus' text format ({error}); check --url") from error
    for names in SERVERS:
        if own := {
            name.removeprefix(names.prefix): each for name, each in samples.items() if name.startswith(names.prefix)
        }:
            return Scrape(names, own)
    known = ", ".join(names.server for names in SERVERS)
    raise SametokenError(f"/metrics has no metrics of {known}; give the URL of such a server, not of a proxy before it")


def counters(scrape: Scrape) -> Counters:
    """Counters of a scrape."""
    total, names = scrape.total, scrape.names
    generated, drafts = total("generation_tokens_total"), total(names.drafts)
    drafted, accepted = total("spec_decode_num_draft_tokens_total"), total("spec_decode_num_accepted_tokens_total")
    if names.server == "SGLang":  # counts verifications and all tokens; a prefill emits the first one of an answer
        emitted = generated - total(names.prompts)
        drafted, accepted = drafts * _sglang_draft_len(scrape), max(0.0, emitted - drafts) if drafts else 0.0
    seconds = scrape.by("engine_step_seconds_total", "part")
    return Counters(
        generated, total(names.prompt_tokens), total(names.prompts), drafts, drafted, accepted,
        seconds.get("draft", 0.0), sum(seconds.values()),
        scrape.by("spec_decode_num_accepted_tokens_per_pos_total", "position"),
        scrape.by("spec_decode_num_draft_tokens_per_pos_total", "position"),
        scrape.by("spec_decode_plain_forwards_total", "reason"),
    )  # fmt: skip


def _sglang_draft_len(scrape: Scrape) -> float:
    """Guesses of a draft; SGLang's number includes the pending token."""
    return max(0.0, scrape.mean("spec_num_draft_tokens") - 1)
