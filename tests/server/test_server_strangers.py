"""Strangers' requests and what the server keeps of them: stuck jobs, prompts in logs, keys that are none."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM, ConfigError
from sametoken.commands.serve import server_config
from sametoken.files import json_object
from sametoken.server import threads
from sametoken.server.prompts import Prompts
from sametoken.server.text_request import TextRequest
from sametoken.server.threads import MOST, SideWork
from server_checks import Running, running

SECRET = "bananarama"
ENUM = {"name": "a", "schema": {"enum": ["a", "b"]}}
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target, max_batch_size=4)


@pytest.fixture
def served(llm: LLM) -> Iterator[Running]:
    with running(llm) as server:
        yield server


@pytest.mark.parametrize("work", SideWork)
def test_stuck_jobs_of_unknown_length_stop_neither_tokenize_nor_long_prompts(served: Running, work: SideWork) -> None:
    go_on = threading.Event()
    pool = threads._pool(work)
    try:
        for _ in range(work.value + MOST):
            pool.submit(go_on.wait, 30)
        begin = time.monotonic()
        assert served.post("/tokenize", {"prompt": "a" * 30_000}).json()["count"] == 30_000
        assert served.post("/v1/completions", {"prompt": [5] * 60, "max_tokens": 1, "user": "x" * 20_000}).is_success
        assert time.monotonic() - begin < 20
        assert not go_on.is_set()
    finally:
        go_on.set()


def test_a_queued_grammar_is_dropped_with_its_request(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, made = threading.Event(), list[str]()
    make = Prompts.make

    def noted(self: Prompts, asked: TextRequest) -> Any:
        made.append(str(asked.user))
        return make(self, asked)

    monkeypatch.setattr(Prompts, "make", noted)
    pool, work = threads._pool(SideWork.GRAMMAR), SideWork.GRAMMAR
    formed = {"prompt": "a", "max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": ENUM}}
    try:
        for _ in range(work.value):
            pool.submit(go_on.wait, 30)
        with pytest.raises(httpx.ReadTimeout):
            served.post("/v1/completions", {**formed, "user": "gone"}, timeout=0.3)
        time.sleep(0.3)
    finally:
        go_on.set()
    assert served.post("/v1/completions", {**formed, "user": "there"}).is_success
    assert made == ["there"]


def test_a_tokenizer_of_unknown_cost_does_not_hold_the_event_loop(
    tiny_pair: Pair, tmp_path: Path, one_thread: None
) -> None:
    model = Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))
    content = json_object(model / "tokenizer.json")
    content["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(z?){40}zz*z*y|(z|zz)*y|q"}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(content))
    with running(LLM(str(model))) as server:
        assert server.post("/v1/completions", {"prompt": "ab", "max_tokens": 1}).is_success
        with ThreadPoolExecutor() as pool:
            reply = pool.submit(server.post, "/v1/completions", {"prompt": "z" * 60, "max_tokens": 1})
            waits = []
            while not reply.done():
                begin = time.monotonic()
                assert server.get("/health").is_success
                waits.append(time.monotonic() - begin)
        assert reply.result().status_code == 400
        assert "the tokenizer" in reply.result().text
        assert len(waits) > 10
        assert max(waits) < 1


@pytest.mark.parametrize("given", [",", " , ", ",,"])
def test_a_variable_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("SAMETOKEN_API_KEY", given)
    with pytest.raises(ConfigError, match="which has no key; set it to keys with commas between, or unset it"):
        server_config({"api_key": ()})


def test_no_text_of_a_request_is_logged(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 1}), ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": SECRET}), ("/v1/completions", {"prompt": SECRET * 90, "max_tokens": 1}),
        ("/v1/completions", {"prompt": SECRET, "regex": SECRET, "max_tokens": 1}),
        ("/v1/completions", {"prompt": SECRET, SECRET: 1}),
    ]  # fmt: skip
    statuses = {served.post(path, body).status_code for path, body in bodies}
    assert statuses == {200, 400}
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("sametoken")]
    assert ours
    assert not any(SECRET in line for line in ours)
