"""`sametoken doctor --url`: figures, verdict and advice for servers of vLLM, SGLang and ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fake_server import serving
from sametoken import LLM
from sametoken.check.remote import ServerFindings, examine
from sametoken.check.scrapes import read
from sametoken.errors import SametokenError
from server_checks import Running, running

# As vLLM's SpecDecodingProm (v1/spec_decode/metrics.py) and its PrometheusStatLogger write them, for 3 guesses a draft.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="Qwen/Qwen3-8B"}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="Qwen/Qwen3-8B"}} {waiting}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {generated}
# HELP vllm:request_prompt_tokens Number of prefill tokens processed.
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{{engine="0",le="1.0",model_name="Qwen/Qwen3-8B"}} 0.0
vllm:request_prompt_tokens_bucket{{engine="0",le="+Inf",model_name="Qwen/Qwen3-8B"}} {prompts}
vllm:request_prompt_tokens_count{{engine="0",model_name="Qwen/Qwen3-8B"}} {prompts}
vllm:request_prompt_tokens_sum{{engine="0",model_name="Qwen/Qwen3-8B"}} {prompt_tokens}
"""
VLLM_DRAFTS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {drafts}
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="Qwen/Qwen3-8B"}} 1.7953962301324995e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {drafted}
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {accepted}
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3-8B",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3-8B",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3-8B",position="2"}} {third}
"""
# As SGLang's metrics collectors write them; each tensor parallel rank may repeat it.
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {running}
sglang:num_running_reqs{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"}} {running}
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {waiting}
# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {length}
# HELP sglang:spec_accept_rate The average acceptance rate of speculative decoding.
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} 0.6
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="m"}} {generated}
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{is_streaming="true",model_name="m"}} {prompt_tokens}
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{is_streaming="true",model_name="m"}} {prompts}
"""
SGLANG_CALLS = """\
# HELP sglang:spec_num_draft_tokens Number of draft tokens.
# TYPE sglang:spec_num_draft_tokens gauge
sglang:spec_num_draft_tokens{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} 4.0
# HELP sglang:spec_verify_calls_total Number of verifications.
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{model_name="m"}} {calls}
"""
SGLANG_INFO = {
    "version": "0.5.17", "speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4,
    "internal_states": [{"avg_spec_accept_length": 2.5, "last_gen_throughput": 100.0}],
}  # fmt: skip
START = {"running": 2, "waiting": 0, "generated": 1000, "prompts": 10, "prompt_tokens": 5000}
START |= {"drafts": 400, "drafted": 1200, "accepted": 600, "first": 300, "second": 200, "third": 100}
NEXT = {**START, "generated": 1240, "prompts": 12, "prompt_tokens": 6000, "drafts": 500, "drafted": 1500}
NEXT |= {"accepted": 740, "first": 380, "second": 250, "third": 110}


def of_vllm(first: dict[str, Any], second: dict[str, Any], drafts: bool = True) -> ServerFindings:
    text = VLLM + VLLM_DRAFTS * drafts
    about = {"model": "Qwen/Qwen3-8B", "version": "0.33.0", "method": "speculative decoding" if drafts else None}
    return examine(read(text.format(**first)), read(text.format(**second)), 10.0, about)


def test_figures_of_vllm_are_of_the_time_between_the_readings() -> None:
    found = of_vllm(START, NEXT)
    assert found.server == "vLLM 0.33.0"
    assert found.recent
    assert found.tokens_per_second == 24.0
    assert found.prompt_tokens == 500
    assert found.drafts == 100
    assert found.draft_len == 3
    assert found.acceptance_length == pytest.approx(1 + 140 / 100)
    assert found.acceptance_rate == pytest.approx(140 / 300)
    assert found.positions == pytest.approx((0.8, 0.5, 0.1))
    assert found.draft_share is None
    assert found.verdict == "may pay"
    assert "up to 140% of a plain forward's time" in found.reason
    assert found.advice == ()


def test_an_idle_server_is_judged_by_what_it_did_since_its_start() -> None:
    found = of_vllm(START, START)
    assert not found.recent
    assert found.tokens_per_second == 0
    assert found.acceptance_length == 2.5


def changed(**numbers: float) -> dict[str, Any]:
    return {**NEXT, **numbers}


