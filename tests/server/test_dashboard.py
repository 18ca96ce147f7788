"""The dashboard and the alerts under deploy/ ask for what a server exports; Prometheus itself is asked in clients/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from cli_checks import Pair
from dashboard_checks import DASHBOARD, alerts, asked, panels, shown, variables
from sametoken import LLM
from sametoken.engine.engine import EngineLoad
from sametoken.engine.stats import SpeculationStats
from sametoken.server.metrics import METRICS, Metrics
from sametoken.server.tally import Tally, Totals
from server_checks import running

# Names and labels that vLLM 0.33 documents and its published dashboards ask for.
VLLM: dict[str, tuple[str, ...]] = {
    **{f"vllm:{name}": () for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    )},
    **{f"vllm:{name}_{part}": () for part in ("bucket", "sum", "count") for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
        "request_params_max_tokens",
    )},
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("position",),
    "vllm:request_success_total": ("finished_reason",),
}  # fmt: skip


class Watched:
    """An engine without load that has done so much."""

    def __init__(self, stats: SpeculationStats) -> None:
        self._stats = stats

    def totals(self) -> Totals:
        return Totals(self._stats, 0, 0, 0)

    def load(self) -> EngineLoad:
        return EngineLoad(*[0] * len(EngineLoad._fields))


@pytest.fixture(scope="module")
def exported(tiny_pair: Pair, one_thread: None) -> Iterator[dict[str, set[str]]]:
    """The labels of every sample that a server exports after some requests."""
    drafts = {"max_draft_len": 3, "adaptive": False}
    llm = LLM(tiny_pair.target, tiny_pair.draft, drafts, dtype="bfloat16", max_batch_size=4)  # compiled: it has chances
    with running(llm) as server:
        for body in ({"n": 2}, {"speculative": {"enabled": False}}, {"stream": True}, {"temperature": -1}):
            server.post("/v1/completions", {"prompt": "abc", "max_tokens": 9, "ignore_eos": True, "seed": 0, **body})
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(server.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        yield found


def test_every_metric_that_is_asked_for_is_exported(exported: dict[str, set[str]]) -> None:
    wanted = {(each.place, name) for each in asked() for name in each.names}
    assert len(wanted) > 40
    assert {(place, name) for place, name in wanted if name not in exported} == set()


def test_guesses_of_which_none_came_true_are_zeros_and_not_gaps() -> None:
    stats = SpeculationStats("draft", drafted_lengths=[0, 0, 4], accepted_lengths=[4])
    metrics = Metrics("model")
    metrics.watch(Watched(stats))
    found = {
        family.name: {sample.labels["position"]: sample.value for sample in family.samples}
        for family in metrics.collect()
        if family.name.endswith("per_pos")
    }
    assert found == {
        "sametoken_spec_decode_num_draft_tokens_per_pos": {"0": 4, "1": 4},
        "sametoken_spec_decode_num_accepted_tokens_per_pos": {"0": 0, "1": 0},
        "vllm:spec_decode_num_accepted_tokens_per_pos": {"0": 0, "1": 0},
    }


@given(st.lists(st.floats(0, 10) | st.sampled_from([0.001, 0.5, 10.0])))
def test_a_tally_counts_as_the_client_library_does(values: list[float]) -> None:
    bounds = (0.001, 0.5, 2.0)
    ours, theirs = Tally(bounds), Histogram("x", "x", buckets=bounds, registry=None)
    for value in values:
        ours.add(value)
        theirs.observe(value)
    (family,) = theirs.collect()
    expected = [(s.labels["le"], s.value) for s in family.samples if s.name == "x_bucket"]
    assert ours.buckets() == expected
    assert ours.total == pytest.approx(sum(values))


def test_what_vllm_exports_too_has_its_name_and_labels(exported: dict[str, set[str]]) -> None:
    theirs = {name: labels for name, labels in exported.items() if name.startswith("vllm:")}
    for name, labels in VLLM.items():
        assert theirs[name] - {"le"} == {"model_name", "engine", *labels}
    ours = {name for name in exported if name.startswith("sametoken_")}
    assert all("model_name" in exported[name] for name in ours)
    assert {name.removeprefix("vllm:") for name in theirs} <= {name.removeprefix("sametoken_") for name in ours}


def test_metrics_have_one_name_each() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    assert len({name for spec in METRICS if (name := spec.vllm_name)}) == sum(bool(s.vllm_name) for s in METRICS)


def test_the_process_is_measured(exported: dict[str, set[str]]) -> None:
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} <= exported.keys()


def test_every_label_that_is_asked_for_is_exported(exported: dict[str, set[str]]) -> None:
    for each in asked():
        known = set[str]().union(*(exported[name] for name in each.names), {"instance", "le"})
        grouped = {
            label.strip() for labels in re.findall(r"by \((.*?)\)", each.expression) for label in labels.split(",")
        }
        chosen = {label for label in re.findall(r"(\w+)=~?\"", each.expression) if label != "job"}
        assert grouped | chosen <= known, each


def test_every_metric_of_speculation_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    on = {name for each in shown() for name in each.names}
    bases = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in on}
    missing = {
        name
        for name in exported
        if name.startswith(("sametoken_spec_decode", "sametoken_engine"))
        and not name.endswith("_created")
        and name not in on
        and name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") not in bases
    }
    assert missing == set()


def test_a_server_is_found_by_its_model(exported: dict[str, set[str]]) -> None:
    assert [each.place for each in variables()] == ["model", "instance"]
    assert exported["sametoken_info"] == {"model", "model_name", "version"}


def test_every_panel_says_what_it_shows_in_which_unit() -> None:
    for panel in panels():
        assert panel["title"], panel
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["type"] == "stat" or all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_panels_stand_beside_each_other() -> None:
    for one, other in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in DASHBOARD["panels"])


def test_every_alert_says_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert "$labels.instance" in rule["annotations"]["summary"]
