"""Our workers behind Dynamo's frontend: `make test-dynamo` brings ai-dynamo; without it these tests are skipped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dynamo_stack import PYTHON, QUIET, Stack, Worker, ports, stack, total, wait_until

from sametoken import LLM, SamplingParams

REASON = "" if PYTHON else "ai-dynamo has an environment of its own: make test-dynamo"
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

DOCUMENT = {  # the request of Dynamo's document
    "messages": [{"role": "user", "content": "Write a poem about why Sakura trees are beautiful."}],
    "max_tokens": 250,
}
# As its launch script states them, for the embedded head.
OPTIONS = (
    "--model", "embedded", "--enforce-eager", "--gpu-memory-utilization", "0.8", "--speculative_config",
    '{"model": "embedded-eagle3", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2, "method": "eagle3"}',
    "--threads", "1", "--no-adaptive",
)  # fmt: skip
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a long story about a dog."}],
    "max_tokens": 900,
    "ignore_eos": True,
}
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "seed": 7}
PENALISED = {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers that share the load."""
    with stack(tmp_path_factory.mktemp("pair"), 2, *OPTIONS) as found:
        yield found


def test_the_request_of_the_document_is_answered(pair: Stack) -> None:
    answer = pair.post("chat/completions", DOCUMENT)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].strip()
    assert 0 < answer.json()["usage"]["completion_tokens"] <= 250


@pytest.mark.parametrize("options", [GREEDY, SEEDED])
def test_text_is_that_of_our_own_engine(pair: Stack, llm: LLM, options: dict[str, Any]) -> None:
    body = DOCUMENT | options
    (own,) = llm.chat(body["messages"], SamplingParams(max_tokens=250, **options))
    streamed = pair.stream(body)
    whole = pair.post("chat/completions", body).json()["choices"][0]["message"]["content"]
    assert whole.lstrip() == own.text  # the frontend keeps the space of a first word
    assert streamed.text == whole
    assert streamed.tokens == len(own.token_ids)
    assert streamed.events < streamed.tokens, "no event has the tokens of an accepted draft"
    prompt = llm.tokenizer.encode("Once upon", add_special_tokens=False)  # as the frontend reads it
    (own,) = llm.generate([prompt], SamplingParams(max_tokens=30, **options))
    answer = pair.post("completions", {"prompt": "Once upon", "max_tokens": 30, **options}).json()
    assert answer["choices"][0]["text"].lstrip() == own.text.lstrip()