@pytest.mark.parametrize(
    ("second", "verdict", "words"),
    [
        (changed(accepted=605, first=304, second=201, third=100), "does not pay", "the first guess comes true in 4%"),
        (changed(accepted=685, first=380, second=205, third=100), "may pay", "guess 2 and later ones come true"),
        (changed(running=62), "may pay", "num_speculative_tokens_per_batch_size"),
        (changed(waiting=9), "may pay", "requests wait for a place"),
        (changed(prompt_tokens=45_000, accepted=640, first=332, second=204, third=104), "may pay", "8192"),
    ],
)
def test_what_costs_acceptance_or_time_is_named(second: dict[str, Any], verdict: str, words: str) -> None:
    found = of_vllm(START, second)
    assert found.verdict == verdict
    assert any(words in each for each in found.advice), found.advice


def test_a_server_without_drafts_and_one_that_makes_none() -> None:
    found = of_vllm(START, NEXT, drafts=False)
    assert (found.verdict, found.method) == ("off", "")
    assert "--speculative-config" in found.advice[0]
    silent = {**NEXT, **{name: START[name] for name in ("drafts", "drafted", "accepted", "first", "second", "third")}}
    found = of_vllm(START, silent)
    assert found.verdict == "does not pay"
    assert "no forward had a draft" in found.reason
    nothing = dict.fromkeys(START, 0)
    assert of_vllm(nothing, nothing).verdict == "unknown"


def test_a_server_that_was_restarted_between_the_readings() -> None:
    with pytest.raises(SametokenError, match="restarted"):
        of_vllm(NEXT, START)


@pytest.mark.parametrize(
    ("text", "words"),
    [("<html>", "not in Prometheus' text format"), ("up 1\n", "has no metrics of sametoken, vLLM, SGLang")],
)
def test_what_is_no_such_server(text: str, words: str) -> None:
    with pytest.raises(SametokenError, match=words):
        read(text)


def test_figures_of_sglang() -> None:
    """Tokens per verification where it counts them, else what its last batch and its server info say."""
    first = {**START, "length": 3.2, "calls": 300}
    second = {**NEXT, "length": 3.4, "calls": 400}
    text = SGLANG + SGLANG_CALLS
    about = {"model": "m", "method": "EAGLE3", "draft_len": 3}
    found = examine(read(text.format(**first)), read(text.format(**second)), 10.0, about)
    assert found.server == "SGLang"
    assert found.running == 2  # a rank's repetition counts once
    assert found.acceptance_length == pytest.approx((240 - 2) / 100)  # the first token of two answers is a prefill's
    assert found.acceptance_rate == pytest.approx(138 / 300)
    assert found.prompt_tokens == 500
    older = examine(read(SGLANG.format(**first)), read(SGLANG.format(**second)), 10.0, about)
    assert (older.acceptance_length, older.acceptance_rate, older.draft_len) == (3.4, 0.6, 3)
    assert older.verdict == "may pay"


def test_values_that_count_nothing_are_left_out() -> None:
    text = (VLLM + VLLM_DRAFTS).format(**NEXT)
    odd = text + "".join(
        f'vllm:{name} {value}\n'
        for name, value in (
            ("generation_tokens_total", "NaN"), ("spec_decode_num_drafts_total", "+Inf"),
            ('spec_decode_num_accepted_tokens_per_pos_total{position="x"}', "1"),
            ("spec_decode_num_accepted_tokens_per_pos_total", "1"),
        )
    )  # fmt: skip
    about = {"model": "m", "version": "1", "method": "speculative decoding"}
    first = read((VLLM + VLLM_DRAFTS).format(**START))
    assert examine(first, read(odd), 10.0, about) == examine(first, read(text), 10.0, about)


@pytest.mark.parametrize(
    "said",
    [
        {"speculative_num_draft_tokens": "4", "internal_states": 3},
        {"speculative_num_draft_tokens": None, "internal_states": [{"avg_spec_accept_length": "2"}, "x"]},
    ],
)
def test_a_server_that_says_other_things_of_itself(said: dict[str, Any], run: Any) -> None:
    with serving(pages={"/get_server_info": [json.dumps({**SGLANG_INFO, **said})]}) as (url, _):
        found = json.loads(run("doctor", "--url", url, "--seconds", "0.01", "--json").out)
    assert (found["draft_len"], found["acceptance_length"]) == (0, 0)


def test_the_command_asks_vllm(run: Any) -> None:
    texts = [(VLLM + VLLM_DRAFTS).format(**numbers) for numbers in (START, NEXT)]
    with serving(pages={"/metrics": texts, "/version": [json.dumps({"version": "0.33.0"})]}) as (url, state):
        shown = run("doctor", "--url", f"{url}/v1", "--api-key", "secret", "--seconds", "0.01")
    assert shown.code == 0, shown.err
    assert "server           vLLM 0.33.0" in shown.out
    assert "model            canned" in shown.out
    assert "2.40 tokens per forward with a draft, 47% of 3.0 guesses" in shown.out
    assert "by position      80%, 50%, 10%" in shown.out
    assert set(state.keys) == {"Bearer secret"}


