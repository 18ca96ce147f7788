"""What the API answers: the same as the engine asked directly, through OpenAI's own client; streams equal replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from cli_checks import Pair
from sametoken import LLM, Completion, SamplingParams
from sametoken.engine.stats import SpeculationStats
from server_checks import MODEL, Running, running

PROMPT = "abc abc abc"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 14}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None) -> Iterator[Running]:
    llm = LLM(tiny_pair.target, tiny_pair.draft, {"max_draft_len": 3, "adaptive": False}, max_batch_size=8)
    with running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tiny_pair: Pair, one_thread: None) -> LLM:
    """The same target without drafts and without HTTP."""
    return LLM(tiny_pair.target)


@pytest.fixture
def client(served: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def alone(plain: LLM, prompt: str = PROMPT, **params: Any) -> Completion:
    return plain.generate(prompt, SamplingParams(**params))[0]


def test_a_completion_is_what_the_engine_says_plainly(client: OpenAI, plain: LLM) -> None:
    expected = alone(plain, **SAMPLED)
    got = client.completions.create(model=MODEL, prompt=PROMPT, **SAMPLED)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == expected.finish_reason
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(PROMPT), len(expected.token_ids))
    assert got.object == "text_completion"
    assert got.model == MODEL


def test_max_tokens_is_openais_16_unless_given(client: OpenAI) -> None:
    got = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert got.usage is not None
    assert got.usage.completion_tokens == 16
    assert got.choices[0].finish_reason == "length"


def test_prompts_and_choices_come_in_order_and_prompts_may_be_ids(client: OpenAI, plain: LLM) -> None:
    texts = [PROMPT, "xyz"]
    params = SamplingParams(n=2, **SAMPLED)
    expected = [completion.text for completion in plain.generate(texts, params)]
    got = client.completions.create(model=MODEL, prompt=texts, n=2, **SAMPLED)
    assert [choice.text for choice in got.choices] == expected
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    ids = [plain.tokenizer.encode(text) for text in texts]
    by_ids = client.completions.create(model=MODEL, prompt=ids, n=2, **SAMPLED)
    assert [choice.text for choice in by_ids.choices] == expected
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == sum(map(len, ids))


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_adds_up_to_the_reply(client: OpenAI, n: int) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "n": n, "logprobs": 2, "echo": True, **SAMPLED}
    whole = client.completions.create(**asked)
    texts = [""] * n
    tokens: list[list[str]] = [[] for _ in range(n)]
    scores: list[list[float | None]] = [[] for _ in range(n)]
    offsets: list[list[int]] = [[] for _ in range(n)]
    reasons: list[Any] = [None] * n
    usage = None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
            scores[choice.index] += choice.logprobs.token_logprobs or []
            offsets[choice.index] += choice.logprobs.text_offset or []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert texts[choice.index] == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens
        assert scores[choice.index] == choice.logprobs.token_logprobs
        assert offsets[choice.index] == choice.logprobs.text_offset
        assert reasons[choice.index] == choice.finish_reason
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_echoed_logprobs_are_the_engines(client: OpenAI, plain: LLM) -> None:
    expected = alone(plain, logprobs=2, prompt_logprobs=2, temperature=0, max_tokens=4)
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2, echo=True)
    choice = got.choices[0]
    assert choice.text == PROMPT + expected.text
    assert choice.logprobs is not None
    items = [*(expected.prompt_logprobs or []), *(expected.logprobs or [])]
    assert choice.logprobs.token_logprobs == [None if item is None else pytest.approx(item.logprob) for item in items]
    letters = [letter for letter in choice.logprobs.tokens or [] if len(letter) == 1]
    assert "".join(letters).startswith(PROMPT)
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))
    assert all(top is None or 2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs or [])


def test_scoring_a_text_generates_nothing(client: OpenAI) -> None:
    extra = {"speculative": {"steps": True}}
    got = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, extra_body=extra
    )  # fmt: skip
    assert got.choices[0].text == PROMPT
    reported = got.choices[0].model_extra or {}
    assert [reported["speculative"][name] for name in ("token_ids", "tokens", "origins", "rejected", "steps")] == [
        []
    ] * 5
    assert got.choices[0].logprobs is not None
    assert len(got.choices[0].logprobs.tokens or []) == len(PROMPT)
    assert got.usage is not None
    assert got.usage.completion_tokens == 0


def test_best_of_returns_the_most_probable(client: OpenAI, plain: LLM) -> None:
    drawn = plain.generate(PROMPT, SamplingParams(n=4, logprobs=0, **SAMPLED))

    def mean(completion: Completion) -> float:
        return sum(item.logprob for item in completion.logprobs or []) / len(completion.token_ids)

    best = sorted(drawn, key=mean, reverse=True)
    got = client.completions.create(model=MODEL, prompt=PROMPT, n=2, best_of=4, **SAMPLED)
    assert [choice.text for choice in got.choices] == [completion.text for completion in best[:2]]
    assert got.usage is not None
    assert got.usage.completion_tokens == sum(len(completion.token_ids) for completion in drawn)


def test_a_chat_is_what_the_engine_says_and_parts_are_text(client: OpenAI, plain: LLM) -> None:
    expected = plain.chat([{"role": "user", "content": "hi"}], SamplingParams(**SAMPLED))[0]
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        got = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
            max_completion_tokens=14,
            temperature=0.9,
            seed=7,
            logprobs=True,
            top_logprobs=3,
        )
        assert got.choices[0].message.content == expected.text
        assert got.choices[0].logprobs is not None
        scored = got.choices[0].logprobs.content or []
        assert len(scored) == len(expected.token_ids)
        assert all(len(item.top_logprobs) == 3 and item.bytes is not None for item in scored)


def test_a_chat_stream_begins_with_the_role_and_counts(client: OpenAI, served: Running) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **SAMPLED}
    whole = client.chat.completions.create(**asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts)
    raw = served.post("/v1/chat/completions", {**asked, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")


def test_every_parameter_reaches_the_engine(client: OpenAI, plain: LLM) -> None:
    """Each changes the text in the same way as it does without HTTP."""
    base: dict[str, Any] = {**SAMPLED, "ignore_eos": True}
    default = alone(plain, **base).text
    biased = {5: 30.0, 6: 30.0}
    for changed in (
        {"top_k": 2}, {"min_p": 0.3}, {"top_p": 0.3}, {"repetition_penalty": 1.9}, {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0}, {"logit_bias": biased}, {"bad_words": [default[0]]}, {"stop": [default[3:5]]},
        {"stop": [default[3:5]], "include_stop_str_in_output": True},
        {"stop_token_ids": plain.tokenizer.encode(default[6])},
        {"stop": list(default), "min_tokens": 9},
    ):  # fmt: skip
        expected = alone(plain, **{**base, **changed})
        spoken = {**base, **changed, "logit_bias": {str(k): v for k, v in changed.get("logit_bias", {}).items()}}
        got = client.completions.create(model=MODEL, prompt=PROMPT, extra_body=spoken).choices[0]
        assert got.text == expected.text, changed
        assert got.text != default, changed
        assert got.stop_reason == expected.stop_reason  # type: ignore[attr-defined]


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(served: Running, plain: LLM) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.5 + 0.1 * i, "seed": i, "max_tokens": 4 + 3 * i, "top_p": 1 - 0.05 * i} for i in range(9)
    ]
    expected = [alone(plain, prompt=f"{PROMPT}{i}", **params).text for i, params in enumerate(asked)]

    async def together() -> list[str]:
        async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                text = ""
                options = {"speculative": {"method": ["ngram", "draft_target", "suffix", None][i % 4]}}
                prompt = f"{PROMPT}{i}"
                async for chunk in await client.completions.create(
                    model=MODEL, prompt=prompt, stream=True, extra_body=options, **asked[i]
                ):
                    text += chunk.choices[0].text
                return text

            return list(await asyncio.gather(*map(one, range(len(asked)))))

    assert asyncio.run(together()) == expected


def test_speculation_is_each_requests_own_and_is_reported(served: Running, plain: LLM) -> None:
    expected = alone(plain, **SAMPLED)
    for asked, method in (
        ({"enabled": False}, "none"),
        ({"method": "ngram"}, "ngram"),
        ({"max_draft_len": 1}, "draft_target"),
    ):
        body = {"prompt": PROMPT, **SAMPLED, "speculative": {**asked, "report": True}}
        choice = served.post("/v1/completions", body).json()["choices"][0]
        assert choice["text"] == expected.text
        told = choice["speculative"]
        assert told["token_ids"] == expected.token_ids
        assert told["stats"]["method"] == method
        assert told["stats"].keys() == SpeculationStats("none").to_json().keys()
        assert told["origins"].count("drafted") == told["stats"]["accepted"]
        assert len(told["stats"]["accepted_lengths"]) <= (2 if asked.get("max_draft_len") == 1 else 4)
        assert (told["stats"]["drafted"] == 0) == (method == "none")


def test_a_stream_reports_the_origin_of_every_token(served: Running) -> None:
    body = {"prompt": PROMPT, **SAMPLED, "stream": True, "speculative": {"report": True}}
    lines = served.post("/v1/completions", body).text.split("\n\n")[:-2]
    told = [json.loads(line.removeprefix("data: "))["choices"][0]["speculative"] for line in lines]
    stats = told[-1]["stats"]
    origins = [origin for part in told for origin in part["origins"]]
    assert len(origins) == stats["target_forwards"] + stats["accepted"] == sum(len(part["tokens"]) for part in told)
    assert all("stats" not in part for part in told[:-1])
    assert all(len(part["rejected"]) == len(part["tokens"]) for part in told)
    # A forward emits accepted guesses first and then a token of the target's own.
    assert all(part["origins"] == ["drafted"] * (len(part["origins"]) - 1) + ["target"] for part in told[:-1])


def test_steps_are_reported_to_who_asks_for_them(served: Running) -> None:
    asked = {"prompt": PROMPT, **SAMPLED, "speculative": {"adaptive": False, "steps": True}}
    whole = served.post("/v1/completions", asked).json()["choices"][0]["speculative"]
    lines = served.post("/v1/completions", {**asked, "stream": True}).text.split("\n\n")[:-2]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["speculative"] for line in lines]
    assert [step for part in parts for step in part["steps"]] == whole["steps"]
    assert len(whole["steps"]) == whole["stats"]["target_forwards"]
    keys = {"drafter", "token_ids", "tokens", "parents", "probabilities", "accepted", "drafters"}
    assert all(step.keys() == keys for step in whole["steps"])
    guesses = [step for step in whole["steps"] if step["drafter"] == "draft_target"]
    assert all(step["drafters"] == [["draft_target"]] * len(step["tokens"]) for step in guesses)
    assert sum(len(step["tokens"]) for step in guesses) == whole["stats"]["drafted"] > 0
    assert all(0 <= probability <= 1 for step in guesses for probability in step["probabilities"])
    asked["speculative"] = {"adaptive": False, "report": True}
    assert "steps" not in served.post("/v1/completions", asked).json()["choices"][0]["speculative"]


def test_prompt_logprobs_are_told_in_vllms_form(served: Running, plain: LLM) -> None:
    expected = alone(plain, prompt_logprobs=1, max_tokens=2, seed=1).prompt_logprobs or []
    body = {"prompt": PROMPT, "max_tokens": 2, "seed": 1, "prompt_logprobs": 1}
    told = served.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    for said, item in zip(told[1:], expected[1:], strict=True):
        assert item is not None
        assert said[str(item.token_id)]["logprob"] == pytest.approx(item.logprob)
        assert said[str(item.token_id)]["rank"] == item.rank


def test_models_and_tokens(client: OpenAI, served: Running) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    told = served.post("/tokenize", {"prompt": "hello", "return_token_strs": True}).json()
    assert told["count"] == 5
    assert told["max_model_len"] == 128
    assert told["token_strs"] == list("hello")
    assert served.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "hello"}
    chat = served.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert served.post("/detokenize", {"tokens": chat["tokens"]}).json() == {"prompt": "user: hi<unk>assistant:"}


def test_the_server_says_how_it_is(served: Running) -> None:
    assert served.get("/health").json() == {"status": "ok"}
    assert served.client.head("/health").status_code == 200  # as load balancers ask
    assert served.get("/health/").status_code == 404  # a redirection would name the host that the client named
    assert served.get("/live").status_code == 200
    assert served.get("/ping").json() == served.post("/ping", None).json() == {"status": "ok"}  # as SageMaker asks
    assert served.get("/load").json() == {"server_load": 0}
    assert served.get("/version").json()["version"]
    assert served.get("/server_info").json()["model"] == MODEL
    document = served.get("/openapi.json").json()
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["speculative"]
    assert served.get("/docs").status_code == 200


def read_metrics(served: Running) -> dict[str, float]:
    """Samples by name, or by name and labels other than the model's."""
    return {
        sample.name
        + "".join(f"{{{k}={v}}}" for k, v in sample.labels.items() if k not in ("model_name", "engine")): sample.value
        for family in text_string_to_metric_families(served.get("/metrics").text)
        for sample in family.samples
    }