def test_logprobs_stops_and_forms(pair: Stack, llm: LLM) -> None:
    body = {**DOCUMENT, **GREEDY, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    (own,) = llm.chat(body["messages"], SamplingParams(temperature=0, max_tokens=8, logprobs=2))
    assert own.logprobs is not None
    said = pair.post("chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in said] == pytest.approx([each.logprob for each in own.logprobs], abs=1e-3)
    assert all(len(each["top_logprobs"]) == 2 for each in said)
    (own,) = llm.chat(body["messages"], SamplingParams(temperature=0, max_tokens=60))
    word = own.text.split()[5]
    stopped = pair.stream({**DOCUMENT, **GREEDY, "stop": [word]})
    assert stopped.text.lstrip() == own.text[: own.text.index(word)]
    assert stopped.reason == "stop"
    formed = pair.post("chat/completions", {**DOCUMENT, "guided_regex": "[0-9]{4}"}).json()["choices"][0]
    assert formed["message"]["content"].isdigit()
    assert len(formed["message"]["content"]) == 4


def test_what_a_worker_cannot_do_is_said(pair: Stack) -> None:
    answer = pair.post("completions", {"prompt": "Once upon", "n": 2})
    assert answer.status_code == 400
    assert answer.json()["message"].startswith("n: got 2, which this worker does not support")
    answer = pair.post("completions", {"prompt": [1, 2, 99999], "max_tokens": 3})
    assert answer.status_code == 400


def test_workers_share_the_load_and_both_metrics_are_there(pair: Stack) -> None:
    before = [worker.value("sametoken_request_success_total") for worker in pair.workers]
    for number in range(8):
        assert pair.post("completions", {"prompt": f"Story {number}", "max_tokens": 20}).status_code == 200
    after = [worker.value("sametoken_request_success_total") for worker in pair.workers]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4]
    front = httpx.get(f"{pair.url}/metrics").text
    assert total(front, "dynamo_frontend_requests_total") >= 8
    for worker in pair.workers:
        text = worker.metrics()
        assert total(text, "dynamo_component_requests_total") >= 4
        drafts, accepted, emitted = (
            total(text, f"vllm:{name}_total")
            for name in ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens", "generation_tokens")
        )
        assert 0 < accepted < emitted
        assert 1 < 1 + accepted / drafts <= 3  # drafts of 2 tokens
        assert total(text, "dynamo_component_total_blocks") > 0


def test_a_client_that_goes_away_frees_the_pages(pair: Stack) -> None:
    body = {**LONG, "model": "embedded", "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)
        worker = pair.busy()
        assert worker.value("sametoken_kv_cache_usage_perc") > 0
    wait_until(lambda: not worker.value("sametoken_num_requests_running"), seconds=5)
    assert worker.value("sametoken_kv_cache_usage_perc") == 0
    wait_until(lambda: worker.value("dynamo_component_gpu_cache_usage_percent") == 0, seconds=5)
    assert worker.value("sametoken_generation_tokens_total") < 900 + worker.value("sametoken_prompt_tokens_total")


def ended_in_the_middle(found: Stack, how: signal.Signals, body: dict[str, Any]) -> Worker:
    """Ends the worker that streams; the client must see nothing of it."""
    undisturbed = found.stream(body)
    ended: list[Worker] = []

    def at(events: int) -> None:
        if events == 5:
            ended.append(found.busy())
            os.kill(ended[0].process, how)

    assert found.stream(body, at) == undisturbed._replace(events=pytest.approx(undisturbed.events, rel=0.9))
    assert undisturbed.tokens == LONG["max_tokens"]
    return ended[0]


def test_a_stream_goes_on_when_its_worker_is_killed(tmp_path: Path) -> None:
    with stack(tmp_path, 4, *OPTIONS) as found:
        for options in (GREEDY, SEEDED, PENALISED):
            ended_in_the_middle(found, signal.SIGKILL, LONG | options)
        front = httpx.get(f"{found.url}/metrics").text
        moved = re.findall(
            r'^dynamo_frontend_model_migration_total{migration_type="ongoing_request".* (\d+)$', front, re.M
        )
        assert moved == ["3"]


def test_a_worker_that_is_asked_to_end_drains(tmp_path: Path) -> None:
    with stack(tmp_path, 2, *OPTIONS) as found:
        worker = ended_in_the_middle(found, signal.SIGTERM, LONG | SEEDED)
        wait_until(lambda: not Path(f"/proc/{worker.process}").exists(), found.log)
        assert "Traceback" not in found.log.read_text()
        assert found.post("chat/completions", DOCUMENT).status_code == 200


def test_requests_go_where_their_prefix_is(tmp_path: Path) -> None:
    words = ["the", "dog", "ran", "to", "the", "park", "and", "saw", "a", "cat", "while", "the", "sun", "was", "bright"]

    def ask(url: str, found: Stack, number: int) -> Worker:
        """The worker that answers a prompt of several pages."""
        text = " ".join(words[(each * (number + 1) + number) % len(words)] for each in range(100))
        before = [worker.value("sametoken_request_success_total") for worker in found.workers]
        found._replace(url=url).stream({"messages": [{"role": "user", "content": text}], "max_tokens": 4, **GREEDY})

        def moved() -> list[Worker]:
            after = (worker.value("sametoken_request_success_total") for worker in found.workers)
            return [worker for worker, a, b in zip(found.workers, before, after, strict=True) if b > a]

        wait_until(moved, found.log, 5)
        return moved()[0]

    with stack(tmp_path, 2, *OPTIONS, ROUTER_MODE="kv") as found:
        first = [ask(found.url, found, number) for number in range(6)]
        assert set(first) == set(found.workers)
        # A frontend that has seen none of these requests knows the pages by their events alone.
        port = ports(1)
        words_ = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"]
        store = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        store |= {"DYN_TCP_RESPONSE_STREAM_HOST": "lo", "DYN_TCP_RPC_HOST": "127.0.0.1"}
        store |= {"DYN_FILE_KV": str(next(tmp_path.glob("tmp.*")))}
        with (tmp_path / "second.log").open("w") as out:
            second = subprocess.Popen([PYTHON, *words_], env=found.environ | store, stdout=out, stderr=out)
            try:
                url = f"http://127.0.0.1:{port}"
                log = tmp_path / "second.log"
                wait_until(lambda: not httpx_fails(url) and "embedded" in httpx.get(f"{url}/v1/models").text, log)
                for each in (found.url, url):
                    hits = [worker.value("sametoken_prefix_cache_hits_total") for worker in found.workers]
                    assert [ask(each, found, number) for number in (5, 2, 0, 3, 1, 4)] == [
                        first[number] for number in (5, 2, 0, 3, 1, 4)
                    ]
                    more = [worker.value("sametoken_prefix_cache_hits_total") for worker in found.workers]
                    assert sum(more) - sum(hits) >= 6 * 64
            finally:
                second.terminate()
                second.wait()


def httpx_fails(url: str) -> bool:
    try:
        httpx.get(f"{url}/v1/models")
    except httpx.TransportError:
        return True
    return False


def test_etcd_and_nats_work_too(tmp_path: Path) -> None:
    packages = {"etcd": "etcd-server", "nats-server": "nats-server"}
    if missing := [package for program, package in packages.items() if not shutil.which(program)]:
        pytest.skip(f"missing Debian packages: {' '.join(missing)}")
    etcd = ports(3)
    client, peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{etcd + 1}"
    services = (
        ["etcd", "--data-dir", tmp_path / "etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
         "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
        ["nats-server", "-js", "-a", "127.0.0.1", "-p", str(etcd + 2), "-sd", tmp_path / "nats"],
    )  # fmt: skip
    places = {"ETCD_ENDPOINTS": client, "NATS_SERVER": f"nats://127.0.0.1:{etcd + 2}"}
    with (tmp_path / "services.log").open("w") as out:
        running = [subprocess.Popen(service, stdout=out, stderr=out) for service in services]
        try:
            wait_until(lambda: not httpx_fails(client))
            with stack(tmp_path, 2, *OPTIONS, INFRASTRUCTURE="etcd", ROUTER_MODE="kv", **places) as found:
                assert found.post("chat/completions", DOCUMENT).status_code == 200
                ended_in_the_middle(found, signal.SIGKILL, LONG | SEEDED)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


@pytest.mark.parametrize(
    ("words", "options", "variables"),
    [
        ("etcd does not answer at http://127.0.0.1:9", (), {"ETCD_ENDPOINTS": "http://127.0.0.1:9"}),
        ("NATS does not answer at nats://127.0.0.1:9", ("--discovery-backend", "file", "--event-plane", "nats"),
         {"NATS_SERVER": "nats://127.0.0.1:9"}),
        ("DYN_SYSTEM_PORT={port} on 127.0.0.1 cannot be", ("--discovery-backend", "file"), {"DYN_SYSTEM_PORT": ""}),
        ("there is no directory /nowhere", ("--discovery-backend", "file", "--draft", "/nowhere"), {}),
    ],
)  # fmt: skip
def test_a_worker_that_cannot_start_says_why(
    words: str, options: tuple[str, ...], variables: dict[str, str], pair: Stack, tmp_path: Path
) -> None:
    port = str(pair.workers[0].port)
    environ = os.environ | QUIET | {"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_FILE_KV": str(tmp_path)}
    environ |= {name: value or port for name, value in variables.items()}
    done = subprocess.run(
        [PYTHON, "-m", "sametoken.deploy.dynamo", "--model", "embedded", *options],
        env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: " + words.format(port=port))
    assert "Traceback" not in done.stderr
