"""Thinking apart from the answer, over HTTP: whole and streamed, counted, with forms, calls and history.

A tiny model says nothing that makes sense, so a grammar of the whole output dictates its replies, marks included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from chat_templates import GPT_OSS
from cli_checks import Pair
from sametoken import LLM, RequestSpeculation, SamplingParams
from sametoken.server import prompts
from sametoken.speculation.structure import StructuredOutputs
from server_checks import MODEL, Running, openai_client, running, with_template

THINKING = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if open %}<think>{% endif %}"
)
MARKS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"]
OSS_REPLY = [
    "<|channel|>", "analysis", "<|message|>", "look here", "<|end|>", "<|start|>", "assistant", "<|channel|>",
    "final", "<|message|>", "yes no",
]  # fmt: skip
USER = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), THINKING)
    with running(LLM(target, tiny_pair.draft, speculative={"max_draft_len": 4, "adaptive": False})) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[OpenAI]:
    with openai_client(served) as made:
        yield made


@pytest.fixture
def dictated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms hold for the whole output, so that they can dictate the thinking too."""
    monkeypatch.setattr(prompts.Prompts, "_waits", lambda *given: {})


def asks(reply: str, **more: Any) -> dict[str, Any]:
    grammar = f"start: {json.dumps(reply)}"
    body = {"structured_outputs": {"grammar": grammar}, "chat_template_kwargs": more.pop("kwargs", {})}
    return {"model": MODEL, "messages": USER, "max_tokens": 100, "extra_body": body, **more}


REPLIES = [
    ("<think>well so</think>yes", {}, "well so", "yes", 7),
    ("well</think>yes", {"open": True}, "well", "yes", 4),
    ("yes", {}, "", "yes", 0),
    ("<think>x</think>y", {"enable_thinking": False}, "", "<think>x</think>y", 0),
]


@pytest.mark.parametrize(("reply", "kwargs", "thought", "said", "count"), REPLIES)
@pytest.mark.usefixtures("dictated")
def test_thinking_is_apart_whole_and_streamed(
    client: OpenAI, reply: str, kwargs: Any, thought: str, said: str, count: int
) -> None:
    asked = asks(reply, kwargs=kwargs)
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == (thought or None, said)  # type: ignore[attr-defined]
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == count
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == said
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details == whole.usage.completion_tokens_details
    asked["extra_body"]["include_reasoning"] = False
    silent = client.chat.completions.create(**asked).choices[0].message
    assert silent.content == said
    assert silent.reasoning_content is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("reply", "kwargs", "thought", "said", "count"), REPLIES)
@pytest.mark.usefixtures("dictated")
def test_responses_have_it_as_an_item(
    client: OpenAI, reply: str, kwargs: Any, thought: str, said: str, count: int
) -> None:
    body = asks(reply, kwargs=kwargs)["extra_body"]
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "extra_body": body}
    whole = client.responses.create(**asked, include=["message.output_text.logprobs"])
    kinds = [item.type for item in whole.output]
    assert kinds == (["reasoning", "message"] if thought else ["message"])
    assert whole.output_text == said
    if thought:
        assert whole.output[0].content[0].text == thought  # type: ignore[union-attr, index]
    assert len(whole.output[-1].content[0].logprobs) == len(said)  # type: ignore[union-attr, index, arg-type]
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == count
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == kinds
    assert final.output_text == said
    told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert told == thought
    again: Any = [{"role": "user", "content": "hi"}, *[item.to_dict() for item in whole.output]]
    more = client.responses.create(**{**asked, "input": [*again, {"role": "user", "content": "go on"}]})
    assert more.usage is not None
    assert more.usage.input_tokens > whole.usage.input_tokens + len(thought)


@pytest.mark.usefixtures("dictated")
def test_calls_come_after_the_thinking(client: OpenAI) -> None:
    made = '{"name": "f", "arguments": {"a": 1}}'
    for call in (f"<tool_call>{made}</tool_call>", made):
        asked = asks(f"<think>hm</think>{call}", tools=TOOLS)
        message = client.chat.completions.create(**asked).choices[0].message
        assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
        (told,) = message.tool_calls or []
        assert (told.function.name, told.function.arguments) == ("f", '{"a": 1}')  # type: ignore[union-attr]
        again = [*asked["messages"], message.to_dict(), {"role": "tool", "tool_call_id": "1", "content": "ok"}]
        assert client.chat.completions.create(**{**asked, "messages": again}).choices