def test_metrics_agree_with_the_replies(served: Running) -> None:
    before = read_metrics(served)
    body = {"prompt": PROMPT, "n": 2, **SAMPLED, "speculative": {"report": True}}
    reply = served.post("/v1/completions", body).json()
    after = read_metrics(served)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    stats = [choice["speculative"]["stats"] for choice in reply["choices"]]
    accepted = sum(each["accepted"] for each in stats)
    assert grown["sametoken_generation_tokens_total"] == reply["usage"]["completion_tokens"]
    assert grown["sametoken_prompt_tokens_total"] == len(PROMPT)
    assert grown["sametoken_spec_decode_num_accepted_tokens_total"] == accepted
    assert grown["sametoken_spec_decode_num_draft_tokens_total"] == sum(each["drafted"] for each in stats)
    positions = [grown[f"sametoken_spec_decode_num_accepted_tokens_per_pos_total{{position={i}}}"] for i in range(3)]
    assert sum(positions) == accepted
    assert positions == sorted(positions, reverse=True)
    assert grown["sametoken_spec_decode_acceptance_length_sum"] == reply["usage"]["completion_tokens"]
    assert grown["sametoken_spec_decode_acceptance_length_count"] == sum(each["target_forwards"] for each in stats)
    assert grown["sametoken_time_to_first_token_seconds_count"] == 2
    assert grown["sametoken_request_success_total{finished_reason=length}"] == 2
    assert after["sametoken_num_requests_running"] == 0


