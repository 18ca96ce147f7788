"""Sequences whose scores are no numbers, or whose rules ban every token: they end with an error, others go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_checks import ahead, alone, check_idle, llama, make_llm, prompts, said, using
from head_checks import llm_with, make_eagle, make_medusa
from native_checks import BUILT, use
from sametoken import LLM, ModelOutputError, RequestError, SamplingParams
from sametoken.kernels.cpu.library import Library
from sametoken.speculation.draft import Draft, ancestors, chain_parents
from sametoken.speculation.rows import RowSampling, Sampling
from sametoken.speculation.sampling import sample
from sametoken.speculation.verify import _search, _walk
from server_checks import Running, openai_client, running

pytestmark = pytest.mark.usefixtures("one_thread")
POISON = 77  # the token whose row is not finite from where it stands on
GOOD = 70  # prompts are of tokens below


def poisoned(directory: str, place: Path, token: int = POISON) -> str:
    """A copy of a Llama that overflows after `token` only; all weights are finite."""
    shutil.copytree(directory, place)
    file = place / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = 0  # a feature that this token alone has
    weights["model.embed_tokens.weight"][token, 0] = 9
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weight[:, 0] = 2e38 * (-1) ** torch.arange(weight.shape[0])
    assert all(weight.isfinite().all() for weight in weights.values())
    save_file(weights, file, {"format": "pt"})
    return str(place)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A target, the same poisoned, and a poisoned draft."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    target, draft = llama(root / "target", **sizes), llama(root / "draft", **sizes, num_hidden_layers=1)
    return target, poisoned(target, root / "poisoned"), poisoned(draft, root / "poisoned draft")


def params(temperature: float, seed: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": temperature, "seed": seed, "max_tokens": 12, "ignore_eos": True, **options})


KINDS = [params(0.0), params(0.9), params(0.9, top_k=5), params(1.0, top_p=0.7, min_p=0.01), params(0.5, logprobs=2)]
CASES = [("float32", "none", None), ("float32", "int8", None), ("bfloat16", "none", None)]
CASES += [("bfloat16", form, each) for form in ("none", "int8", "int8_weight_only", "int4") for each in BUILT]


@pytest.mark.cover
@pytest.mark.parametrize(("dtype", "form", "kernels"), CASES, ids=lambda each: getattr(each, "name", each))
@pytest.mark.parametrize("method", ["none", "draft_target", "ngram"])
def test_a_row_that_overflows_ends_with_an_error_and_others_go_on(
    models: tuple[str, str, str], dtype: str, form: str, kernels: Library | None, method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(kernels, monkeypatch)
    options = {"dtype": dtype, "quantization": form, "max_num_tokens": 64, "cache": {"max_tokens": 400}}
    llm = make_llm(models[1], models[0], **options)
    texts = prompts(len(KINDS), GOOD)
    expected = [alone(llm, text, kind) for text, kind in zip(texts, KINDS, strict=True)]
    assert all(each.error is None for each in expected)
    bad = [[*text[:6], POISON, *text[6:12]] for text in texts]
    for _ in range(2):  # the second time in pages where numbers were that are none
        mixed = [text for both in zip(bad, texts, strict=True) for text in both]
        asked = [using(kind, method) for kind in KINDS for _ in range(2)]
        got = llm.generate(mixed, asked)
        assert [said(each) for each in got[1::2]] == [said(each) for each in expected]
        for each in got[0::2]:
            assert (each.finish_reason, each.token_ids) == ("error", [])
            assert isinstance(each.error, ModelOutputError)
        check_idle(llm.engine)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_up_to_there_is_that_of_plain_decoding(models: tuple[str, str, str], temperature: float) -> None:
    """The model says the token itself, inside an accepted draft or not."""
    llm = make_llm(models[1], models[0], tree_top_k=2)
    kind = params(temperature, seed=5, max_tokens=40, logit_bias={POISON: 6.0 if temperature else 4.0}, logprobs=1)
    plain = [alone(llm, text, kind) for text in prompts(6, GOOD)]
    assert sum(each.finish_reason == "error" and len(each.token_ids) > 1 for each in plain) > 0
    for method in ("draft_target", "ngram", "suffix", "auto"):
        got = llm.generate(prompts(6, GOOD), using(kind, method))
        assert [said(each) for each in got] == [said(each) for each in plain], method
    check_idle(llm.engine)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("kind", ["draft", "eagle", "medusa"])
def test_a_draft_without_numbers_does_not_matter(
    models: tuple[str, str, str], dtype: str, branches: int, kind: str
) -> None:
    """A draft model that overflows in every text here, and heads all of whose scores are NaN."""
    target, _, draft = models
    options = {"dtype": dtype, "tree_top_k": branches}
    if kind == "draft":
        llm = make_llm(target, draft, **options)
    else:
        head = (make_eagle if kind == "eagle" else make_medusa)(target, dtype=getattr(torch, dtype))
        for parameter in head.parameters():
            if parameter.is_floating_point() and parameter.dim() == 1:
                parameter.data.fill_(float("nan"))
        llm = llm_with(target, head, **options)
    texts = [[POISON, *text] for text in prompts(len(KINDS), GOOD)]
    kinds = [*KINDS, params(0.9, top_k=3, presence_penalty=0.5)]
    texts.append(texts[0])
    expected = [alone(llm, text, each) for text, each in zip(texts, kinds, strict=True)]
    got = llm.generate(texts, [using(each, llm.method) for each in kinds])
    assert [said(each) for each in got] == [said(each) for each in expected]
    assert all(each.error is None for each in got)
    check_idle(llm.engine)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["none", "draft_target"])
def test_captured_steps_end_it_too(models: tuple[str, str, str], method: str, temperature: float) -> None:
    llm = make_llm(models[1], models[0])
    kind = params(temperature, seed=5, max_tokens=40, logit_bias={POISON: 6.0 if temperature else 4.0})
    plain = [alone(llm, text, kind) for text in prompts(4, GOOD)]
    assert any(each.finish_reason == "error" and each.token_ids for each in plain)
    keys = ahead(llm)
    got = llm.generate(prompts(4, GOOD), using(kind, method))
    assert keys
    assert [said(each) for each in got] == [said(each) for each in plain]
    check_idle(llm.engine)


def test_rules_that_ban_every_token_end_the_request_only(models: tuple[str, str, str]) -> None:
    llm = make_llm(models[0], models[0])
    banned = params(0.0, min_tokens=5, stop_token_ids=list(range(llm.config.vocab_size)))
    for way in ("none", "draft_target"):
        got = llm.generate(prompts(2, GOOD), [using(banned, way), using(KINDS[0], way)])
        assert isinstance(got[0].error, RequestError)
        assert "ban every token" in str(got[0].error)
        assert got[1].finish_reason == "length"


def test_a_nucleus_too_small_for_float32_does_not_hang(models: tuple[str, str, str]) -> None:
    llm = make_llm(models[0], models[0], dtype="bfloat16")
    kind = params(1.0, top_p=5e-324)
    assert said(llm.generate(prompts(1, GOOD), kind)[0]) == said(alone(llm, prompts(1, GOOD)[0], kind))


VALUES = (float("nan"), float("inf"), -float("inf"))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", VALUES)
def test_no_token_is_drawn_from_what_is_no_number(options: dict[str, Any], value: float) -> None:
    scores = torch.randn(1, 3, 40, generator=torch.Generator().manual_seed(0))
    scores[0, 1] = value
    if value != -float("inf"):
        scores[0, 2, 7] = value
    row = RowSampling(SamplingParams(**{"temperature": 1.0, **options}), 5, [1, 2], 40)
    draft = Draft(torch.tensor([[2, 3, 4]]), chain_parents(1, 3))
    drawn = sample(scores, draft, ancestors(draft.parents), torch.tensor([1]), Sampling.of([row]))[0]
    assert drawn[0] >= 0
    assert drawn[1] == -1
    assert (drawn[2] == -1) == (value != -float("inf"))


def test_a_node_after_which_nothing_can_be_drawn_is_the_next_root() -> None:
    draft = Draft(torch.tensor([[5, 6, 7, -1]] * 3), chain_parents(3, 4))
    drawn = torch.tensor([[6, -1, 8, 9], [-1, -1, -1, -1], [6, 7, 8, -1]])
    for found in (_walk(draft, drawn), _search(draft, ancestors(draft.parents), drawn)):
        assert found.length.tolist() == [0, 0, 2]
        assert found.bonus.tolist() == [6, -1, 8]


# --- over HTTP


@pytest.fixture(scope="module")
def served(models: tuple[str, str, str], one_thread: None) -> Iterator[Running]:
    with running(LLM(models[1], models[0], {"adaptive": False})) as server:
        yield server


def text_of(llm: LLM, tokens: list[int]) -> str:
    return llm.tokenizer.decode(tokens)


def test_a_reply_is_an_error_of_the_server(served: Running) -> None:
    bad = text_of(served.llm, [20, 21, POISON, 22])
    for path, body in (
        ("/v1/completions", {"prompt": [bad, "abc"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": bad}]}),
        ("/v1/responses", {"input": bad}),
    ):
        reply = served.post(path, body)
        assert reply.status_code == 500
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "model_output_invalid")
        assert "not finite" in error["message"]
        assert reply.headers["x-should-retry"] == "false"
    assert served.post("/v1/completions", {"prompt": "abc", "max_tokens": 3, "temperature": 0}).status_code == 200


def test_a_stream_ends_with_an_error_event(served: Running) -> None:
    bad = text_of(served.llm, [20, 21, POISON, 22])
    with openai_client(served) as client, pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="tiny", prompt=bad, stream=True))
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": bad}], "stream": True}),
        ("/v1/responses", {"input": bad, "stream": True}),
    ):
        lines = [line for line in served.post(path, body).text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "model_output_invalid"
    metrics = httpx.get(f"{served.url}/metrics", timeout=60).text
    assert 'finished_reason="error"' in metrics
