"""One rule for sampling that nobody asked for: the request, then generation_config.json, then the library's default.

The model of these tests recommends top_k 1, which is greedy: transformers says what the text is then. Without the
recommendation a text is drawn at temperature 1.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_checks import Pair, greedy
from sametoken import LLM, SametokenError, SamplingParams
from server_checks import MODEL, Running, running

PROMPT = "one two"
TOKENS = 12


@pytest.fixture(scope="module")
def advised(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target, with a recommendation."""
    place = tmp_path_factory.mktemp("advised") / "target"
    shutil.copytree(tiny_pair.target, place)
    (place / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 0.6, "eos_token_id": 2}))
    return str(place)


@pytest.fixture(scope="module")
def llm(advised: str) -> LLM:
    return LLM(advised, dtype="float32")


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm, {"model": MODEL}) as made:
        yield made


@pytest.fixture(scope="module")
def expected(tiny_pair: Pair) -> list[int]:
    return greedy(tiny_pair.oracle, PROMPT, TOKENS)


def test_the_library(llm: LLM, advised: str, expected: list[int]) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(top_k=1, temperature=0.6)
    assert llm.generate(PROMPT)[0].token_ids[:TOKENS] == expected
    # Parameters that are stated are taken as they are, as in vLLM.
    drawn = llm.generate(PROMPT, SamplingParams(seed=1, max_tokens=TOKENS))[0].token_ids
    assert drawn != expected
    for name in ("none", "vllm"):
        other = LLM(advised, dtype="float32", generation_config=name)
        assert other.get_default_sampling_params() == SamplingParams()


def ids(answer: Any) -> list[int]:
    assert answer.code == 0, answer.err
    return list(json.loads(answer.out)["token_ids"])


def test_generate(run: Any, advised: str, expected: list[int]) -> None:
    words = ("generate", advised, "--prompt", PROMPT, "--dtype", "float32", "--max-tokens", str(TOKENS), "--seed", "1")
    assert ids(run(*words, "--json")) == expected
    assert ids(run(*words, "--json", "--top-k", "0", "--temperature", "1")) != expected
    assert ids(run(*words, "--json", "--generation-config", "none")) != expected
    assert ids(run(*words, "--json", "--generation-config", "none", "--temperature", "0")) == expected


def test_chat_and_synthesize(run: Any, advised: str, llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    """Both say what greedy decoding of the conversation says."""
    said = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=TOKENS))[0].text
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    answer = run("chat", advised, "--dtype", "float32", "--max-tokens", str(TOKENS))
    assert answer.out.rstrip("\n") == said.rstrip("\n")
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    words = ("synthesize", advised, "--data", str(data), "--output", str(out), "--dtype", "float32")
    assert run(*words, "--max-tokens", str(TOKENS)).code == 0
    assert json.loads(out.read_text())["conversations"][1]["content"] == said


def test_the_server(server: Running, llm: LLM) -> None:
    def text(**body: Any) -> str:
        reply = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 1, **body})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    said = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS))[0].text
    assert text() == said
    assert text(top_k=0, temperature=1) != said
    assert text(top_k=None) == said
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
    drawn, greedily = (server.post("/v1/chat/completions", {**chat, **own}).json() for own in ({}, {"temperature": 0}))
    assert drawn["choices"][0]["message"]["content"] == greedily["choices"][0]["message"]["content"]
    response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": TOKENS}).json()
    assert (response["temperature"], response["top_p"]) == (0.6, 1.0)


@pytest.mark.parametrize("stated", [{"temperature": "warm"}, {"top_p": 3}, {"top_k": 1.5}])
def test_a_recommendation_that_cannot_be_is_refused_when_the_model_is_loaded(
    advised: str, tmp_path: Path, stated: dict[str, Any]
) -> None:
    place = shutil.copytree(advised, tmp_path / "bad")
    (place / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(SametokenError, match=f"generation_config.json: {next(iter(stated))}: got"):
        LLM(str(place))


def test_commands_that_measure_say_their_temperature_themselves() -> None:
    """They compare: what a model recommends must not decide what is measured."""
    from importlib import import_module

    for name in ("bench", "doctor", "evaluate", "demo"):
        options = import_module(f"sametoken.commands.{name}").OPTIONS
        (temperature,) = (option for option in options if option.name == "temperature")
        assert float(temperature.default) == 0.0
