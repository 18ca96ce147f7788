"""Outputs of a required form: always of that form, the same however they are drafted, greedy as an oracle has it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import regex

from cli_checks import Pair
from sametoken import LLM, Completion, RequestError, RequestSpeculation, SamplingParams
from sametoken.engine import grammar
from sametoken.speculation.structure import StructuredOutputs

PROMPT = "abc abc"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colour": {"enum": ["red", "green"]},
        "on": {"type": "boolean"},
    },
    "required": ["name", "colour", "on"],
    "additionalProperties": False,
}
PATTERN = r"(a|bc)+[0-9]{2,4}(-[x-z]+)?"
# The letters come often enough: free text, a mark of text, an object, and free text again.
TAGS = {
    "structures": [
        {"begin": "a<", "schema": SCHEMA, "end": ">"},
        {"begin": "b<", "schema": {"type": "integer"}, "end": ">"},
    ],
    "triggers": ["a", "b"],
}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text", "max_chars": 20}, "end": ["d", "e", "f"]}
WAYS = [
    RequestSpeculation(enabled=False),
    RequestSpeculation(method="ngram"),
    RequestSpeculation(method="suffix"),
    RequestSpeculation(method="draft_target"),
    RequestSpeculation(method="auto"),
    RequestSpeculation(prediction='{"name": "abc", "colour": "red", "on": true}'),
]


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target, tiny_pair.draft, {"max_draft_len": 4, "adaptive": False, "tree_top_k": 2})


def complete(llm: LLM, form: dict[str, Any], way: RequestSpeculation | None = None, **params: Any) -> Completion:
    asked = SamplingParams(
        **{"max_tokens": 60, "seed": 1, **params}, structured_outputs=StructuredOutputs(**form), speculative=way
    )
    return llm.generate(PROMPT, asked)[0]


def test_a_schema_is_kept(llm: LLM) -> None:
    for seed in range(5):
        done = complete(llm, {"json": SCHEMA}, temperature=1.0, seed=seed)
        told = json.loads(done.text)
        assert done.finish_reason == "stop"
        assert list(told) == ["name", "colour", "on"]
        assert told["colour"] in ("red", "green")
        assert isinstance(told["on"], bool)
        assert len(told["name"]) <= 6


@pytest.mark.parametrize(
    "form",
    [
        {"json": SCHEMA},
        {"regex": PATTERN},
        {"choice": ["yes", "no", "yesterday"]},
        {"grammar": 'start: "x" /[a-c]+/ "y"'},
        {"grammar": 'root ::= "x" [a-c]+ "y"'},
        {"structural_tag": TAGS},
        {"structural_tag": {"format": TAG}},
    ],
)
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5, "presence_penalty": 1.0}]
)
def test_the_same_output_however_it_is_drafted(llm: LLM, form: dict[str, Any], params: dict[str, Any]) -> None:
    plain = complete(llm, form, WAYS[0], **params, logprobs=1)
    for way in WAYS[1:]:
        drafted = complete(llm, form, way, **params, logprobs=1)
        assert drafted.token_ids == plain.token_ids, way
        assert drafted.text == plain.text
        assert drafted.finish_reason == plain.finish_reason
        assert [item.logprob for item in drafted.logprobs or []] == [item.logprob for item in plain.logprobs or []]


def test_marks_begin_parts_and_text_goes_on_after_them(llm: LLM) -> None:
    found = 0
    for seed in range(8):
        text = complete(llm, {"structural_tag": TAGS}, temperature=1.0, seed=seed, max_tokens=100).text
        parts = regex.findall(r"a<(\{[^}]*\})>|b<(-?[0-9]+)>", text)
        found += len(parts)
        for schema, number in parts:
            assert isinstance(json.loads(number or "0"), int)
            assert list(json.loads(schema or '{"name": 0, "colour": 0, "on": 0}')) == ["name", "colour", "on"]
        assert not regex.search(r"[ab][^<]", regex.sub(r"a<\{.*?\}>|a<.*$", "", text, flags=regex.DOTALL))
    assert found > 5


def test_greedy_takes_the_best_of_what_a_regex_allows(llm: LLM) -> None:
    """The oracle of what is allowed is another library's partial match."""
    done = complete(llm, {"regex": PATTERN}, temperature=0, logprobs=128, max_tokens=12)
    letters = {token: llm.tokenizer.token_bytes(token).decode() for token in range(3, llm.tokenizer.vocab_size)}
    text = ""
    for item in done.logprobs or []:
        allowed = {t for t, letter in letters.items() if regex.fullmatch(PATTERN, text + letter, partial=True)}
        if regex.fullmatch(PATTERN, text):
            allowed |= set(llm.tokenizer.eos_ids)
        best = max((logprob, -token) for token, logprob in item.top if token in allowed)
        assert item.token_id == -best[1]
        text += letters.get(item.token_id, "")
    assert regex.fullmatch(PATTERN, done.text, partial=True)


