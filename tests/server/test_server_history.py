"""What clients send back as history, and fields that ask for nothing, are accepted; typing errors are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cli_checks import Pair
from sametoken import LLM
from sametoken.checkpoint.chat import render, render_open
from sametoken.options.declaration import texts_of_fields
from sametoken.server.chat_schema import ChatMessage, ChatRequest
from sametoken.server.inert import Inert
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.text_request import ToolUse
from server_checks import MODEL, Running, running, with_template

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.city }})"
    "{% endfor %}</s>{% endfor %}{% if reasoning_effort %}{{ reasoning_effort }}{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "seed": 3, "max_tokens": 8}
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Rome"}'}
CALL = {"id": "1", "type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    with running(LLM(target, speculative={"max_draft_len": 4, "adaptive": False})) as server:
        yield server


def rendered(served: Running, messages: list[Any], **more: Any) -> str:
    """The prompt that a conversation becomes."""
    reply = served.post("/tokenize", {"messages": messages, **more})
    assert reply.status_code == 200, reply.text
    return str(served.post("/detokenize", {"tokens": reply.json()["tokens"]}).json()["prompt"])


HISTORY: dict[str, tuple[dict[str, Any], str]] = {
    "openai's dump": (
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": None, "audio": None,
         "function_call": None, "tool_calls": None, "parsed": None},
        "yes",
    ),
    "full of empty things": ({"role": "assistant", "content": "yes", "annotations": [], "images": []}, "yes"),
    "litellm's dump": (
        {"role": "assistant", "content": "yes", "provider_specific_fields": {"refusal": None}, "thinking_blocks": []},
        "yes",
    ),
    "thinking": ({"role": "assistant", "content": "yes", "reasoning_content": "well"}, "yes(well)"),
    "thinking, as vllm calls it": ({"role": "assistant", "content": "yes", "reasoning": "well"}, "yes(well)"),
    "thinking alone": ({"role": "assistant", "content": None, "reasoning_content": "well"}, "(well)"),
    "an empty reply": ({"role": "assistant", "content": None, "tool_calls": []}, "assistant: "),
    "a refusal": ({"role": "assistant", "content": None, "refusal": "no"}, "no"),
    "a refusal as a part": ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    "a call from a stream": (
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
            {**CALL, "index": 0, "function": {**FUNCTION, "parsed_arguments": {"city": "Rome"}}}]},
        "weather(Rome)",
    ),
    "litellm's call": (
        {"role": "assistant", "content": "", "tool_calls": [
            {**CALL, "provider_specific_fields": {}, "caller": None, "function": {
                **FUNCTION, "provider_specific_fields": None}}]},
        "weather(Rome)",
    ),
    "the older form of a call": ({"role": "assistant", "content": None, "function_call": FUNCTION}, "weather(Rome)"),
    "a client's own fields": (
        {"role": "assistant", "content": "yes", "id": 7, "createdAt": "today", "tool_calls": [
            {**CALL, "state": {}, "function": {**FUNCTION, "cached": True}}]},
        "weather(Rome)",
    ),
    "another role": ({"role": "critic", "content": "hm"}, "critic: hm"),
    "a call without a type": ({"role": "assistant", "tool_calls": [{**CALL, "type": None}]}, "weather(Rome)"),
}  # fmt: skip


@pytest.mark.parametrize("case", HISTORY)
def test_history_of_clients_is_accepted_and_rendered(served: Running, case: str) -> None:
    message, shown = HISTORY[case]
    body = {**ASKED, "messages": [USER, message, USER]}
    assert served.post("/v1/chat/completions", body).status_code == 200
    assert shown in rendered(served, [USER, message])


def test_a_reply_is_accepted_as_history_as_it_came(served: Running) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for more in ({}, {"tools": tools, "tool_choice": "required", "max_tokens": 60}):
        said = served.post("/v1/chat/completions", {**ASKED, **more, "messages": [USER]}).json()
        again = [USER, said["choices"][0]["message"], USER]
        assert served.post("/v1/chat/completions", {**ASKED, "messages": again}).status_code == 200
        response = served.post("/v1/responses", {"input": "hi", "max_output_tokens": 9, "seed": 1}).json()
        items = [{"role": "user", "content": "hi"}, *response["output"], {"role": "user", "content": "more"}]
        assert served.post("/v1/responses", {"input": items, "max_output_tokens": 3}).status_code == 200


def test_items_that_the_assistant_made_in_a_row_are_one_turn() -> None:
    call: dict[str, Any] = {
        "type": "function_call",
        "name": "f",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "well"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": None,
         "content": [{"type": "output_text", "text": "I look", "annotations": [], "logprobs": []}]},
        {**call, "call_id": "1", "namespace": None, "parsed_arguments": {}},
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": None},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]  # fmt: skip
    talk = ResponsesRequest.model_validate_json(json.dumps({"input": items})).request.conversation
    assert talk is not None
    turns = [turn.for_template() for turn in talk.turns]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert turns[1]["reasoning_content"] == "well"
    assert turns[1]["content"] == "I look"
    assert [made["id"] for made in turns[1]["tool_calls"]] == ["1", "2"]
    assert [turn["content"] for turn in turns[2:]] == ["a", "b", "done", "really"]


VALUES: dict[str, Any] = {
    "user": "u", "safety_identifier": "s", "session_id": "s", "metadata": {"a": "b"}, "store": True,
    "service_tier": "flex", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "low", "priority": 0,
    "spaces_between_special_tokens": True, "guided_decoding_backend": "auto",
}  # fmt: skip
PATHS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", PATHS)
def test_inert_fields_change_nothing(served: Running, path: str) -> None:
    assert VALUES.keys() == Inert.model_fields.keys()
    body = {**PATHS[path], "seed": 3, "max_output_tokens" if path.endswith("responses") else "max_tokens": 8}
    unknown = dict.fromkeys(["functions", "something_new", "logits_processors", "audio"])
    plain, said = served.post(path, body), served.post(path, {**body, **VALUES, **unknown})
    assert said.status_code == 200, said.text
    part = "output" if path.endswith("responses") else "choices"
    text = json.dumps(said.json()[part])
    assert json.loads(text)[0].keys() == plain.json()[part][0].keys()
    for name in ("text", "content"):
        assert said.json()[part][0].get(name) == plain.json()[part][0].get(name)


def test_every_inert_field_has_its_reason() -> None:
    assert Inert.model_fields.keys() == texts_of_fields(Inert).keys()


@pytest.mark.parametrize(
    ("path", "fields", "param", "nearest"),
    [
        ("/v1/chat/completions", {"reasoning_efort": "low"}, "reasoning_efort", "reasoning_effort"),
        ("/v1/completions", {"guided_jsn": {}}, "guided_jsn", "guided_json"),
        ("/v1/responses", {"metdata": {}}, "metdata", "metadata"),
        ("/v1/chat/completions", {"priority": 1}, "priority", "0"),
        ("/v1/chat/completions", {"verbosity": "loud"}, "verbosity", "medium"),
        ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "exclude"),
        ("/v1/chat/completions", {"max_tokens": -2}, "max_tokens", "-1"),
        ("/v1/chat/completions", {"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format",
         "all but one"),
        ("/v1/completions", {"request_id": "a\nb"}, "request_id", "pattern"),
        ("/v1/completions", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
    ],
)  # fmt: skip
def test_what_is_mistyped_is_named(served: Running, path: str, fields: Any, param: str | None, nearest: str) -> None:
    refused = served.post(path, {**PATHS[path], **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert nearest in refused.json()["error"]["message"]


def test_a_limit_of_minus_one_is_no_limit(served: Running) -> None:
    for path, name in (
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ):
        said = served.post(path, {**PATHS[path], name: -1, "ignore_eos": True, "temperature": 0}).json()
        assert said["usage"]["total_tokens"] == 128  # the context


@pytest.mark.parametrize(
    ("guided", "structured"),
    [
        ({"guided_json": {"const": {"a": 1}}}, {"json": {"const": {"a": 1}}}),
        ({"guided_json": '{"const": {"a": 1}}'}, {"json": {"const": {"a": 1}}}),
        ({"guided_regex": "[ab]{4}"}, {"regex": "[ab]{4}"}),
        ({"guided_choice": ["left", "right"]}, {"choice": ["left", "right"]}),
        ({"guided_grammar": 'start: "x" "y"'}, {"grammar": 'start: "x" "y"'}),
    ],
)
def test_older_words_for_forms_mean_the_same(served: Running, guided: Any, structured: Any) -> None:
    body = {"prompt": "abc", "seed": 1, "max_tokens": 16}
    got = served.post("/v1/completions", {**body, **guided}).json()
    assert (
        got["choices"] == served.post("/v1/completions", {**body, "structured_outputs": structured}).json()["choices"]
    )


def test_a_prompt_is_cut_where_it_is_asked(served: Running) -> None:
    body = {"seed": 1, "max_tokens": 5, "return_token_ids": True}
    ids = served.post("/tokenize", {"prompt": "abcdefgh"}).json()["tokens"]
    for more, kept in (
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": 99}, ids),
    ):
        got = served.post("/v1/completions", {**body, "prompt": "abcdefgh", **more}).json()
        assert got["choices"][0]["prompt_token_ids"] == kept
        plain = served.post("/v1/completions", {**body, "prompt": kept}).json()
        assert got["choices"][0]["text"] == plain["choices"][0]["text"]
        assert got["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    # A reply longer than the context leaves room for one token of the prompt.
    most = {"prompt": "a" * 500, "truncate_prompt_tokens": -1, "max_tokens": 10**6}
    assert served.post("/v1/completions", {**body, **most}).json()["usage"]["prompt_tokens"] == 1
    long = served.post("/v1/completions", {**body, "prompt": "a" * 500, "truncate_prompt_tokens": -1}).json()
    assert long["usage"]["prompt_tokens"] == 128 - 5
    chat = {**body, "messages": [{"role": "user", "content": "a" * 500}], "truncate_prompt_tokens": 20}
    got = served.post("/v1/chat/completions", chat).json()
    assert len(got["prompt_token_ids"]) == got["usage"]["prompt_tokens"] == 20
    assert len(got["choices"][0]["token_ids"]) == got["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_of_a_stream_add_up(served: Running, path: str) -> None:
    body = {**PATHS[path], **ASKED, "return_token_ids": True, "n": 2}
    whole = served.post(path, body).json()
    lines = served.post(path, {**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    owner = [event["choices"][0] if path == "/v1/completions" else event for event in events]
    asked = [said["prompt_token_ids"] for said in owner if said.get("prompt_token_ids")]
    first = whole["choices"][0] if path == "/v1/completions" else whole
    assert asked[0] == first["prompt_token_ids"]
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [token for each in mine for token in each.get("token_ids") or ()] == choice["token_ids"]


def test_an_id_that_is_brought_is_in_the_reply(served: Running) -> None:
    for path, before in (("/v1/completions", "cmpl-"), ("/v1/chat/completions", "chatcmpl-")):
        said = served.post(path, {**PATHS[path], "max_tokens": 2, "request_id": "mine-1"})
        assert said.json()["id"] == f"{before}mine-1"


def test_effort_reaches_the_template(served: Running) -> None:
    def prompt(**more: Any) -> int:
        body = {**ASKED, "messages": [USER], **more}
        return int(served.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"])

    plain = prompt()
    assert prompt(reasoning_effort="high") == plain + len("highTrue")
    assert prompt(reasoning_effort="none") == plain + len("noneFalse")
    assert prompt(reasoning_effort="low", chat_template_kwargs={"enable_thinking": 1}) == plain + len("low1")
    response = {"input": "hi", "max_output_tokens": 2, "reasoning": {"effort": "high", "summary": "auto"}}
    assert served.post("/v1/responses", response).json()["usage"]["input_tokens"] == plain + len("highTrue")


def test_a_message_is_continued(served: Running) -> None:
    open_turn = [USER, {"role": "assistant", "content": "I think "}]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(served, open_turn, **how) == "user: hi</s>assistant: I think "
    assert rendered(served, open_turn, continue_final_message=True) == "user: hi</s>assistant: I think "
    assert rendered(served, open_turn, add_generation_prompt=False) == "user: hi</s>assistant: I think </s>"
    chat = served.post("/v1/chat/completions", {**ASKED, "messages": open_turn, **how}).json()
    text = served.post("/v1/completions", {**ASKED, "prompt": "user: hi</s>assistant: I think "}).json()
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    refused = served.post("/v1/chat/completions", {**ASKED, "messages": [{**USER, "role": "assistant",
                          "content": None, "tool_calls": [CALL]}], **how})  # fmt: skip
    assert refused.status_code == 400
    assert "continue_final_message" in refused.json()["error"]["message"]


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER, {"role": "assistant", "content": text}] for text in ("I think", "I think  ", " so\n", "a {{ b", "</s>")
]


@pytest.mark.parametrize("template", ["qwen-3", "llama-3.1", "chatml", "phi-3", "mistral", "tinyllama"])
def test_continuing_is_what_transformers_renders(template: str) -> None:
    from tokenizers import Tokenizer, models

    from chat_templates import STOCK

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": False}
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(
            messages, chat_template=STOCK[template], tokenize=False, continue_final_message=True
        )
        assert (
            render_open({"default": STOCK[template]}, messages, {**named, "add_generation_prompt": False}) == expected
        )
        whole = render({"default": STOCK[template]}, messages, {**named, "add_generation_prompt": False})
        assert whole.startswith(expected)


def test_nothing_is_lost_between_a_message_and_its_template() -> None:
    message = ChatMessage(role="function", content="x", name="f", tool_call_id="1")
    assert message.turn().for_template() == {"role": "tool", "content": "x", "name": "f", "tool_call_id": "1"}
    talk = ChatRequest.model_validate({"messages": [USER], "tool_choice": None}).request.conversation
    assert talk is not None
    assert talk.tools == ToolUse([], (), True)