def test_the_command_asks_sglang_without_metrics(run: Any) -> None:
    """They are off there unless asked for."""
    with serving(pages={"/get_server_info": [json.dumps(SGLANG_INFO)]}) as (url, _):
        found = json.loads(run("doctor", "--url", url, "--seconds", "0.01", "--json").out)
    assert found["server"] == "SGLang 0.5.17"
    assert (found["method"], found["acceptance_length"], found["draft_len"]) == ("EAGLE3", 2.5, 3)
    assert found["verdict"] == "may pay"
    assert any("--enable-metrics" in each for each in found["advice"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "http://127.0.0.1:9"), "expected a running server with metrics"),
        (("--url", "localhost:8000"), "expected a URL such as http://localhost:8000"),
        (("HEAD", "--url", "http://localhost:8000"), "give one of them"),
        (("--url", "http://localhost:8000", "--target", "embedded"), "--target is for files on this machine"),
        (("--seconds", "3"), "--seconds is for a running server: give --url"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], words: str, run: Any) -> None:
    assert words in run("doctor", *arguments).err


def test_a_server_of_another_kind_is_told_from_a_refused_key(run: Any) -> None:
    with serving(pages={"/other": ["x"]}) as (url, _):
        assert "TensorRT-LLM and others are not read" in run("doctor", "--url", url).err


@pytest.fixture(scope="module")
def ours() -> Iterator[Running]:
    llm = LLM("embedded", "embedded-eagle3", max_batch_size=2, speculative={"adaptive": False})
    with running(llm, {"model": "embedded", "speculative": {"adaptive": False}}, api_key=("k",)) as server:
        yield server


def test_a_server_of_ours(ours: Running, run: Any) -> None:
    body = {"prompt": "Hello! What do you like to do?", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    key = {"Authorization": "Bearer k"}
    asked = ("doctor", "--url", ours.url, "--seconds", "0.01", "--json")
    idle = json.loads(run(*asked, "--api-key", "k").out)
    assert (idle["method"], idle["verdict"]) == ("eagle3", "unknown")
    report = ours.post("/v1/completions", {**body, "speculative": {"report": True}}, headers=key).json()
    stats = report["choices"][0]["speculative"]["stats"]
    found = json.loads(run(*asked, "--api-key", "k").out)
    assert found["server"].startswith("sametoken ")
    assert found["model"] == "embedded"
    assert found["acceptance_rate"] == pytest.approx(stats["acceptance_rate"], abs=1e-6)
    assert 0 < found["draft_share"] < 1
    assert found["plain_share"] < 0.5
    assert found["verdict"] in ("may pay", "does not pay")
    shown = run("doctor", "--url", ours.url, "--seconds", "0.01", "--api-key", "k").out
    assert "figures of       the time since its start (nothing in 0.01 s)" in shown
    assert "of the engine's time" in shown
    assert "check --api-key" in run("doctor", "--url", ours.url, "--api-key", "wrong").err


def test_a_controller_that_does_not_draft_is_named(ours: Running) -> None:
    """What the server says of forwards without a draft decides."""
    text = ours.client.get("/metrics", headers={"Authorization": "Bearer k"}).text
    plain = '\nsametoken_spec_decode_plain_forwards_total{model_name="embedded",reason="gain"} '
    first, second = read(text), read(text + plain + "1e6\n")
    found = examine(first, second, 1.0, {"model": "embedded", "method": "eagle3", "adaptive": True})
    assert found.verdict == "does not pay"
    assert "is not expected to gain time" in found.reason


def test_a_drafter_that_takes_most_of_the_time(ours: Running) -> None:
    text = ours.client.get("/metrics", headers={"Authorization": "Bearer k"}).text
    name = 'sametoken_engine_step_seconds_total{model_name="embedded",part="'
    lines = [line for line in text.splitlines() if not line.startswith(name)]
    slow = "\n".join([*lines, f'{name}draft"}} 80', f'{name}verify"}} 15', f'{name}other"}} 5', ""])
    found = examine(read(slow), read(slow), 1.0, {"model": "embedded", "method": "eagle3"})
    assert found.draft_share == 0.8
    assert found.verdict == "does not pay"
    assert "drafting takes 80% of the time: at most" in found.reason
    assert any("take a smaller draft" in each for each in found.advice)