def test_forced_tokens_are_drafted_without_any_draft_model_and_are_always_right(tiny_pair: Pair, llm: LLM) -> None:
    bare = LLM(tiny_pair.target, speculative={"method": "none", "max_draft_len": 6, "adaptive": False})
    done = complete(bare, {"json": {"const": {"a long key": [1, 2, 3]}}}, temperature=1.0)
    stats = done.speculation
    assert json.loads(done.text) == {"a long key": [1, 2, 3]}
    assert stats.method == "forced"
    assert stats.accepted == stats.drafted > 0
    assert stats.acceptance_length > 4
    assert complete(bare, {"json": SCHEMA}).token_ids == complete(llm, {"json": SCHEMA}).token_ids
    plain = RequestSpeculation(enabled=False)
    assert complete(bare, {"choice": ["abcdefgh"]}, plain).speculation.drafted == 0


def test_forced_tokens_keep_to_the_budget(tiny_pair: Pair) -> None:
    settings = {"max_draft_len": 6, "max_total_draft_tokens": 2, "adaptive": False, "draft_len_schedule": {8: 6}}
    done = complete(LLM(tiny_pair.target, speculative=settings), {"choice": ["abcdefghij"]})
    assert done.text == "abcdefghij"
    assert len(done.speculation.drafted_lengths) == 3


def test_an_output_ends_with_its_form_and_not_before(llm: LLM) -> None:
    assert complete(llm, {"choice": ["abcdefgh"]}, ignore_eos=True).text == "abcdefgh"
    cut = complete(llm, {"choice": ["abcdefgh"]}, max_tokens=3)
    assert (cut.text, cut.finish_reason) == ("abc", "length")
    stopped = complete(llm, {"choice": ["abcdefgh"]}, stop="d")
    assert (stopped.text, stopped.stop_reason) == ("abc", "d")


