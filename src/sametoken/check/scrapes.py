"""Reader of a running server's metrics: the names in sametoken, vLLM and SGLang, and their counters.

Text in, numbers out; `remote` says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import NamedTuple

from sametoken.errors import SametokenError

SAME_ON_EVERY_RANK = ("tp_rank", "pp_rank", "moe_ep_rank")  # labels of SGLang's: each rank may say the same again

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
    shorter: str = ""  # the option that bounds drafts
    by_load: str = ""  # the option that shortens them under load
    turn_on: str = ""


SERVERS = (  # a sametoken server exports vLLM's names too, so it comes first
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
        names: whose metrics they are. `samples`: values with their labels, by the name without the prefix.
    """

    names: Names
    samples: Samples

    def total(self, name: str, **labels: str) -> float:
        """The sum over engines, 0 where there are none; labels that are given must be so."""
        return sum(value for own, value in self._of(name) if all(own.get(key) == labels[key] for key in labels))

    def mean(self, name: str) -> float:
        """The mean over engines, 0 where there are none."""
        values = [value for _, value in self._of(name)]
        return sum(values) / len(values) if values else 0.0

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums over engines for each value of a label."""
        found: dict[str, float] = {}
        for own, value in self._of(name):
            found[own.get(label, "")] = found.get(own.get(label, ""), 0.0) + value
        return found

    def _of(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        for own, value in self.samples.get(name, ()):
            if all(own.get(rank, "0") == "0" for rank in SAME_ON_EVERY_RANK):
                yield own, value


class Counters(NamedTuple):
    """Counters of one scrape, or what was added between two.

    Attributes:
        emitted: tokens of forwards with a draft. `positions`: drafts accepted so far; `reached`: drafts so long.
        plain: forwards without a draft, by reason. `draft_s`, `engine_s`: seconds.
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
        """Difference to an earlier reading.

        Raises:
            SametokenError: a counter went back.
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
    """The metrics of a text in Prometheus' format.

    Raises:
        SametokenError: it is no such text, or none of the servers that are known wrote it.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if isfinite(sample.value) and sample.value >= 0:  # all that is read here counts something
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
    """The counters of a scrape."""
    total, names = scrape.total, scrape.names
    generated, drafts = total("generation_tokens_total"), total(names.drafts)
    drafted, accepted = total("spec_decode_num_draft_tokens_total"), total("spec_decode_num_accepted_tokens_total")
    if names.server == "SGLang":  # it counts verifications and tokens, of which a prefill emits each answer's first
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
    """Guesses of a draft; its number counts the token before them too."""
    return max(0.0, scrape.mean("spec_num_draft_tokens") - 1)
