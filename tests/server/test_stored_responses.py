"""Responses that are kept: what goes on from them, what is made in the background, and how many there are."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from cli_checks import Pair
from sametoken import LLM
from sametoken.server.stored import ResponseStore, StoredResponse
from sametoken.server.text_request import Turn
from server_checks import Gate, Running, openai_client, running, with_template

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
ASKED: dict[str, Any] = {"model": "tiny", "max_output_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    with running(LLM(target), max_stored_responses=16) as server:
        yield server


def test_a_response_goes_on_from_another(served: Running) -> None:
    client = openai_client(served)
    first = client.responses.create(**ASKED, input="one", instructions="Be brief.")
    second = client.responses.create(**ASKED, input="two", instructions="Rhyme.", previous_response_id=first.id)
    for other in (1, 2):  # whoever goes on from it finds it as it was
        third = client.responses.create(**ASKED, input=f"{other}", previous_response_id=second.id)
        turns = [("user", "one"), ("assistant", first.output_text), ("user", "two"),
                 ("assistant", second.output_text), ("user", str(other))]  # fmt: skip
        plain = client.responses.create(**ASKED, input=[{"role": role, "content": text} for role, text in turns])
        assert third.output_text == plain.output_text
        assert third.usage.input_tokens == plain.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert second.previous_response_id == first.id


def test_a_response_that_is_not_kept_is_not_found(served: Running) -> None:
    client = openai_client(served)
    unkept = client.responses.create(**ASKED, input="hi", store=False)
    kept = client.responses.create(**ASKED, input="hi", stream=True)
    id_ = [event for event in kept if event.type in ("response.completed", "response.incomplete")][-1].response.id
    assert client.responses.retrieve(id_).id == id_
    client.responses.delete(id_)
    for gone in (unkept.id, id_):
        with pytest.raises(NotFoundError, match=r"Response with id .* not found\."):
            client.responses.retrieve(gone)
        with pytest.raises(NotFoundError, match=r"not found"):
            client.responses.create(**ASKED, input="hi", previous_response_id=gone)
    with pytest.raises(BadRequestError, match=r"Cannot cancel a synchronous response\."):
        client.responses.cancel(client.responses.create(**ASKED, input="hi").id)


def test_a_response_is_made_in_the_background(served: Running) -> None:
    client = openai_client(served)
    queued = client.responses.create(**ASKED, input="hi", background=True)
    assert queued.status == "queued"
    until = time.monotonic() + 30
    while (found := client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert found.output_text == client.responses.create(**ASKED, input="hi").output_text
    assert client.responses.cancel(queued.id).status == found.status  # too late to change anything
    for more in ({"store": False}, {"stream": True}):
        with pytest.raises(BadRequestError, match="background"):
            client.responses.create(**ASKED, input="hi", background=True, **more)


def test_work_in_the_background_can_be_cancelled(tiny_pair: Pair) -> None:
    llm = LLM(tiny_pair.target)
    gate = Gate(llm)
    with running(llm) as server:
        client = openai_client(server)
        id_ = client.responses.create(model="tiny", input="hi", background=True).id
        with pytest.raises(BadRequestError, match="expected one that is complete"):
            client.responses.create(model="tiny", input="hi", previous_response_id=id_)
        assert client.responses.cancel(id_).status == "cancelled"
        gate.open()
        text = client.completions.create(model="tiny", prompt="a", max_tokens=2)  # nothing holds a place
        assert text.usage is not None
        assert client.responses.retrieve(id_).status == "cancelled"
        assert server.get("/load").json() == {"server_load": 0}


def test_the_oldest_response_leaves_first() -> None:
    def stored(id_: str, size: int = 0) -> StoredResponse:
        return StoredResponse({"id": id_, "status": "completed"}, [Turn("user", "x" * size)])

    store = ResponseStore(2)
    for id_ in "abc":
        store.put(stored(id_))
    with pytest.raises(Exception, match=re.escape("The last 2 are kept")):
        store.find("a", "response_id")
    store.put(stored("d", 2**25))
    store.put(stored("e", 2**25))
    assert store.find("e", "response_id").response["id"] == "e"
    with pytest.raises(Exception, match="not found"):
        store.find("d", "response_id")


def test_responses_under_way_stay() -> None:
    store = ResponseStore(2)
    for id_, status in (("a", "in_progress"), ("b", "completed"), ("c", "queued"), ("d", "queued")):
        store.put(StoredResponse({"id": id_, "status": status}))
    for id_ in "acd":
        store.find(id_, "response_id")
    with pytest.raises(Exception, match="not found"):
        store.find("b", "response_id")


def test_a_response_is_known_to_its_own_key_alone(tiny_pair: Pair) -> None:
    with running(LLM(tiny_pair.target), api_key=["a", "b"]) as server:
        keys = [{"Authorization": f"Bearer {key}"} for key in "ab"]
        body = {"input": "hi", "max_output_tokens": 2, "request_id": "mine"}
        made = [server.post("/v1/responses", body, headers=key).json() for key in keys]
        assert [each["id"] for each in made] == ["resp_mine", "resp_mine"]
        assert server.client.delete("/v1/responses/resp_mine", headers=keys[0]).status_code == 200
        assert server.get("/v1/responses/resp_mine", headers=keys[0]).status_code == 404
        assert server.get("/v1/responses/resp_mine", headers=keys[1]).json()["output"] == made[1]["output"]
