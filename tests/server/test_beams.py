"""Beam search: against transformers, against all outputs there are, and as one request among others."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
import transformers

from cli_checks import Pair
from sametoken import LLM
from sametoken.engine.request import TokenLogprob
from sametoken.server.beams import Beam, grow
from server_checks import MODEL, Running, running, wait_until, with_template

PROMPTS = [[3, 17, 40, 9], [5, 5, 60]]
WIDTH, TOKENS = 3, 6
SEARCH: dict[str, Any] = {
    "prompt": PROMPTS, "n": WIDTH, "max_tokens": TOKENS, "use_beam_search": True, "ignore_eos": True, "logprobs": 2,
    "return_token_ids": True, "temperature": 0,
}  # fmt: skip


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    llm = LLM(target, tiny_pair.draft, max_batch_size=4, kv_cache={"tokens_per_block": 4})
    with running(llm, {"model": "tiny"}, served_model_name=[MODEL]) as server:
        yield server


def choices(served: Running, **changes: Any) -> list[dict[str, Any]]:
    reply = served.post("/v1/completions", {**SEARCH, **changes})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_the_beams_are_those_of_transformers(served: Running, tiny_pair: Pair, penalty: float) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    found = choices(served, length_penalty=penalty)
    assert [choice["index"] for choice in found] == list(range(WIDTH * len(PROMPTS)))
    for place, prompt in enumerate(PROMPTS):
        model.generation_config.eos_token_id = None
        theirs = model.generate(
            torch.tensor([prompt]), num_beams=WIDTH, num_return_sequences=WIDTH, max_new_tokens=TOKENS,
            do_sample=False, length_penalty=penalty, return_dict_in_generate=True, output_scores=True,
            pad_token_id=0,
        )  # fmt: skip
        ours = found[place * WIDTH : (place + 1) * WIDTH]
        assert [choice["token_ids"] for choice in ours] == theirs.sequences[:, len(prompt) :].tolist()
        scores = [sum(choice["logprobs"]["token_logprobs"]) / TOKENS**penalty for choice in ours]
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-3)
        assert {choice["finish_reason"] for choice in ours} == {"length"}


def test_beams_wide_enough_find_the_best_of_all_outputs() -> None:
    """With an end token, in a language of three tokens whose next one depends on all before."""
    steps, tokens, end = 4, 3, 2

    def scores(prefix: tuple[int, ...]) -> list[float]:
        weights = [random.Random(repr((prefix, token))).random() for token in range(tokens)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def total(output: tuple[int, ...]) -> float:
        return sum(scores(output[:place])[token] for place, token in enumerate(output))

    outputs = {
        output
        for size in range(1, steps + 1)
        for output in itertools.product(range(tokens), repeat=size)
        if end not in output[:-1] and (size == steps or output[-1] == end)
    }
    live, ended = [Beam()], list[Beam]()
    for _ in range(steps):
        items = []
        for beam in live:
            top = sorted(enumerate(scores(beam.tokens)), key=lambda pair: -pair[1])
            items.append(TokenLogprob(*top[0], 1, tuple(top)))
        live, more = grow(live, items, {end}, 2**steps)
        ended += more
    best = max([*live, *ended], key=lambda beam: beam.rank(1.0))
    assert best.tokens == max(outputs, key=lambda output: total(output) / len(output))
    assert {beam.tokens for beam in (*live, *ended)} == outputs
    assert best.total == pytest.approx(total(best.tokens))


def test_an_end_token_ends_a_beam(served: Running) -> None:
    """It is a token of the output and no text, and beams that ended compete with longer ones."""
    first = choices(served)[0]["token_ids"]
    found = choices(served, prompt=PROMPTS[:1], stop_token_ids=[first[1]], length_penalty=0.0, n=8)
    ended = [choice for choice in found if choice["finish_reason"] == "length" or choice["token_ids"][-1] == first[1]]
    assert len(ended) == len(found) == 8
    assert all(first[1] not in choice["token_ids"][:-1] for choice in found)


def test_a_width_of_one_is_greedy(served: Running) -> None:
    greedy = choices(served, n=1, use_beam_search=False)
    assert [choice["text"] for choice in choices(served, n=1)] == [choice["text"] for choice in greedy]


def test_a_conversation_is_searched_as_its_prompt_is(served: Running) -> None:
    asked = {"n": 2, "max_tokens": 5, "use_beam_search": True}
    text = served.post("/v1/completions", {**asked, "prompt": "user: one two assistant:"}).json()
    chat = served.post("/v1/chat/completions", {**asked, "messages": [{"role": "user", "content": "one two"}]}).json()
    found = [choice["message"]["content"] for choice in chat["choices"]]
    assert found == [choice["text"] for choice in text["choices"]]
    assert found[0] != found[1]
    assert chat["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stream": True}, "stream"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"stop": "a"}, "stop"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"logit_bias": {"3": 5}}, "logit_bias"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"min_tokens": 2}, "min_tokens"),
    ],
)
def test_fields_that_no_beam_follows_are_refused(served: Running, change: dict[str, Any], field: str) -> None:
    reply = served.post("/v1/completions", {**SEARCH, **change})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert "use_beam_search" in reply.json()["error"]["message"]


def test_a_search_changes_no_other_text_and_leaves_nothing_behind(served: Running) -> None:
    """Beside streams in the same batch, and when its client goes away in the middle."""
    body = {"prompt": "one two three", "max_tokens": 60, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    alone = served.post("/v1/completions", body).json()["choices"][0]["text"]

    async def together() -> list[Any]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            return list(
                await asyncio.gather(
                    client.post("/v1/completions", json=body),
                    client.post("/v1/completions", json={**SEARCH, "max_tokens": 30}),
                )
            )

    texts = [reply.json()["choices"][0]["text"] for reply in asyncio.run(together())]
    assert texts[0] == alone
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{served.url}/v1/completions", json={**SEARCH, "max_tokens": 100}, timeout=0.02)
    wait_until(lambda: not served.server.worker.requests)
    assert choices(served) == choices(served)
