"""llama-server's paths, fields and replies; texts equal those of OpenAI's paths."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.errors import RequestError
from sametoken.server.llama.forms import lark_of
from sametoken.server.llama.infill import find_marks, infill_ids
from sametoken.server.llama.schema import nested
from sametoken.server.stored import UNDER_WAY
from sametoken.server.text_request import Infill
from server_checks import MODEL, Running, running, with_template

TEMPLATE = (
    "{% if messages[-1].content == 'list' %}{{ functions + '; ' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED: dict[str, Any] = {"prompt": "the quick brown fox", "seed": 4, "n_predict": 12}
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 4, "n_predict": 12}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    llm = LLM(target, tiny_pair.draft, speculative={"max_draft_len": 4, "adaptive": False})
    names = {"served_model_name": ["b", "a"], "model_tags": ["small"]}
    with running(llm, any_model=True, default_sampling={"top_k": 5}, **names) as server:
        yield server


def post(served: Running, path: str, status: int = 200, **fields: Any) -> Any:
    reply = httpx.post(served.url + path, json=fields, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def events(served: Running, path: str, **fields: Any) -> list[Any]:
    with httpx.stream("POST", served.url + path, json={**fields, "stream": True}, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_completion_equals_openais_form(served: Running) -> None:
    own = post(served, "/completion", **ASKED, return_tokens=True)
    theirs = post(served, "/v1/completions", **{**ASKED, "max_tokens": 12}, return_token_ids=True)
    assert own["content"] == theirs["choices"][0]["text"]
    assert own["tokens"] == theirs["choices"][0]["token_ids"]
    assert own["stop"] is True
    assert own["stop_type"] == "limit"
    assert own["tokens_predicted"] == own["timings"]["predicted_n"] == 12
    assert own["generation_settings"] | {"top_k": 5, "n_predict": 12, "seed": 4} == own["generation_settings"]
    assert own["timings"]["cache_n"] + own["timings"]["prompt_n"] == own["tokens_evaluated"]
    assert own["timings"]["draft_n"] >= own["timings"]["draft_n_accepted"]
    assert post(served, "/completion", **ASKED)["tokens"] == []


def test_a_stream_adds_up_to_the_whole(served: Running) -> None:
    whole = post(served, "/completion", **ASKED, return_tokens=True)
    parts = events(served, "/completion", **ASKED, n_probs=2, timings_per_token=True, return_progress=True)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["generation_settings"]["stream"] is True
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert progress[-1]["processed"] == progress[-1]["total"] == whole["tokens_evaluated"]
    probabilities = [each for part in parts for each in part.get("completion_probabilities", ())]
    assert [each["id"] for each in probabilities] == whole["tokens"]
    assert all(len(each["top_logprobs"]) == 2 for each in probabilities)
    assert all(
        len(part.get("completion_probabilities", [0])) == 1 for part in parts
    )  # clients expect one token in each


def test_prompts_of_every_form(served: Running) -> None:
    ids = post(served, "/tokenize", content=ASKED["prompt"])["tokens"]
    whole = post(served, "/completion", **ASKED)["content"]
    asked = {**ASKED, "prompt": [ids, {"prompt_string": ASKED["prompt"]}]}
    assert [each["content"] for each in post(served, "/completion", **asked)] == [whole, whole]
    mixed = post(served, "/completion", **{**ASKED, "prompt": [*ids[:2], "ox", ids[3]]})
    assert mixed["tokens_evaluated"] > 3
    refused = post(served, "/completion", 400, **{**ASKED, "prompt": {"prompt_string": "x", "multimodal_data": ["y"]}})
    assert "text only" in refused["error"]["message"]


def test_fields_choose_the_reply(served: Running) -> None:
    reply = post(served, "/completion", **ASKED, response_fields=["content", "generation_settings/n_predict", "nope"])
    assert reply.keys() == {"content", "generation_settings/n_predict"}
    assert nested({"a": {"b": 1}}, ["a/b", "a/c", "d"]) == {"a/b": 1}


def test_probabilities_after_sampling(served: Running) -> None:
    reply = post(served, "/completion", **ASKED, n_probs=3, post_sampling_probs=True)
    for each in reply["completion_probabilities"]:
        assert 0 < each["prob"] <= 1
        assert all(0 < top["prob"] <= 1 for top in each["top_probs"])


def test_biases_of_texts_and_ends(served: Running) -> None:
    first = post(served, "/completion", **ASKED, return_tokens=True)["tokens"][0]
    banned = post(served, "/completion", **ASKED, logit_bias=[[first, False]], return_tokens=True)
    assert first not in banned["tokens"]
    text = post(served, "/detokenize", tokens=[first])["content"]
    if post(served, "/tokenize", content=text)["tokens"] == [first]:
        assert post(served, "/completion", **ASKED, logit_bias={text: -100}, return_tokens=True) | {"timings": 0} == (
            banned | {"timings": 0}
        )
    endless = post(served, "/completion", **ASKED, ignore_eos=True)
    assert {each["bias"] for each in endless["generation_settings"]["logit_bias"]} == {None}


def test_grammars(served: Running) -> None:
    assert post(served, "/completion", **ASKED, grammar='root ::= "a"{5,5}')["content"] == "aaaaa"
    chat = post(served, "/chat/completions", **SAID, json_schema={"const": "42"})
    assert json.loads(chat["choices"][0]["message"]["content"]) == "42"
    beside = post(served, "/chat/completions", **SAID, response_format={"type": "json_object", "schema": {"const": 7}})
    assert beside["choices"][0]["message"]["content"] == "7"
    post(served, "/completion", 400, **ASKED, grammar="root ::= this is (not valid GBNF")
    post(served, "/chat/completions", 400, **SAID, response_format={"type": "json_object", "schema": 123})


SAMPLERS: list[dict[str, Any]] = [
    {"typical_p": 0.4}, {"top_n_sigma": 0.5}, {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"dynatemp_range": 0.9}, {"dry_multiplier": 5.0, "dry_allowed_length": 0, "dry_sequence_breakers": ["x"]},
    {"repeat_last_n": 4, "repeat_penalty": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("sampler", SAMPLERS, ids=[next(iter(each)) for each in SAMPLERS])
def test_samplers_hold_with_and_without_a_draft(served: Running, sampler: dict[str, Any]) -> None:
    asked = {**ASKED, "n_predict": 24, "top_k": 0, "ignore_eos": True, "return_tokens": True}
    usual = post(served, "/completion", **asked)
    shaped = post(served, "/completion", **asked, **sampler)
    plain = post(served, "/completion", **asked, **sampler, speculative={"enabled": False})
    assert shaped["tokens"] == plain["tokens"] != usual["tokens"]
    assert "draft_n" not in plain["timings"]
    assert shaped["generation_settings"] | sampler == shaped["generation_settings"]


def test_a_sampler_that_is_not_here_or_out_of_range_is_refused(served: Running) -> None:
    for name, value in (("mirostat", 2), ("typical_p", 1.5), ("xtc_probability", -1), ("dry_sequence_breakers", [""])):
        assert name in post(served, "/completion", 400, **ASKED, **{name: value})["error"]["message"]


def test_a_grammar_may_be_recursive(served: Running) -> None:
    left = 'root ::= x "c"\nx ::= y "a" | "b"\ny ::= x'
    said = post(served, "/completion", **ASKED, grammar=left)["content"]
    assert set(said) <= set("abc")
    assert said[0] == "b"


def test_repeats_in_repeats(served: Running) -> None:
    asked = {**ASKED, "grammar": 'root ::= ("a"{2} "b"?){2} (("c"+){1,2}){1} "d"', "n_predict": 16}
    assert re.fullmatch("(a{2}b?){2}c+d?", post(served, "/completion", **asked)["content"])


@pytest.mark.parametrize("gbnf", ["(" * 20_000, 'x ::= "a"', "root ::= y", "root", "a" * 200_000], ids=lambda g: g[:9])
def test_no_grammar(gbnf: str) -> None:
    with pytest.raises(RequestError):
        lark_of(gbnf)


def test_chat_in_its_words(served: Running) -> None:
    reply = post(served, "/chat/completions", **SAID, model="gpt-4", verbose=True, cache_prompt=True, id_slot=0)
    assert reply["system_fingerprint"].startswith("b")
    assert reply["model"] == "b"
    assert reply["__verbose"]["prompt"] == "user: hi assistant:"
    assert reply["timings"]["predicted_n"] == reply["usage"]["completion_tokens"]
    first, *_, last = events(served, "/v1/chat/completions", **SAID)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert last["timings"]["predicted_n"] == 12
    begun = [*SAID["messages"], {"role": "assistant", "content": "Wh"}]
    gone_on = post(served, "/chat/completions", **{**SAID, "messages": begun}, verbose=True)
    assert gone_on["__verbose"]["prompt"] == "user: hi assistant: Wh"
    post(served, "/chat/completions", 400, **{**SAID, "messages": [*begun, begun[-1]]})
    assert post(served, "/chat/completions", **SAID, tools=[])["choices"] == reply["choices"]


def test_responses_tell_their_cost(served: Running) -> None:
    asked = {"input": "hi", "seed": 4, "max_output_tokens": 12}
    parts = events(served, "/responses", **asked, timings_per_token=True, return_progress=True, cache_prompt=True)
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert progress[-1]["processed"] == progress[-1]["total"] > 0
    assert {part["type"] for part in parts if "prompt_progress" in part} == {"response.in_progress"}
    said = [part for part in parts if part["type"] == "response.output_text.delta"]
    assert said
    assert all(part["timings"]["predicted_n"] > 0 for part in said)
    assert parts[-1]["timings"]["predicted_n"] == parts[-1]["response"]["usage"]["output_tokens"]
    numbers = [part["sequence_number"] for part in parts if "prompt_progress" not in part]
    assert numbers == list(range(len(numbers)))


def test_a_response_in_the_background(served: Running) -> None:
    response = post(served, "/responses", input="hi", background=True, max_output_tokens=4)
    assert response["status"] == "queued"
    end = time.monotonic() + 60.0
    while response["status"] in UNDER_WAY and time.monotonic() < end:
        time.sleep(0.01)
        response = httpx.get(f"{served.url}/v1/responses/{response['id']}").json()
    assert response["timings"]["predicted_n"] == response["usage"]["output_tokens"] > 0


def test_errors_in_its_envelope(served: Running) -> None:
    error = post(served, "/completion", 400, prompt="a" * 5000)["error"]
    assert error["code"] == 400
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"]
    assert post(served, "/completion", 400, **ASKED, mirostat=2)["error"]["type"] == "invalid_request_error"
    assert post(served, "/completion", 400, n_predict=4)["error"]["message"].startswith("prompt is missing")
    assert post(served, "/slots/0?action=save", 501)["error"]["type"] == "not_supported_error"


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_an_empty_list_of_prompts_is_refused(served: Running, path: str) -> None:
    answer = served.post(path, {"prompt": []})
    assert answer.status_code == 400
    assert "prompt is an empty list" in answer.json()["error"]["message"]


def test_no_adapter_is_loaded(served: Running) -> None:
    path = f"{served.url}/lora-adapters"
    assert httpx.get(path).json() == []
    assert httpx.post(path, json=[]).json() == {"success": True}
    for body in ([{"id": 0, "scale": 0.5}], {}, "x"):
        answer = httpx.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], "merge adapters into the weights" in error["message"]) == (400, True)
    said = {"content": b"[{", "headers": {"Content-Type": "application/json"}}
    assert "not JSON" in httpx.post(path, **said).json()["error"]["message"]
    assert httpx.post(path, content=b"[]", headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_template_may_list_functions_as_text(served: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "list"}]}
    assert post(served, "/apply-template", **asked)["prompt"].startswith("; user: list")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    listed, _ = json.JSONDecoder().raw_decode(post(served, "/apply-template", **asked, tools=[tool])["prompt"])
    assert listed == [tool]


def test_templates_tokens_and_counts(served: Running) -> None:
    prompt = post(served, "/apply-template", messages=SAID["messages"])["prompt"]
    assert prompt == "user: hi assistant:"
    ids = post(served, "/tokenize", content=prompt)["tokens"]
    assert post(served, "/chat/completions/input_tokens", messages=SAID["messages"])["input_tokens"] == len(ids)
    assert post(served, "/detokenize", tokens=ids)["content"] == prompt
    pieces = post(served, "/tokenize", content=prompt, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert post(served, "/tokenize", prompt=prompt, add_special_tokens=False)["tokens"] == ids  # vLLM's fields


def test_about_the_server(served: Running) -> None:
    props = httpx.get(f"{served.url}/props").json()
    slots = httpx.get(f"{served.url}/slots").json()
    assert props["total_slots"] == len(slots)
    assert props["default_generation_settings"]["params"]["top_k"] == 5
    assert not any(slot["is_processing"] for slot in slots)
    (model,) = httpx.get(f"{served.url}/models").json()["data"]
    assert (model["id"], model["aliases"], model["tags"]) == ("a", ["a", "b"], ["small"])
    assert httpx.get(f"{served.url}/v1/health").json() == {"status": "ok"}
    text = httpx.get(f"{served.url}/metrics").text
    values = dict(line.split() for line in text.splitlines() if line.startswith("llamacpp:"))
    assert float(values["llamacpp:tokens_predicted_total"]) > 0
    assert values["llamacpp:requests_processing"] == "0"


def test_paths_of_others_stay_strict(tiny_pair: Pair, one_thread: None) -> None:
    with running(LLM(tiny_pair.target)) as server:
        post(server, "/v1/completions", 404, prompt="x", model="gpt-4")
        assert post(server, "/completion", prompt="x", model="gpt-4", n_predict=2)["model"] == MODEL


VOCABULARY = {"<|fim_prefix|>": 1000, "<|fim_suffix|>": 1001, "<|fim_middle|>": 1002, "<|file_sep|>": 1003}


class Vocabulary(NamedTuple):
    """Tokens by their spelling, none of which is named."""

    ids: dict[str, int]

    def token_id(self, text: str) -> int | None:
        return self.ids.get(text)

    def named_id(self, name: str) -> int | None:
        return None


def test_a_gap_stands_between_marks() -> None:
    marks = find_marks(Vocabulary(VOCABULARY))
    assert marks is not None
    assert marks.end_ids == (1003,)

    def encode(text: str) -> list[int]:
        return list(text.encode())

    asked = Infill("before", "after", "be", (("a.h", "x"),))
    ids = infill_ids(asked, marks, encode, [1], 4096)
    files = [1003, *b"a.h\n", *b"x", 1003, *b"filename\n"]
    assert ids == [1, *files, 1000, *b"before", *b"be", 1001, *b"after", 1002]
    short = infill_ids(Infill("b" * 500, "a" * 500), marks, encode, [], 100)
    assert short == [1000, *b"b" * 37, 1001, *b"a" * 10, 1002]
    with pytest.raises(RequestError, match="no marks"):
        infill_ids(asked, find_marks(Vocabulary({})), encode, [], 100)