def test_a_form_holds_for_what_is_said(served: Running) -> None:
    """The thinking is free, and ends; what follows is of the form; the text is the same with and without drafts."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [[1, 2], [3]]}}}
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "response_format": form}
    for seed in range(2):
        # Letters are drawn almost evenly, so that a mark of eight would never come by itself.
        bias = {str(token): 100 for token in served.post("/tokenize", {"prompt": "</think>"}).json()["tokens"]}
        for kwargs in ({"open": True}, {}):
            body = {**asked, "seed": seed, "chat_template_kwargs": kwargs, "logit_bias": bias}
            got, plain = (
                served.post("/v1/chat/completions", {**body, "speculative": {"enabled": drafts}}).json()["choices"][0]
                for drafts in (True, False)
            )
            assert got["message"] == plain["message"]
            if got["finish_reason"] == "stop" and not kwargs:
                assert json.loads(got["message"]["content"]) in ([1, 2], [3])
            if kwargs:
                assert got["finish_reason"] == "length"
                assert set(got["message"]["reasoning_content"]) <= set("</think>")


def test_a_form_begins_at_once_where_no_thinking_is_wanted(tiny_pair: Pair, tmp_path: Any, one_thread: None) -> None:
    """A template without a switch leaves the prompt as it is, so that only the request tells."""
    target = with_template(tiny_pair.target, tmp_path / "target", "{% for m in messages %}{{ m.content }}{% endfor %}:")
    with running(LLM(target), reasoning_parser="qwen3") as server:
        bias = {str(token): 100 for token in server.post("/tokenize", {"prompt": "<think>"}).json()["tokens"]}
        body = {"messages": USER, "max_tokens": 20, "structured_outputs": {"choice": ["xy"]}, "logit_bias": bias}
        free = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        off = {**body, "chat_template_kwargs": {"enable_thinking": False}}
        told = server.post("/v1/chat/completions", off).json()["choices"][0]["message"]
    assert free["content"] in (None, "")
    assert told["content"] == "xy"


def test_a_form_waits_for_its_mark_in_the_engine(tiny_pair: Pair, one_thread: None) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.draft, {"max_draft_len": 4, "adaptive": False})
    form = StructuredOutputs(json={"enum": [[1, 2], [3]]}, after="[a-p]")
    special = llm.tokenizer.special_ids - set(llm.tokenizer.eos_ids)
    letters: dict[str, Any] = {"logit_bias": dict.fromkeys(special, -100.0)}
    for seed in range(8):
        asked: dict[str, Any] = {"structured_outputs": form, "seed": seed, "max_tokens": 100, **letters}
        done = llm.generate("abc", SamplingParams(**asked))[0]
        thought, said = re.split("[a-p]", done.text, maxsplit=1)
        assert json.loads(said) in ([1, 2], [3]), thought
        plain = SamplingParams(**asked, speculative=RequestSpeculation(enabled=False))
        assert llm.generate("abc", plain)[0].token_ids == done.token_ids
    may_open = StructuredOutputs(regex="[xy]{3}", after="[a-w]", opens="#")
    texts = [
        llm.generate("abc", SamplingParams(structured_outputs=may_open, seed=seed, max_tokens=100, **letters))[0].text
        for seed in range(20)
    ]
    assert {text[0] for text in texts} == {"#", "x", "y"}
    for text in texts:
        said = re.split("[a-w]", text, maxsplit=1)[1] if text.startswith("#") else text
        assert len(said) == 3
        assert set(said) <= set("xy")


def test_only_allowed_tokens_are_drawn(served: Running) -> None:
    ids = served.post("/tokenize", {"prompt": "xyz"}).json()["tokens"]
    body = {"prompt": "abc", "max_tokens": 20, "seed": 1}
    got = served.post("/v1/completions", {**body, "allowed_token_ids": ids}).json()["choices"][0]
    assert set(got["text"]) == set("xyz")
    assert len(got["text"]) == 20
    plain = {**body, "allowed_token_ids": ids, "speculative": {"enabled": False}}
    assert served.post("/v1/completions", plain).json()["choices"][0]["text"] == got["text"]
    formed = {**body, "allowed_token_ids": ids, "structured_outputs": {"regex": "[a-x]{4}"}}
    assert served.post("/v1/completions", formed).json()["choices"][0]["text"] == "xxxx"
    for wrong in ([], [10**6], [-1]):
        refused = served.post("/v1/completions", {**body, "allowed_token_ids": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("allowed_token_ids")
    assert served.post("/v1/completions", {**body, "allowed_token_ids": ids, "min_tokens": 2}).status_code == 400


def test_marks_that_are_special_tokens_are_found_and_not_shown(
    tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss has them: its channels are told apart by tokens that texts do not show."""
    folder = tmp_path_factory.mktemp("harmony")
    target = with_template(tiny_pair.target, folder, GPT_OSS[GPT_OSS.index("{% for message") :])
    known = json.loads((folder / "tokenizer.json").read_text())
    vocab = known["model"]["vocab"]
    for token, mark in zip([token for token in vocab if token in "%&;@^~"], MARKS, strict=True):
        known["added_tokens"].append({
            "id": vocab[token], "content": mark, "special": True, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False})  # fmt: skip
        vocab[mark] = vocab.pop(token)
    (folder / "tokenizer.json").write_text(json.dumps(known))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("".join(OSS_REPLY), add_special_tokens=False).ids
    llm = LLM(target, speculative={"method": "none"})

    class Dictation:
        """Allows one text and then the end."""

        failure = None

        def __init__(self) -> None:
            self.said = 0

        def copy(self) -> Dictation:
            return Dictation()

        def accept(self, token: int) -> bool:
            self.said += 1
            return self.said > len(ids)

        def allowed(self, tokens: Any, parents: Any) -> Any:
            import torch

            mask = torch.zeros(len(tokens), llm.config.vocab_size, dtype=torch.bool)
            mask[:, [*ids, llm.tokenizer.eos_ids[0]][self.said]] = True
            return mask

        def forced(self, limit: int) -> list[int]:
            return []

    monkeypatch.setattr(llm._maker, "_grammar", lambda params: Dictation())
    with running(llm) as server:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "stream": stream}
            got = server.post("/v1/chat/completions", body)
            if stream:
                lines = [line.removeprefix("data: ") for line in got.text.split("\n\n") if line.startswith("data: {")]
                deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
                names = ("reasoning_content", "content")
                message = {name: "".join(delta.get(name, "") for delta in deltas) for name in names}
            else:
                message = got.json()["choices"][0]["message"]
                assert got.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("look here")
            assert message["reasoning_content"] == "look here"
            assert message["content"] == "yes no"


