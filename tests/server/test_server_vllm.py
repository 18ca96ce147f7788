"""What clients of vLLM and OpenAI expect of replies beyond their text: chunks, nulls, numbers of tokens, usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM
from server_checks import Running, running

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "seed": 7, "temperature": 0.9, "max_tokens": 9, "ignore_eos": True,
}  # fmt: skip
TEXT: dict[str, Any] = {"prompt": "abc abc", "seed": 7, "temperature": 0.9, "max_tokens": 9, "ignore_eos": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None) -> Iterator[Running]:
    llm = LLM(tiny_pair.target, tiny_pair.draft, {"max_draft_len": 3, "adaptive": False}, max_batch_size=8)
    with running(llm) as server:
        yield server


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(served: Running, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
    return events(served.post(path, {**body, "stream": True}))


def replied(served: Running, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    reply = served.post(path, body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize("n", [1, 2])
def test_no_text_stands_beside_the_reason_that_a_choice_ended(served: Running, n: int) -> None:
    body = {**CHAT, "n": n, "logprobs": True, "return_token_ids": True, "speculative": {"steps": True}}
    whole = replied(served, body)
    choices = [event["choices"][0] for event in streamed(served, body)]
    for place in range(n):
        own = [choice for choice in choices if choice["index"] == place]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}
        said = whole["choices"][place]
        assert "".join(choice["delta"].get("content", "") for choice in own) == said["message"]["content"]
        assert [token for choice in own[1:] for token in choice["token_ids"]] == said["token_ids"]
        scored = [item for choice in own if choice["logprobs"] for item in choice["logprobs"]["content"]]
        assert scored == said["logprobs"]["content"]
        reports = [choice["speculative"] for choice in own[1:]]
        assert [step for part in reports for step in part["steps"]] == said["speculative"]["steps"]
        assert reports[-1]["stats"].keys() == said["speculative"]["stats"].keys()


def test_a_stream_has_usage_as_vllm_has_it(served: Running) -> None:
    told = [event["usage"] for event in streamed(served, {**CHAT, "n": 2, "stream_options": USAGE})]
    assert [usage["completion_tokens"] for usage in told[:2]] == [0, 0]
    assert told[-2]["completion_tokens"] == 9  # of its own choice
    assert told[-1]["completion_tokens"] == 18
    assert all(usage["prompt_tokens"] == told[-1]["prompt_tokens"] for usage in told)
    told = [event["usage"] for event in streamed(served, {**CHAT, "stream_options": {"include_usage": True}})]
    assert set(map(str, told[:-1])) == {"None"}
    for options in ({"include_usage": False, "continuous_usage_stats": True}, {"include_usage": None}, {}):
        assert not any("usage" in event for event in streamed(served, {**CHAT, "stream_options": options}))
        assert not any(
            "usage" in event for event in streamed(served, {**TEXT, "stream_options": options}, "/v1/completions")
        )


def test_ids_of_tokens_are_told_or_null(served: Running) -> None:
    plain = replied(served, CHAT)
    assert (plain["prompt_token_ids"], plain["prompt_logprobs"]) == (None, None)
    assert plain["choices"][0]["token_ids"] is None
    choice = replied(served, TEXT, "/v1/completions")["choices"][0]
    assert [choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    whole = replied(served, {**CHAT, "return_token_ids": True})
    first, *others = streamed(served, {**CHAT, "return_token_ids": True})
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_token_ids" in event for event in others)
    assert [id_ for event in others for id_ in event["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]


def test_tokens_are_told_as_numbers(served: Running) -> None:
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = replied(served, {**CHAT, **more, "logprobs": True, "top_logprobs": 2})["choices"][0]
    items = choice["logprobs"]["content"]
    assert [item["token"] for item in items] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for item in items for top in item["top_logprobs"])
    body = {**TEXT, **more, "logprobs": 2, "echo": True}
    choice = replied(served, body, "/v1/completions")["choices"][0]
    named = [f"token_id:{token}" for token in [*choice["prompt_token_ids"], *choice["token_ids"]]]
    assert choice["logprobs"]["tokens"] == named
    best = choice["logprobs"]["top_logprobs"][1:]
    assert all(key.startswith("token_id:") for top in best for key in top)
    assert [next(iter(top)) for top in best] == named[1:]  # the token itself, then the best ones
    parts = [event["choices"][0]["logprobs"] for event in streamed(served, body, "/v1/completions")]
    assert [token for part in parts for token in part["tokens"]] == named


def test_minus_one_is_the_whole_vocabulary(served: Running) -> None:
    size = served.llm.config.vocab_size
    body = {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
    reply = replied(served, body)
    assert all(len(item["top_logprobs"]) == size for item in reply["choices"][0]["logprobs"]["content"])
    assert all(item is None or len(item) == size for item in reply["prompt_logprobs"])
    choice = replied(served, {**TEXT, "max_tokens": 2, "logprobs": -1, "echo": True}, "/v1/completions")["choices"][0]
    assert all(top is None or len(top) > 20 for top in choice["logprobs"]["top_logprobs"])
    refused = served.post("/v1/completions", {**TEXT, "logprobs": -2})
    assert refused.json()["error"]["param"] == "logprobs"


def test_the_whole_vocabulary_is_told_for_few_tokens(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sametoken.server.prompts.MOST_SCORES", 3 * served.llm.config.vocab_size)
    for body, name in (({"logprobs": -1}, "logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs")):
        refused = served.post("/v1/completions", {**TEXT, **body})
        assert refused.status_code == 400
        assert (refused.json()["error"]["param"], "at most 3 tokens" in refused.text) == (name, True)


def test_errors_have_the_words_that_clients_of_vllm_look_for(served: Running) -> None:
    for seed, word in ((-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")):
        error = served.post("/v1/chat/completions", {**CHAT, "seed": seed}).json()["error"]
        assert (error["code"], error["message"].endswith(f" ({word})")) == (word, True)
    error = served.post("/v1/completions", {**TEXT, "prompt": None, "prompt_embeds": []}).json()["error"]
    assert error["param"] == "prompt_embeds"
    assert "Either prompt or prompt_embeds must be provided and non-empty." in error["message"]
    assert replied(served, {**TEXT, "prompt_embeds": None}, "/v1/completions")


def test_an_error_about_a_token_id_names_the_size_of_the_vocabulary(served: Running) -> None:
    size = served.llm.config.vocab_size
    refused = served.post("/v1/chat/completions", {**CHAT, "logit_bias": {str(size + 1): 1.0}})
    assert refused.status_code == 400
    assert f"got token id {size + 1}, expected 0 .. {size - 1}: the target has {size} tokens" in refused.text