def test_a_forward_that_was_cut_short_counts_what_it_emitted(served: Running) -> None:
    path, body = "/v1/completions", {"prompt": PROMPT, **SAMPLED, "speculative": {"adaptive": False, "report": True}}
    text = served.post(path, body).json()["choices"][0]["text"]
    body["prediction"] = {"type": "content", "content": text}
    report = served.post(path, body).json()["choices"][0]["speculative"]
    guessed = [i for i, origin in enumerate(report["origins"]) if origin == "drafted"]
    last = next(i for i in guessed if report["token_ids"][i] not in report["token_ids"][:i])
    body["stop_token_ids"] = [report["token_ids"][last]]
    before = read_metrics(served)
    cut = served.post(path, body).json()
    after = read_metrics(served)
    assert cut["choices"][0]["speculative"]["origins"][-1] == "drafted"
    grown = {name: after[name] - before[name] for name in before if name.endswith(("_sum", "tokens_total"))}
    assert grown["sametoken_spec_decode_acceptance_length_sum"] == cut["usage"]["completion_tokens"] == last + 1
    assert grown["sametoken_generation_tokens_total"] == last + 1


def test_a_prediction_is_drafted_from_and_counted(client: OpenAI, plain: LLM) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **SAMPLED}
    expected = client.chat.completions.create(**asked)
    assert expected.usage is not None
    assert expected.usage.completion_tokens_details is not None
    assert expected.usage.completion_tokens_details.accepted_prediction_tokens == 0
    text = expected.choices[0].message.content or ""
    parts = [{"type": "text", "text": text}]
    for content, right in ((text, True), (parts, True), ("quite another text", False)):
        got = client.chat.completions.create(**asked, prediction={"type": "content", "content": content})
        assert got.choices[0].message.content == text
        assert got.usage is not None
        assert got.usage.completion_tokens == expected.usage.completion_tokens
        details = got.usage.completion_tokens_details
        assert details is not None
        assert ((details.accepted_prediction_tokens or 0) > 2) == right
        assert right or details.accepted_prediction_tokens == 0
        assert (details.rejected_prediction_tokens or 0) >= 0
