"""What web pages may ask of a server without a key: nothing, neither from another origin nor by a name of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cli_checks import Pair
from sametoken import LLM
from server_checks import Running, running

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target)


@pytest.fixture
def served(llm: LLM) -> Iterator[Running]:
    with running(llm, allowed_host=("models.example",)) as server:
        yield server


KINDS = {
    "application/json": 200, "application/json; charset=utf-8": 200, "Application/JSON": 200,
    "application/vnd.api+json": 200, None: 200,
    "text/plain": 415, "application/x-www-form-urlencoded": 415, "multipart/form-data; boundary=x": 415,
    "text/plain; a=application/json": 415, "application/jsonp": 415, "": 415,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_only_json_is_read(served: Running, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = served.client.post("/v1/completions", content=BODY, headers=headers)
    assert answer.status_code == KINDS[kind], answer.text
    if answer.status_code == 415:
        assert "add -H 'Content-Type: application/json'" in answer.json()["error"]["message"]


def test_a_page_may_not_leave_the_type_out(served: Running) -> None:
    answer = served.client.post("/v1/completions", content=BODY, headers={"Origin": "http://pages.example"})
    assert answer.status_code == 415


HOSTS = {
    "localhost": 200, "localhost:8000": 200, "LOCALHOST": 200, "localhost.": 200, "127.0.0.1:1": 200, "[::1]:8000": 200,
    "10.1.2.3": 200, "models.example": 200, "Models.Example:8000": 200,
    "pages.example": 403, "localhost.pages.example": 403, "127.0.0.1.pages.example:8000": 403, "": 403,
    "models.example@pages.example": 403, "[pages.example]": 403,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_only_names_of_this_machine_are_answered(served: Running, host: str) -> None:
    for path in ("/v1/models", "/health"):
        answer = served.client.get(path, headers={"Host": host})
        assert answer.status_code == HOSTS[host], answer.text
        if answer.status_code == 403:
            assert "--allowed-host" in answer.json()["error"]["message"]
    answer = served.client.post("/v1/completions", content=BODY, headers={"Host": host})
    assert answer.status_code == HOSTS[host]


def test_a_key_is_guard_enough(llm: LLM) -> None:
    with running(llm, api_key=("k",)) as server:
        asked = {"Authorization": "Bearer k", "Host": "pages.example", "Content-Type": "text/plain"}
        assert server.client.post("/v1/completions", content=BODY, headers=asked).status_code == 200
        assert server.client.get("/v1/models", headers={"Host": "pages.example"}).status_code == 401


def test_other_addresses_answer_to_any_name(llm: LLM) -> None:
    with running(llm, host="0.0.0.0") as server:
        assert server.client.get("/v1/models", headers={"Host": "models.example"}).status_code == 200
