"""Two replicas behind one port: where requests go, what one engine does too, and what a lost replica does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli_checks import Pair, call
from sametoken import LLM
from sametoken.commands.serve import own_gpu
from sametoken.errors import ConfigError
from server_checks import Running, running, wait_until

READY = re.compile(r"ready: (http://\S+?),")
KEY = {"Authorization": "Bearer one"}
TEXT = "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True, "n": 4}


class Served(NamedTuple):
    """The process of a front, its client, and its log."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path

    def children(self) -> list[int]:
        """The processes of its replicas."""
        return [
            int(each) for each in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def health(self) -> Any:
        return self.client.get("/health").json()

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric by replica."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {sample.labels["replica"]: sample.value for sample in samples}


@contextmanager
def served(log: Path, *arguments: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "sametoken.cli", "serve", *arguments, "--dp", "2", "--threads", "2", "--port", "0"]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors)
    try:
        wait_until(lambda: READY.search(log.read_text()) is not None or process.poll() is not None, 120)
        url = READY.search(log.read_text())
        assert url is not None, log.read_text()
        with httpx.Client(base_url=url[1], timeout=60, headers=KEY) as client:
            yield Served(process, client, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("front") / "log"
    with served(log, "--api-key", "one", "--root-path", "/llm", "--max-body", "2000000") as found:
        yield found


@pytest.fixture(scope="module")
def single(one_thread: None) -> Iterator[Running]:
    """One engine of the same model."""
    with running(LLM("embedded", draft="embedded-eagle3"), {"model": "embedded"}, root_path="/llm") as server:
        yield server


def is_running(process: int) -> bool:
    """Whether a process is there and not merely waits for its parent to take notice of its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def events(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


def test_both_replicas_say_what_one_engine_says(front: Served, single: Running) -> None:
    body = {"prompt": "The best of", "max_tokens": 40, "seed": 7, "temperature": 1.0}
    before = front.metric("sametoken_generation_tokens_total")
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: front.client.post(TEXT, json=body).json(), range(6)))
    expected = single.post(TEXT, body).json()["choices"][0]["text"]
    assert {answer["choices"][0]["text"] for answer in answers} == {expected}
    after = front.metric("sametoken_generation_tokens_total")
    assert all(after[replica] > before[replica] for replica in "01")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_streams_of_all_forms_pass_through(front: Served, single: Running, path: str, body: dict[str, Any]) -> None:
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    asked = {**body, limit: 12, "temperature": 0, "stream": True}

    def told(text: str) -> tuple[str, list[str], str]:
        """The text, the names of events, and the end: tokens may be in other chunks."""
        said = "".join(re.findall(r'"(?:text|content|delta)":"((?:[^"\\]|\\.)*)"', text))
        return said, list(dict.fromkeys(re.findall(r"^event: (.*)", text, re.M))), text[-16:]

    ours, theirs = front.client.post(path, json=asked), single.post(path, asked)
    assert told(ours.text) == told(theirs.text)
    assert len(told(ours.text)[0]) > 10
    assert ours.headers["content-type"] == theirs.headers["content-type"]


def test_what_does_not_depend_on_replicas_is_the_same(front: Served, single: Running) -> None:
    assert front.client.get("/openapi.json").json() == single.get("/openapi.json").json()
    assert front.client.get("/llm/").text == single.get("/llm/").text
    for method, path in [("GET", "/nothing"), ("DELETE", "/v1/models"), ("POST", "/health"), ("HEAD", "/v1/models")]:
        ours, theirs = front.client.request(method, path), single.client.request(method, path)
        assert (ours.status_code, ours.text) == (theirs.status_code, theirs.text), path
        assert ours.headers.get("allow") == theirs.headers.get("allow")
    wrong = {"prompt": "a", "colour": 1}
    assert front.client.post(TEXT, json=wrong).json() == single.post(TEXT, wrong).json()
    assert front.client.post("/tokenize", json={"prompt": "abc"}).json()["count"] >= 1


def test_a_prompt_goes_where_its_beginning_is(front: Served) -> None:
    def cached(prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "speculative": {"method": "none"}}
        answer = front.client.post(TEXT, json=body).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    before = front.metric("sametoken_prompt_tokens_total")
    stories = [f"{name} goes to the market and buys bread. " * 16 for name in ("Ada", "Bob", "Eve", "Kim")]
    assert [cached(story) for story in stories] == [0] * 4
    for _ in range(2):
        found = [cached(story + "What then?") for story in stories]
        assert min(found) >= 64, found
    after = front.metric("sametoken_prompt_tokens_total")
    assert all(after[replica] > before[replica] for replica in "01")


def test_metrics_and_load_are_those_of_all_replicas(front: Served) -> None:
    assert front.metric("sametoken_replica_up") == {"0": 1, "1": 1}
    assert front.metric("process_resident_memory_bytes").keys() == {"front", "0", "1"}
    text = front.client.get("/metrics").text
    names = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(names) == len(set(names))
    assert 'vllm:num_requests_running{engine="1",model_name="embedded",replica="1"} 0.0' in text
    info = front.client.get("/server_info").json()
    assert info["server"]["data_parallel_size"] == 2
    assert [each["status"] for each in info["replicas"]] == ["ready", "ready"]
    assert info["load"]["pages"] == sum(each["load"]["pages"] for each in info["replicas"])
    with ExitStack() as open_streams:
        answers = [open_streams.enter_context(front.client.stream("POST", TEXT, json=LONG)) for _ in range(3)]
        streams = [events(answer) for answer in answers]
        for stream in streams:
            next(stream)
        assert front.client.get("/load").json() == {"server_load": 3}
        assert sorted(front.metric("sametoken_replica_open_sequences").values()) == [4, 8]
    wait_until(lambda: front.client.get("/load").json() == {"server_load": 0})  # their clients have gone


def test_keys_and_limits_hold_and_ids_are_kept(front: Served) -> None:
    for path in ("/metrics", "/load", "/server_info", "/v1/models"):
        refused = front.client.get(path, headers={"Authorization": "Bearer two", "X-Request-Id": "mine"})
        assert refused.status_code == 401
        assert refused.headers.get_list("x-request-id") == ["mine"]
    large = front.client.post(TEXT, json={"prompt": "a" * 1_500_000}, headers={"Authorization": "Bearer two"})
    assert large.status_code == 401
    for content in (b"a" * 2_000_001, iter([b"a" * 1_500_000] * 2)):
        too_large = front.client.post(TEXT, content=content)
        assert too_large.json()["error"]["code"] == "body_too_large"
        assert too_large.headers["connection"] == "close"
    health = httpx.get(f"{front.client.base_url}/llm/health", headers={"X-Request-Id": "mine"})
    assert health.json() == {"status": "ok", "replicas": ["ready", "ready"]}
    assert health.headers.get_list("x-request-id") == ["mine"]
    assert front.client.head("/ping").status_code == front.client.post("/ping").status_code == 200
    assert (
        re.search(r"\[replica [01]\] \[named\] 127.0.0.1:\d+ \"GET /version HTTP/1.1\" 200", front.log.read_text())
        is None
    )
    front.client.get("/v1/models", headers={"X-Request-Id": "named"})
    wait_until(
        lambda: (
            re.search(r'\[replica [01]\] \[named\] 127.0.0.1:\d+ "GET /v1/models', front.log.read_text()) is not None
        )
    )


def test_a_replica_that_dies_ends_its_streams_and_is_started_again(front: Served) -> None:
    wait_until(lambda: front.client.get("/load").json() == {"server_load": 0})
    killed = front.children()[0]
    with ExitStack() as open_streams:
        talk = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "stream": True}
        asked = [(TEXT, LONG), ("/v1/messages", talk)] * 2
        answers = [open_streams.enter_context(front.client.stream("POST", path, json=body)) for path, body in asked]
        streams = [events(answer) for answer in answers]
        for stream in streams:
            next(stream)
        os.kill(killed, signal.SIGKILL)
        found = [list(stream) for stream in streams]
    lost = [each for each in found if "ended before the answer was complete" in "".join(each[-2:])]
    assert 1 <= len(lost) < len(found)
    for stream in found:
        if stream not in lost:
            assert "error" not in "".join(stream)
    message = next(json.loads(event) for stream in lost for event in stream if '"error"' in event)["error"]
    assert re.search(r"replica [01] ended", message["message"])
    assert "ready" in front.health()["replicas"]
    wait_until(lambda: front.health()["replicas"] == ["ready", "ready"], 120)
    assert sum(front.metric("sametoken_replica_restarts_total").values()) == 1
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: front.client.post(TEXT, json={"prompt": "a", "max_tokens": 4}), range(2)))
    assert [answer.status_code for answer in done] == [200, 200]
    assert "has ended by signal 9; its open requests got an error" in front.log.read_text()


def test_sigterm_drains_all_replicas_and_leaves_nobody(pair: Pair, tmp_path: Path) -> None:
    with served(tmp_path / "log", pair.target) as front:
        replicas = front.children()
        body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with ExitStack() as open_streams:
            answers = [open_streams.enter_context(front.client.stream("POST", TEXT, json=body)) for _ in range(2)]
            streams = [events(answer) for answer in answers]
            for stream in streams:
                next(stream)
            front.process.send_signal(signal.SIGTERM)
            assert [list(stream)[-1] for stream in streams] == ["[DONE]"] * 2
        assert front.process.wait(30) == 0
        assert not any(map(is_running, replicas))


@pytest.mark.thorough
def test_no_replica_outlives_the_front(pair: Pair, tmp_path: Path) -> None:
    with served(tmp_path / "log", pair.target) as front:
        replicas = front.children()
        assert len(replicas) == 2
        front.process.kill()
        wait_until(lambda: not any(map(is_running, replicas)), 10)


@pytest.mark.thorough
def test_a_model_that_cannot_be_loaded_is_one_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sametoken.cli", "serve", str(tmp_path), "--dp", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        begin = time.monotonic()
        answer = call(capfd, "serve", "--dp", "2", "--port", str(taken.getsockname()[1]))
    assert answer.code == 2
    assert "cannot listen on 127.0.0.1 port" in answer.err
    assert time.monotonic() - begin < 5


def test_ranks_of_a_launcher_are_no_replicas(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    answer = call(capfd, "serve", "--dp", "2", "--tp_size", "2", "--port", "0")
    assert answer.code == 2
    assert "start the command without mpirun" in answer.err


def test_each_replica_has_a_gpu_of_its_own() -> None:
    assert [own_gpu(None, 2, number, 2) for number in range(2)] == ["0", "1"]
    assert [own_gpu("3, GPU-a", 2, number, 2) for number in range(2)] == ["3", "GPU-a"]
    with pytest.raises(ConfigError, match="2: each replica needs a GPU of its own, and 1 can be seen"):
        own_gpu("0", 1, 0, 2)
