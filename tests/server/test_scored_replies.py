"""Replies with many log-probabilities: a thread writes them, and they are equal to those of the event loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.server import chat_words, completion_words, scored_reply
from sametoken.server.scored_reply import PIECE, encoded, encoded_in_pieces
from server_checks import Running, running


@pytest.mark.parametrize(
    "value",
    [
        {}, [], "é\n", None, [[]], {"a": {}}, {"a": [1, {"b": [None, 0.5]}], 'q"': "é"},
        [{"at": each, "in": [each] * 3} for each in range(2 * PIECE + 1)],
        {str(each): {"logprob": -each / 3} for each in range(PIECE + 1)},
        {"choices": [{"top": {f"é{each}": each for each in range(PIECE)}}, list(range(PIECE + 2))]},
    ],
)  # fmt: skip
def test_json_in_pieces_is_the_json_of_the_whole(value: Any) -> None:
    assert encoded_in_pieces(value) == encoded(value)
    assert json.loads(encoded_in_pieces(value)) == value


TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": -1}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", TALK),
    "a batch": ("/v1/chat/completions/batch", {**TALK, "messages": [TALK["messages"]] * 2}),
    "text": ("/v1/completions", {"prompt": "abc", "logprobs": -1}),
    "a prompt": ("/v1/completions", {"prompt": "abc", "prompt_logprobs": -1}),
}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None) -> Any:
    with running(LLM(tiny_pair.target)) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "streams"), [*((name, False) for name in ASKED), *((name, True) for name in ASKED if name != "a batch")]
)
def test_many_log_probabilities_are_written_beside_the_event_loop(
    served: Running, name: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = set[str]()

    def noted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            writers.add(threading.current_thread().name)
            return function(*args)

        return call

    for module, function in (
        (chat_words, "chat_logprobs"), (completion_words, "text_logprobs"), (completion_words, "prompt_logprobs")
    ):  # fmt: skip
        monkeypatch.setattr(module, function, noted(getattr(module, function)))
    path, body = ASKED[name]
    found = []
    for most in (10**9, 0):
        monkeypatch.setattr(scored_reply, "MANY", most)
        body = {**body, "max_tokens": 4, "ignore_eos": True, "seed": 7, "stream": streams, "request_id": "one"}
        reply = served.post(path, body)
        assert reply.status_code == 200, reply.text
        found.append(reply.text)
        assert (writers == {"sametoken-aside"}) is not bool(most), writers
        writers.clear()
    if not streams:
        first, second = ({**json.loads(text), "created": 0, "id": ""} for text in found)
        del first["usage"], second["usage"]  # the second prompt is cached
        assert first == second
