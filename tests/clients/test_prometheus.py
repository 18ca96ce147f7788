"""Debian's Prometheus with the files under deploy/: it reads our metrics, and answers all that the dashboard asks."""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from dashboard_checks import DEPLOY, Asked, alerts, asked, variables
from sametoken import LLM
from server_checks import Running, running

MODEL, INTERVAL_S = "embedded", 1
ALERTS = [rule["alert"] for rule in alerts()]
BUSY = "0+60x60"  # one more a second


def promtool(*arguments: str, told: str | None = None) -> str:
    """What it prints; an error fails the test."""
    run = subprocess.run(["promtool", *arguments], input=told, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


class Watching(NamedTuple):
    """Prometheus, the server that it watches, and what the dashboard's variables stand for."""

    client: httpx.Client
    server: Running
    instance: str

    def get(self, path: str, **query: str) -> Any:
        reply = self.client.get(f"/api/v1/{path}", params=query)
        assert reply.status_code == 200, reply.text
        assert reply.json()["status"] == "success"
        return reply.json()["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.get("query", query=self.substituted(expression))["result"])

    def substituted(self, expression: str) -> str:
        """As Grafana puts a choice of several: escaped, in brackets."""
        for name, value in (("$instance", self.instance), ("$model", MODEL)):
            expression = expression.replace(name, f"({re.escape(value)})".replace("\\", "\\\\"))
        return expression.replace("$__rate_interval", "5m")  # longer than these tests, however busy the machine

    def scraped(self) -> float:
        """Seconds since 1970 of the last scrape."""
        result = self.query('timestamp(up{job="sametoken"})')
        return float(result[0]["value"][1]) if result else 0.0

    def wait_for_scrapes(self, count: int) -> None:
        for _ in range(count):
            before = self.scraped()
            _wait(lambda before=before: self.scraped() > before)  # type: ignore[misc]


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 60 s"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Prometheus with our configuration, but for the address and the interval."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(config["global"], f"{INTERVAL_S}s")
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "alerts.yml", folder)
    address = f"127.0.0.1:{_free_port()}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
               f"--web.listen-address={address}"]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=20) as client:
                _wait(lambda: _ready(client, process))
                yield client
        finally:
            process.terminate()
            process.wait(20)


def _ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    """After traffic of every kind that the dashboard tells apart, seen by two scrapes."""
    llm = LLM("embedded", "embedded", {"adaptive": False, "max_draft_len": 4}, max_batch_size=4)
    with running(llm, {"model": MODEL}) as server:
        instance = server.url.removeprefix("http://")
        with prometheus(tmp_path_factory.mktemp("prometheus"), instance) as client:
            found = Watching(client, server, instance)
            found.wait_for_scrapes(1)
            for i in range(3):
                traffic(server, i)
                found.wait_for_scrapes(2)
            yield found


def traffic(server: Running, seed: int) -> None:
    text = {"prompt": "The weather today is", "max_tokens": 24, "ignore_eos": True, "seed": seed}
    for more in ({}, {"n": 2}, {"stream": True}, {"speculative": {"enabled": False}}, {"temperature": 0}):
        assert server.post("/v1/completions", {**text, **more}).status_code == 200
    assert server.post("/v1/completions", {"prompt": [], "seed": seed}).status_code == 400


def test_promtool_likes_the_files_and_the_metrics(watching: Watching) -> None:
    assert "SUCCESS" in promtool("check", "config", str(DEPLOY / "prometheus.yml"))
    assert f"SUCCESS: {len(ALERTS)} rules" in promtool("check", "rules", str(DEPLOY / "alerts.yml"))
    lines = watching.server.get("/metrics").text.splitlines(keepends=True)
    # Names of peers have colons, and one of vLLM's histograms ends as counters do: the check does not like either.
    theirs = ("vllm:", "llamacpp:", "iteration_tokens_total")
    ours = [line for line in lines if not any(name in line for name in theirs)]
    assert promtool("check", "metrics", told="".join(ours)) == ""


def test_prometheus_reads_all_that_is_exported(watching: Watching) -> None:
    (target,) = watching.get("targets", state="active")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    exported = {line.split("{")[0].split(" ")[0] for line in watching.server.get("/metrics").text.splitlines()} - {"#"}
    stored = set(watching.get("label/__name__/values"))
    assert exported <= stored


@pytest.mark.parametrize("ask", [each for each in asked() if "label_values" not in each.expression], ids=str)
def test_every_expression_is_answered(watching: Watching, ask: Asked) -> None:
    result = watching.query(ask.expression)
    assert result or ask.place in ALERTS  # which are empty while all is well
    assert all(math.isfinite(float(each["value"][1])) for each in result), result


def test_the_variables_offer_the_model_and_its_server(watching: Watching) -> None:
    offered: Mapping[str, list[str]] = {}
    for each in variables():
        match, label = re.fullmatch(r"label_values\((.*), (\w+)\)", each.expression).groups()  # type: ignore[union-attr]
        offered |= {each.place: watching.get(f"label/{label}/values", **{"match[]": watching.substituted(match)})}
    assert offered == {"model": [MODEL], "instance": [watching.instance]}


