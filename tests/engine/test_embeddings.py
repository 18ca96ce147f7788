"""Vectors of texts: equal to transformers' hidden states, pooled; while streams go on; refused by other models."""

from __future__ import annotations

import base64
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cli_checks import LETTERS, SPECIAL, Pair
from sametoken import LLM, CheckpointError
from sametoken.train.dataset.extraction import FeatureReader
from server_checks import MODEL, Running, openai_client, running, with_pooling

TEXTS = ["one two three", "a", "to be or not to be"]


@pytest.fixture(scope="module")
def server(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = with_pooling(tiny_pair.target, tmp_path_factory.mktemp("pooled") / "model", "last", True)
    with running(LLM(place, dtype="float32"), {"model": MODEL}) as made:
        yield made


def expected(pair: Pair, text: str, mode: str) -> torch.Tensor:
    ids = torch.tensor([[len(SPECIAL) + LETTERS.index(letter) for letter in text]])
    with torch.no_grad():
        states = pair.oracle.model(ids, use_cache=False).last_hidden_state[0]
    return {"last": states[-1], "mean": states.mean(0), "first": states[0]}[mode]


def test_openais_client_gets_what_transformers_computes(server: Running, tiny_pair: Pair) -> None:
    found = openai_client(server).embeddings.create(model=MODEL, input=TEXTS)  # which asks for base64
    assert found.usage.prompt_tokens == sum(map(len, TEXTS))
    for each, text in zip(found.data, TEXTS, strict=True):
        right = torch.nn.functional.normalize(expected(tiny_pair, text, "last"), dim=0)
        torch.testing.assert_close(torch.tensor(each.embedding), right, atol=1e-5, rtol=1e-4)


def test_numbers_and_base64_are_the_same_and_ids_are_texts(server: Running) -> None:
    body = {"input": TEXTS[0]}
    numbers = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    packed = server.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack(f"<{len(numbers)}f", base64.b64decode(packed)) == tuple(
        struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers))
    )
    ids = server.llm.tokenizer.encode(TEXTS[0])
    assert server.post("/v1/embeddings", {"input": ids}).json()["data"][0]["embedding"] == numbers


@pytest.mark.parametrize(("mode", "normalize"), [("mean", False), ("first", True)])
def test_every_pooling(tiny_pair: Pair, tmp_path: Path, mode: str, normalize: bool) -> None:
    llm = LLM(with_pooling(tiny_pair.target, tmp_path / "model", mode, normalize), dtype="float32")
    with running(llm, {"model": MODEL}) as server:
        found = server.post("/v1/embeddings", {"input": TEXTS[2]}).json()["data"][0]["embedding"]
    right = expected(tiny_pair, TEXTS[2], mode)
    right = torch.nn.functional.normalize(right, dim=0) if normalize else right
    torch.testing.assert_close(torch.tensor(found), right, atol=1e-5, rtol=1e-4)


def test_streams_go_on_and_keep_their_text(server: Running) -> None:
    body = {"prompt": "one", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    single = server.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    beside: list[Any] = []
    asking = threading.Thread(
        target=lambda: beside.extend(server.post("/v1/embeddings", {"input": TEXTS}).json()["data"] for _ in range(5))
    )
    asking.start()
    together = server.post("/v1/completions", body).json()["choices"][0]["text"]
    asking.join()
    assert together == alone
    assert beside == [single] * 5


def test_a_client_that_goes_away_is_not_read_for_any_longer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    read, piece = [], FeatureReader.piece

    def slow(self: FeatureReader, *given: Any) -> torch.Tensor:
        read.append(given)
        time.sleep(0.05)
        return piece(self, *given)

    monkeypatch.setattr(FeatureReader, "piece", slow)
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/embeddings", {"input": ["abc"] * 400}, timeout=0.5)
    assert server.post("/v1/embeddings", {"input": "abc"}).status_code == 200
    assert len(read) < 200


def test_what_cannot_be_is_refused(server: Running, tiny_pair: Pair) -> None:
    size = server.llm.config.vocab_size
    for body, words in (
        ({"input": "a", "dimensions": 3}, "dimensions: got 3, expected "),
        ({"input": [size]}, f"input: got {size}, expected token ids 0 .. {size - 1}"),
        ({"input": "a" * (server.llm.max_seq_len + 1)}, f"expected 1 to {server.llm.max_seq_len}"),
        ({"input": []}, "expected text, a list of texts"),
        ({}, "input is missing"),
    ):
        answer = server.post("/v1/embeddings", body)
        assert (answer.status_code, words in answer.text) == (400, True), answer.text
    with running(LLM(tiny_pair.target), {"model": MODEL}) as other:
        answer = other.post("/v1/embeddings", {"input": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "not_an_embedding_model"
    assert f"{MODEL} is no embedding model: it has no modules.json" in answer.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("modules.json", "[[]]", "expected a list of objects with type and path"),
        ("modules.json", '[{"type": "a.Dense", "path": "x"}]', "the module Dense is not supported"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "got pooling_mode_max_tokens; expected one of"),
        ("1_Pooling/config.json", "{}", "got no pooling mode"),
    ],
)
def test_pooling_that_is_not_supported_is_named_when_the_model_is_loaded(
    tiny_pair: Pair, tmp_path: Path, name: str, content: str, words: str
) -> None:
    place = with_pooling(tiny_pair.target, tmp_path / "model", "last", True)
    (Path(place) / name).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        LLM(place)


def test_tokenizer_info(server: Running) -> None:
    found = server.get("/tokenizer_info").json()
    assert found["eos_token"] == "</s>"
    assert found["model_max_length"] == server.llm.max_seq_len
    assert "{{ m.role }}" in found["chat_template"]
