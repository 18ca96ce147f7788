"""What llama-server's door switches: metrics, sleep, web origins, and thinking that is not wanted."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.dialects.llama_door import llama_server
from sametoken.errors import ConfigError
from server_checks import Running, running, wait_until, with_template

ASKED = {"prompt": "the quick brown fox jumps over the lazy dog", "seed": 4, "n_predict": 8}


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target, kv_cache={"tokens_per_block": 8})


def sleeps(served: Running) -> bool:
    return bool(served.get("/props").json()["is_sleeping"])


def rates(served: Running) -> list[str]:
    lines = served.get("/metrics").text.splitlines()
    return [line.split()[1] for line in lines if line.startswith("llamacpp:") and "tokens_seconds " in line]


def test_a_server_without_metrics(llm: LLM) -> None:
    with running(llm, metrics=False) as served:
        answer = served.get("/metrics")
        assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
        assert served.get("/props").json()["endpoint_metrics"] is False


def test_an_idle_server_gives_its_memory_back_and_answers_the_same(llm: LLM) -> None:
    with running(llm, any_model=True, sleep_idle_seconds=0.3) as served:
        said = served.post("/completion", ASKED).json()
        again = served.post("/completion", ASKED).json()
        assert again["timings"]["cache_n"] > 0
        wait_until(lambda: sleeps(served))
        wait_until(lambda: llm.engine.scheduler.blocks.idle == 0)
        for path in ("/health", "/models", "/metrics"):
            assert served.get(path).status_code == 200
        assert sleeps(served)  # what tells of the server does not wake it
        woken = served.post("/completion", ASKED).json()
        assert woken["timings"]["cache_n"] == 0
        assert woken["content"] == again["content"] == said["content"]
        assert not sleeps(served)
        wait_until(lambda: sleeps(served))
        served.post("/tokenize", {"content": "x"})
        assert not sleeps(served)


def test_speeds_are_of_the_time_since_they_were_asked(llm: LLM) -> None:
    with running(llm) as served:
        served.post("/completion", ASKED)
        assert all(float(rate) > 0 for rate in rates(served))
        assert rates(served) == ["0", "0"]


def preflight(served: Running, origin: str) -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return served.client.options("/completions", headers=asked)


def test_origins_in_llama_servers_words(llm: LLM) -> None:
    with running(llm, any_model=True, cors_origin=("*",), cors_credentials=True) as served:
        found = preflight(served, "web.mydomain.fr")
        assert found.status_code == 200
        names = [name.decode() for name, _ in found.headers.raw]
        assert "Access-Control-Allow-Origin" in names  # as scripts look for it that compare letter by letter
        assert found.headers["access-control-allow-origin"] == "web.mydomain.fr"
        assert found.headers["access-control-allow-credentials"] == "true"
        assert found.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    for any_model, status in ((True, 200), (False, 400)):
        with running(llm, any_model=any_model, cors_origin=("localhost",)) as served:
            here, there = preflight(served, "http://[::1]:3000"), preflight(served, "http://localhost.evil.com")
            assert here.headers["access-control-allow-origin"] == "http://[::1]:3000"
            assert "access-control-allow-credentials" not in here.headers
            assert there.status_code == status
            assert "access-control-allow-origin" not in there.headers


def test_thinking_that_a_template_opens_is_closed(tiny_pair: Pair, tmp_path: Path) -> None:
    target = with_template(
        tiny_pair.target, tmp_path / "t", "{# </think> #}{{ messages[0].content }}<think>{{ '\\n' }}"
    )
    turns = [{"role": "user", "content": "hi"}]
    with running(LLM(target)) as served:
        for wanted, end in ((False, "hi<think>\n</think>"), (True, "hi<think>\n")):
            asked = {"messages": turns, "chat_template_kwargs": {"enable_thinking": wanted}}
            assert served.post("/apply-template", asked).json()["prompt"] == end
        assert served.post("/apply-template", {"messages": turns}).json()["prompt"] == "hi<think>\n"


def test_words_of_the_door() -> None:
    words = llama_server(["--metrics"], {}).words
    assert words.index("--metrics") > words.index("--no-metrics")
    joined = " ".join(llama_server(["--sleep-idle-seconds", "5", "--no-cors-credentials"], {}).words)
    assert "--sleep-idle-seconds 5" in joined
    assert joined.index("--no-cors-credentials") > joined.index("--cors-credentials")
    assert "--sleep-idle-seconds" not in llama_server(["--sleep-idle-seconds", "-1"], {}).words
    with pytest.raises(ConfigError, match="--sleep-idle-seconds 0"):
        llama_server(["--sleep-idle-seconds", "0"], {})