def test_choices_and_neighbours_keep_their_own_state(llm: LLM) -> None:
    asked = [
        SamplingParams(n=3, seed=9, max_tokens=40, structured_outputs=StructuredOutputs(json=SCHEMA)),
        SamplingParams(n=3, seed=9, max_tokens=40),
        SamplingParams(n=3, seed=9, max_tokens=40, structured_outputs=StructuredOutputs(regex="[a-f]{9}")),
    ]
    together = llm.generate([PROMPT] * 3, asked)
    alone = [completion for params in asked for completion in llm.generate(PROMPT, params)]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in together[:3]}) == 3


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "[unclosed"},
        {"regex": "(?=a)b"},
        {"grammar": "start: missing"},
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "http://elsewhere.example/schema"}},
        {"json": {"type": "string", "not": {}}},
        {"json": False},
        {"structural_tag": {"structures": [{"begin": "<g", "schema": {}, "end": ""}], "triggers": ["<f"]}},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"type": "nonsense"}}}},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": False}}},
        {"structural_tag": {"format": {"type": "regex", "pattern": "a)|(b"}}},
    ],
)
def test_forms_that_cannot_be_kept_are_refused(llm: LLM, form: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        complete(llm, form)


def test_deep_and_large_forms_end_as_a_form_or_a_refusal(llm: LLM) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    for form in ({"json": deep}, {"regex": "(" * 2000 + "a" + ")" * 2000}, {"regex": "((a{1,900}){1,900}){1,900}b"}):
        try:
            complete(llm, form, max_tokens=3)
        except RequestError as error:
            assert len(str(error)) < 500  # noqa: PT017
    assert complete(llm, {"choice": ["fine"]}).text == "fine"


NESTED = "((c{1000}){1000}){900}"
HEAVY: list[dict[str, Any]] = [
    {"regex": NESTED},
    {"choice": ["x" * 100_000]},
    {"regex": "x{40000}"},
    {"json": {"const": "x" * 20_000}},
]


@pytest.mark.parametrize("form", HEAVY, ids=str)
def test_forms_that_take_too_much_work_are_refused_before_they_run(llm: LLM, form: dict[str, Any]) -> None:
    begin = time.thread_time()
    with pytest.raises(RequestError, match="structured_outputs"):
        complete(llm, form)
    assert time.thread_time() - begin < 1
    assert not llm.engine.busy


def test_large_forms_of_work_that_can_be_borne_are_kept(llm: LLM) -> None:
    properties = {f"f{i}": {"enum": [f"value {i} {n}" for n in range(20)]} for i in range(100)}
    schema = {"type": "object", "properties": properties, "required": ["f0", "f99"], "additionalProperties": False}
    assert complete(llm, {"json": schema}, max_tokens=20).text.startswith('{"f0": "value 0 ')
    words = [f"number {n}" for n in range(4000)]
    assert complete(llm, {"choice": words}).text in words
    long = "a" + "b" * 15_000
    assert complete(llm, {"choice": [long]}, max_tokens=30).text == long[:30]


@pytest.mark.parametrize("method", ["none", "ngram", "draft_target"])
def test_a_mask_that_takes_too_long_ends_its_request_only(
    llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = RequestSpeculation(method=method)  # type: ignore[arg-type]
    slow = SamplingParams(
        max_tokens=20, seed=1, speculative=way, structured_outputs=StructuredOutputs(regex="[a-f]{15}")
    )
    other = SamplingParams(max_tokens=20, seed=1, speculative=way, ignore_eos=True)
    whole = llm.generate(PROMPT, other)[0]
    requests = llm.requests([PROMPT] * 2, [slow, other])
    monkeypatch.setattr(grammar, "MASK_SECONDS", -1.0)  # the first mask was made before
    for request in requests:
        llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()
    assert requests[0].finish_reason == "error"
    assert len(requests[0].output_ids) == 1
    assert isinstance(requests[0].error, RequestError)
    assert "took" in str(requests[0].error)
    assert requests[1].output_ids == whole.token_ids


def test_masks_of_a_draft_that_have_no_time_are_left_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"json": SCHEMA}
    whole = complete(llm, form, RequestSpeculation(method="ngram"))
    monkeypatch.setattr(grammar, "DRAFT_SECONDS", -1.0)
    slow = complete(llm, form, RequestSpeculation(method="ngram"))
    assert slow.token_ids == whole.token_ids
    assert slow.speculation.accepted == 0
    assert whole.speculation.accepted > 0


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"json": SCHEMA, "regex": "a"},
        {"json": "x"},
        {"regex": 5},
        {"choice": "yes"},
        {"choice": [""]},
        {"json_object": 1},
    ],
)
def test_a_form_is_exactly_one_and_of_its_type(form: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputs(**form)
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams.from_mapping({"structured_outputs": form})


@pytest.mark.parametrize("other", [{"min_tokens": 3}, {"bad_words": ["a"]}])
def test_what_might_forbid_the_only_token_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputs(json_object=True), **other)