def test_what_prometheus_says_agrees_with_the_server(watching: Watching) -> None:
    watching.wait_for_scrapes(1)
    for name in ("sametoken_generation_tokens_total", "sametoken_spec_decode_num_accepted_tokens_total"):
        (found,) = watching.query(name)
        text = watching.server.get("/metrics").text
        line = next(line for line in text.splitlines() if line.startswith(f"{name}{{"))
        assert float(found["value"][1]) == float(line.split(" ")[1]) > 0


CHOSEN = '{job=~"$job", model_name=~"$model", instance=~"$instance", engine=~".*"}'


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(vllm:{name}_bucket{CHOSEN}[$__rate_interval])))"


def mean(name: str) -> str:
    sums, counts = (f"rate(vllm:{name}_{part}{CHOSEN}[$__rate_interval])" for part in ("sum", "count"))
    return f"{sums} / {counts}"


def summed(name: str, by: str = "") -> str:
    return f"sum {by}(rate(vllm:{name}_total{CHOSEN}[$__rate_interval]))"


# What dashboards for vLLM ask: the shapes of its published ones, with its names.
FOR_VLLM = {
    **{
        f"{name} {share}": quantile(share, name)
        for share in (0.5, 0.99)
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
    },
    **{
        f"mean {name}": mean(name)
        for name in (
            "e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds",
            "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
            "request_inference_time_seconds", "request_max_num_generation_tokens",
            "request_time_per_output_token_seconds",
        )
    },
    **{
        f"heatmap {name}": f"sum by (le) (increase(vllm:{name}_bucket{CHOSEN}[$__rate_interval]))"
        for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_n")
    },
    **{
        name: summed(name)
        for name in ("prompt_tokens", "generation_tokens", "num_preemptions", "spec_decode_num_draft_tokens")
    },
    **{
        name: f"vllm:{name}{CHOSEN}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    },
    "finish reason": summed("request_success", "by (finished_reason) "),
    "hits": f"{summed('prefix_cache_hits')} / {summed('prefix_cache_queries')}",
    "acceptance length": f"1 + {summed('spec_decode_num_accepted_tokens')} / "
                         f"({summed('spec_decode_num_drafts')} > 0)",
    "acceptance by position": f"{summed('spec_decode_num_accepted_tokens_per_pos', 'by (position) ')} / "
                              f"on () group_left () ({summed('spec_decode_num_drafts')} > 0)",
}  # fmt: skip


@pytest.mark.parametrize("name", FOR_VLLM)
def test_what_dashboards_for_vllm_ask_is_answered(watching: Watching, name: str) -> None:
    result = watching.query(FOR_VLLM[name].replace("$job", "sametoken"))
    assert result
    assert all(math.isfinite(float(each["value"][1])) for each in result), result


def test_vllms_names_say_what_ours_say(watching: Watching) -> None:
    for name in ("generation_tokens_total", "request_prompt_tokens_sum", "spec_decode_num_accepted_tokens_total"):
        difference = f"vllm:{name} - ignoring (engine) sametoken_{name}"
        assert [each["value"][1] for each in watching.query(difference)] == ["0"]


def test_a_models_name_is_offered(watching: Watching) -> None:
    assert watching.get("label/model_name/values", **{"match[]": "vllm:num_requests_running"}) == [MODEL]


SPEC = "sametoken_spec_decode"
FIRES: dict[str, dict[str, str]] = {
    "SametokenDown": {"up": "0x60"},
    "SametokenFails": {'sametoken_request_errors_total{status="503", code="server_stopped"': BUSY},
    "SametokenQueueFull": {'sametoken_request_errors_total{status="429", code="queue_full"': BUSY},
    "SametokenSlowToStart": {
        'sametoken_time_to_first_token_seconds_bucket{le="5.0"': "0+1x60",
        'sametoken_time_to_first_token_seconds_bucket{le="10.0"': "0+60x60",
        'sametoken_time_to_first_token_seconds_bucket{le="+Inf"': "0+60x60",
    },
    "SametokenCacheFull": {"sametoken_kv_cache_usage_perc": "0.99x60", "sametoken_num_requests_waiting": "3x60"},
    "SametokenDraftsRejected": {
        f"{SPEC}_num_accepted_tokens_total": "0+1x60", f"{SPEC}_num_draft_tokens_total": "0+100x60",
    },
    "SametokenDraftsCostTooMuch": {
        'sametoken_engine_step_seconds_total{part="draft"': "0+40x60",
        'sametoken_engine_step_seconds_total{part="verify"': "0+20x60",
    },
}  # fmt: skip


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_when_it_should_and_no_other_does(alert: str, tmp_path: Path) -> None:
    series = []
    for name, values in FIRES[alert].items():
        labelled = f'{name}{", " if "{" in name else "{"}job="sametoken", instance="here"' + "}"
        series.append({"series": labelled, "values": values})
    fired = {"labels": f'{{alertname="{alert}"}}', "value": 1}
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "50m", "exp_samples": [fired]},
            {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "0m", "exp_samples": []},
        ],
    }
    written = {"rule_files": [str(DEPLOY / "alerts.yml")], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(written))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "test.yml"))