def test_a_server_can_be_told_to_leave_it_in_the_text(tiny_pair: Pair, tmp_path: Any, one_thread: None) -> None:
    target = with_template(tiny_pair.target, tmp_path / "target", THINKING)
    body = {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"choice": ["<think>a</think>b"]}}
    with running(LLM(target), reasoning_parser="none") as server:
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    assert message["reasoning_content"] is None


def thought(served: Running, budget: int | None, **kwargs: Any) -> tuple[str | None, str, list[int], list[int]]:
    """Thinking, answer and token ids of a reply whose thinking has a budget, and the ids of its prompt."""
    body = {
        "messages": USER, "max_tokens": 24, "seed": 3, "ignore_eos": True, "thinking_token_budget": budget,
        "chat_template_kwargs": kwargs, "return_token_ids": True,
    }  # fmt: skip
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    message = choice["message"]
    return message["reasoning"], message["content"], choice["token_ids"], reply.json()["prompt_token_ids"]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thinking_ends_where_its_budget_does(served: Running, budget: int) -> None:
    mark = served.llm.tokenizer.encode("</think>", False)
    _, _, free, _ = thought(served, None, open=True)
    said, answer, ids, _ = thought(served, budget, open=True)
    assert ids[:budget] == free[:budget]
    assert ids[budget : budget + len(mark)] == mark
    assert (said or "").strip("\n") == served.llm.tokenizer.decode(free[:budget]).strip("\n")
    assert answer


def test_a_budget_leaves_alone_what_it_does_not_reach(served: Running) -> None:
    free = thought(served, None, open=True)
    assert thought(served, 24, open=True) == free
    assert thought(served, -1, open=True) == free
    assert thought(served, 2) == thought(served, None)  # it does not begin to think
    refused = served.post("/v1/chat/completions", {"messages": USER, "thinking_token_budget": -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_a_server_has_a_budget_for_requests_that_name_none(tiny_pair: Pair, tmp_path: Any, one_thread: None) -> None:
    llm = LLM(with_template(tiny_pair.target, tmp_path / "target", THINKING))
    mark = llm.tokenizer.encode("</think>", False)
    with running(llm, thinking_token_budget=2) as server:
        for asked, most in ((None, 2), (-1, 2), (4, 4)):
            _, _, ids, _ = thought(server, asked, open=True)
            assert ids[most : most + len(mark)] == mark
        ids = thought(server, 3, open=True)[2]
        body = {
            "messages": USER,
            "max_tokens": 24,
            "seed": 3,
            "ignore_eos": True,
            "chat_template_kwargs": {"open": True},
        }
        for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
            reply = server.post("/chat/completions", {**body, name: 3, "return_token_ids": True}).json()
            assert reply["choices"][0]["token_ids"][3 : 3 + len(mark)] == mark == ids[3 : 3 + len(mark)]


def test_a_form_follows_thinking_that_its_budget_ended(served: Running) -> None:
    body = {
        "messages": USER, "max_tokens": 60, "seed": 3, "thinking_token_budget": 3, "response_format": {
            "type": "regex", "regex": "(yes|no)"}, "chat_template_kwargs": {"open": True},
    }  # fmt: skip
    message = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert message["reasoning"]
