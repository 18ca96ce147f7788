"""Fields that vLLM's clients send, and what they find in replies, lists and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli_checks import Pair
from sametoken import LLM
from server_checks import MODEL, Running, openai_client, running, with_template

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "seed": 7, "temperature": 0.9, "max_tokens": 9, "ignore_eos": True,
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    drafts = {"max_draft_len": 3, "adaptive": False}
    llm = LLM(target, tiny_pair.draft, drafts, max_batch_size=8, kv_cache={"tokens_per_block": 16})
    with running(llm, {"model": "path/of/tiny"}, served_model_name=[MODEL]) as server:
        yield server


def replied(served: Running, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    reply = served.post(path, body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def test_a_model_has_its_root(served: Running) -> None:
    (model,) = served.get("/v1/models").json()["data"]
    assert (model["root"], model["parent"]) == ("path/of/tiny", None)


def test_ids_begin_as_the_clients_expect(served: Running) -> None:
    assert replied(served, {"input": "hi", "max_output_tokens": 2}, "/v1/responses")["id"].startswith("resp_")
    body = {"messages": CHAT["messages"], "max_tokens": 2}
    assert replied(served, body, "/v1/messages")["id"].startswith("msg_")


def test_a_required_call_has_its_own_schema_whatever_else_is_asked(served: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "no"}}}
    asked = {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "ignore_eos": False}
    plain = replied(served, asked)["choices"][0]["message"]["tool_calls"]
    formed = replied(served, {**asked, "response_format": form})["choices"][0]["message"]["tool_calls"]
    assert [call["function"] for call in formed] == [call["function"] for call in plain]


def test_a_seed_has_64_bits(served: Running) -> None:
    for seed, word in ((-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")):
        error = served.post("/v1/chat/completions", {**CHAT, "seed": seed}).json()["error"]
        assert (error["param"], error["code"]) == ("seed", word)
    replied(served, {**CHAT, "seed": 2**63 - 1})


def test_the_last_message_is_echoed_if_it_is_the_assistants(served: Running) -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": "I am"}]
    body = {**CHAT, "messages": said, "continue_final_message": True, "add_generation_prompt": False, "n": 2}
    plain = [choice["message"]["content"] for choice in replied(served, body)["choices"]]
    whole = [choice["message"]["content"] for choice in replied(served, {**body, "echo": True})["choices"]]
    assert whole == [f"I am{text}" for text in plain]
    parts = events(served.post("/v1/chat/completions", {**body, "echo": True, "stream": True}))
    for place, text in enumerate(whole):
        own = [event["choices"][0] for event in parts if event["choices"][0]["index"] == place]
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
    assert (
        replied(served, {**CHAT, "echo": True})["choices"][0]["message"]
        == replied(served, CHAT)["choices"][0]["message"]
    )


def test_tokens_that_are_named_are_scored(served: Running) -> None:
    ids = [9, 3, 5]
    body = {**CHAT, "logprobs": True, "logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    whole = replied(served, {**body, "top_logprobs": 3})["choices"][0]["logprobs"]["content"]
    every = {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": -1, "return_tokens_as_token_ids": True}
    all_of_them = replied(served, every)["choices"][0]["logprobs"]["content"]
    for item, known in zip(whole, all_of_them, strict=False):
        scores = {top["token"]: top["logprob"] for top in known["top_logprobs"]}
        assert item["token"] == known["token"]
        listed = [f"token_id:{token}" for token in ids]
        expected = listed if item["token"] in listed else [item["token"], *listed]  # its own token is always told
        assert [(top["token"], top["logprob"]) for top in item["top_logprobs"]] == [
            (token, pytest.approx(scores[token])) for token in expected
        ]
    text = {
        "prompt": "abc",
        "max_tokens": 2,
        "logprobs": 0,
        "logprob_token_ids": ids,
        "return_tokens_as_token_ids": True,
    }
    tops = replied(served, text, "/v1/completions")["choices"][0]["logprobs"]["top_logprobs"]
    assert all({f"token_id:{token}" for token in ids} <= top.keys() for top in tops)
    for wrong in ({"logprob_token_ids": ids}, {"logprobs": True, "logprob_token_ids": [10**6]}):
        assert served.post("/v1/chat/completions", {**CHAT, **wrong}).json()["error"]["param"] == "logprob_token_ids"


def test_tools_are_counted_by_tokenize(served: Running) -> None:
    plain = replied(served, {"messages": CHAT["messages"]}, "/tokenize")
    assert replied(served, {"messages": CHAT["messages"], "tools": [TOOL]}, "/tokenize")["count"] == plain["count"] + 4


def test_the_output_config_of_a_message_is_kept(served: Running) -> None:
    body = {"messages": CHAT["messages"], "max_tokens": 40, "seed": 3}
    form = {"type": "json_schema", "schema": PARAMETERS}
    said = replied(served, {**body, "output_config": {"format": form}}, "/v1/messages")
    assert json.loads(said["content"][0]["text"]) == {"a": 1}
    count = replied(served, {"messages": CHAT["messages"]}, "/v1/messages/count_tokens")["input_tokens"]
    effort = {"messages": CHAT["messages"], "output_config": {"effort": "low"}}
    assert replied(served, effort, "/v1/messages/count_tokens")["input_tokens"] == count + len("low")


def test_what_is_put_into_the_cache_is_told(served: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a new prompt of some length"}], "max_tokens": 1, "stream": True}
    for kept, read in ((32, 0), (0, 32)):
        told = events(served.post("/v1/messages", body))
        usage = next(event["usage"] for event in told if event["type"] == "message_delta")
        assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (kept, read)
        assert told[0]["message"]["usage"]["input_tokens"] == usage["input_tokens"] + kept + read


def test_dashboards_of_vllm_find_what_they_read(tiny_pair: Pair) -> None:
    with running(LLM(tiny_pair.target, max_batch_size=2, kv_cache={"max_tokens": 512}), max_queue=0) as server:
        for _ in range(3):
            replied(server, {"prompt": [1, 2, 3, 4], "max_tokens": 5, "ignore_eos": True, "n": 2}, "/v1/completions")
        text = server.get("/metrics").text
    found = {
        (sample.name, sample.labels.get("reason", "")): sample
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip
    assert found["vllm:iteration_tokens_total_sum", ""].value == 3 * 2 * (4 + 5)
    assert found["vllm:iteration_tokens_total_count", ""].value <= 3 * 6
    assert found["vllm:request_num_preemptions_count", ""].value == 6
    assert found["vllm:request_num_preemptions_sum", ""].value == 0
    assert found["vllm:num_requests_waiting_by_reason", "capacity"].value == 0
    assert found["vllm:admission_rejections_total", "max_num_queued_reqs"].value == 0
    labels = found["vllm:cache_config_info", ""].labels
    assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == int(labels["kv_cache_size_tokens"])
    assert float(labels["kv_cache_max_concurrency"]) > 0


def test_official_clients_may_leave_out_what_is_not_set(served: Running) -> None:
    client = openai_client(served)
    reply = client.chat.completions.create(
        model=MODEL, messages=CHAT["messages"], max_tokens=3, extra_body={"echo": None}
    )
    assert reply.choices[0].message.role == "assistant"


def test_a_salt_keeps_computed_prompts_apart(served: Running) -> None:
    def cached(**more: Any) -> int:
        body = {"prompt": "some words that nobody has sent before", "max_tokens": 2, **more}
        return int(replied(served, body, "/v1/completions")["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert cached() == cached(cache_salt="a") == cached(cache_salt="b") == 32
    assert served.post("/v1/completions", {"prompt": "a", "cache_salt": ""}).status_code == 400


def test_the_tokenizers_class_is_told(served: Running) -> None:
    assert served.get("/tokenizer_info").json()["tokenizer_class"].endswith("Fast")


def test_a_template_is_taken_from_requests_only_where_the_server_trusts_them(served: Running, tiny_pair: Pair) -> None:
    body = {"messages": CHAT["messages"], "chat_template": "{{ documents[0].text }}", "documents": [{"text": "abcd"}]}
    error = served.post("/tokenize", body).json()["error"]
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    with running(LLM(tiny_pair.target), trust_request_chat_template=True) as trusting:
        assert replied(trusting, body, "/tokenize")["count"] == 4
        assert replied(trusting, {**CHAT, **body})["usage"]["prompt_tokens"] == 4
        refused = trusting.post("/v1/chat/completions", {**CHAT, "chat_template": "{% if messages %}"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        assert "line 1" in refused.json()["error"]["message"]


def test_a_server_may_tell_more_than_requests_ask_for(tiny_pair: Pair) -> None:
    settings = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    with running(LLM(tiny_pair.target), **settings) as server:
        body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True, "logprobs": 1}
        *told, last = events(server.post("/v1/completions", {**body, "stream": True}))
        assert [event["usage"]["completion_tokens"] for event in told] == [1, 2, 3, 4]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
        for asked, numbered in ((None, True), (True, True), (False, False)):
            body["return_tokens_as_token_ids"] = asked
            tokens = replied(server, body, "/v1/completions")["choices"][0]["logprobs"]["tokens"]
            assert all(token.startswith("token_id:") == numbered for token in tokens)


BATCH = "/v1/chat/completions/batch"


def test_a_batch_of_conversations_has_the_reply_of_each(served: Running) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("hi", "who is there?", "hi")]
    asked = {**CHAT, "return_token_ids": True, "prompt_logprobs": 0, "logprobs": True, "top_logprobs": 2}
    alone = [replied(served, {**asked, "messages": talk}) for talk in talks]
    batch = replied(served, {**asked, "messages": talks}, BATCH)
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    for choice, reply in zip(batch["choices"], alone, strict=True):
        (expected,) = reply["choices"]
        about = {name: reply[name] for name in ("prompt_token_ids", "prompt_logprobs")}
        assert choice == {**expected, **about, "index": choice["index"]}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(reply["usage"][name] for reply in alone)


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"messages": CHAT["messages"]}, "messages.0"),
        ({"messages": []}, "messages"),
        ({"messages": [CHAT["messages"], []]}, "messages.1"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_a_batch_does_not_take_is_named(served: Running, fields: dict[str, Any], at_fault: str) -> None:
    refusal = served.post(BATCH, {**CHAT, "messages": [CHAT["messages"]] * 2, **fields})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, at_fault)
    assert served.llm.engine.load.running == 0


def test_a_batch_that_cannot_be_served_leaves_nothing_behind(served: Running) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    assert served.post(BATCH, {**CHAT, "messages": [CHAT["messages"], long]}).status_code == 400
    load = served.llm.engine.load
    assert (load.running, load.waiting) == (0, 0)


TIMES = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "tokens_per_second", "mean_itl_ms"}


def test_a_reply_tells_its_times_where_the_server_is_asked_to(served: Running, tiny_pair: Pair) -> None:
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}
    assert "metrics" not in replied(served, body, "/v1/completions")
    with running(LLM(tiny_pair.target), enable_per_request_metrics=True) as server:
        told = replied(server, body, "/v1/completions")["metrics"]
        assert told.keys() == TIMES
        assert all(value >= 0 for value in told.values())
        seconds = 1e-3 * (told["time_to_first_token_ms"] + told["generation_time_ms"])
        assert told["tokens_per_second"] == pytest.approx(4 / seconds)
        assert told["mean_itl_ms"] == pytest.approx(told["generation_time_ms"] / 3)
        assert replied(server, {**body, "max_tokens": 1}, "/v1/completions")["metrics"].keys() == TIMES - {
            "mean_itl_ms"
        }
        assert "metrics" not in replied(server, {**body, "n": 2}, "/v1/completions")
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *others, last = events(server.post("/v1/completions", streamed))
        assert last["metrics"].keys() == TIMES
        assert not any("metrics" in event for event in others)
