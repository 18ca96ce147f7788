"""A draft model that guesses a part of the vocabulary: the target's text is the same, and guesses are of that part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import SPECIAL, speak
from engine_checks import alone, check_idle, llama, make_llm, prompts, said, save_pair
from sametoken import LLM, SamplingParams
from sametoken.errors import ConfigError
from sametoken.heads.draft_model.drafts import DraftModelDrafter
from sametoken.options.sampling import StructuredOutputs

Pair = tuple[str, str]
TREE = {"tree_top_k": 3, "max_total_draft_tokens": 9}
REQUESTS = [
    (prompt, SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=16, ignore_eos=True, logprobs=2))
    for i, prompt in enumerate(prompts(8))
]
EDITED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3}, {"logit_bias": {5: 4.0, 80: 3.0}}, {"top_p": 0.9, "min_p": 0.02},
    {"structured_outputs": StructuredOutputs(regex="[a-m]{30}")},
]  # fmt: skip
CHANGED = [(REQUESTS[i][0], replace(REQUESTS[i][1], logprobs=None, **how)) for i in (2, 3) for how in EDITED]
SIZE = 40


@cache
def plain(target: str, dtype: str) -> list[tuple[Any, ...]]:
    """Plain decoding of each request by itself."""
    oracle = make_llm(target, dtype=dtype)
    return [said(alone(oracle, *request)) for request in [*REQUESTS, *CHANGED]]


@pytest.fixture(scope="module", params=["llama-3.1", "gemma-2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and a draft that is often right; the heads of the second pair are tied, and their logits capped."""
    return save_pair(request.param, tmp_path_factory.mktemp("pair"))


def drafter_of(llm: LLM) -> DraftModelDrafter:
    drafter = llm.engine.drafters["draft_target"]
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


def noted(llm: LLM) -> list[tuple[set[int], set[int]]]:
    """Guesses of each proposal, and the tokens of the vocabulary at that moment."""
    drafter, found = drafter_of(llm), list[tuple[set[int], set[int]]]()
    propose = drafter.propose

    def watched(*given: Any) -> Any:
        proposed = propose(*given)
        assert drafter.vocabulary is not None
        found.append(({token for guess in proposed.drafts for token in guess.tokens}, set(drafter.vocabulary.tokens)))
        return proposed

    drafter.propose = watched  # type: ignore[method-assign]
    return found


def generate(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bfloat16", {}), ("bfloat16", TREE), ("float32", TREE)], ids=["chain", "tree", "float32"]
)
def test_a_smaller_vocabulary_changes_no_token(pair: Pair, dtype: str, shape: dict[str, int]) -> None:
    """Alone and in eight rows, at two temperatures; then requests whose logits are edited."""
    expected = plain(pair[0], dtype)
    llm = make_llm(*pair, dtype=dtype, draft_vocab_size=SIZE, **shape)
    guesses = noted(llm)
    found = [*generate(llm, REQUESTS), *generate(llm, CHANGED)]
    assert [said(each) for each in found] == expected
    assert sum(each.speculation.accepted for each in found) > 0
    assert [said(generate(llm, [request])[0]) for request in REQUESTS[2:4]] == expected[2:4]
    check_idle(llm.engine)
    assert len(guesses) > 10
    for made, kept in guesses:
        assert made <= kept | {-1}
        assert len(kept) == SIZE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_noise_is_that_of_the_whole_vocabulary(pair: Pair, dtype: str, shape: dict[str, int], tmp_path: Path) -> None:
    """All tokens in another order: the guesses are those of the draft as it is."""
    file, guesses = tmp_path / "tokens.json", []
    rows = make_llm(pair[0], dtype=dtype).engine.runner.decoder.config.vocab_size
    file.write_text(json.dumps([*reversed(range(rows))]))
    for options in ({}, {"draft_token_map": str(file)}):
        llm = make_llm(*pair, dtype=dtype, **options, **shape)
        assert (drafter_of(llm).vocabulary is None) == (not options)
        found = generate(llm, [(prompt, replace(params, temperature=1.0)) for prompt, params in REQUESTS])
        guesses.append([each.speculation.accepted_lengths for each in found])
    assert guesses[0] == guesses[1]
    assert sum(map(sum, guesses[0])) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_rows_of_the_head_are_those_of_the_whole(pair: Pair, dtype: str, quantization: str) -> None:
    if dtype == "float32" and quantization != "none":
        pytest.skip("formats are of bfloat16")
    llm = make_llm(*pair, dtype=dtype, draft_quantization=quantization, draft_vocab_size=SIZE)
    generate(llm, REQUESTS)
    drafter = drafter_of(llm)
    decoder, vocabulary = drafter.decoder, drafter.vocabulary
    assert vocabulary is not None
    assert decoder.outputs is not None
    assert decoder.outputs.tolist() == vocabulary.tokens
    assert vocabulary.tokens != vocabulary._first, "no token was learned"
    x = torch.randn(5, decoder.config.hidden_size).to(decoder.dtype)
    whole = decoder.whole_head(decoder.norm(x))
    assert torch.equal(decoder.head(decoder.norm(x)), whole[:, decoder.outputs])


def test_learned_tokens(pair: Pair) -> None:
    """Those of the newest texts, until a second owner comes; special tokens stay."""
    llm = make_llm(*pair, draft_vocab_size=10)
    vocabulary = drafter_of(llm).vocabulary
    assert vocabulary is not None
    first = vocabulary.tokens[:]
    assert first[:3] == [0, 1, 2]
    vocabulary.admit("one")
    vocabulary.learn([first[7], 50, 51, 50])
    assert vocabulary.tokens == [*first[:5], 50, 51, *first[7:]]
    vocabulary.learn([*range(60, 70)])
    assert sorted(vocabulary.tokens) == sorted([*first[:5], *range(65, 70)])
    vocabulary.learn([50])
    vocabulary.admit("one")
    assert 50 in vocabulary.tokens
    vocabulary.admit("two")
    assert vocabulary.tokens == first
    vocabulary.learn([50])
    assert vocabulary.tokens == first
    assert drafter_of(llm).decoder.outputs is not None
    assert drafter_of(llm).decoder.outputs.tolist() == first


def test_two_ranks_and_a_whole_draft(pair: Pair) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "draft_vocab_size": SIZE, "tensor_parallel_size": 2}
    if "gemma" in json.loads(Path(pair[0], "config.json").read_text())["model_type"]:
        pytest.skip("one family is enough")
    with make_llm(pair[0], dtype="bfloat16", tensor_parallel_size=2) as llm:
        expected = [said(each) for each in generate(llm, REQUESTS)]
    with make_llm(*pair, **options) as llm:
        found = generate(llm, REQUESTS)
    assert [said(each) for each in found] == expected
    assert sum(each.speculation.accepted for each in found) > 0


def test_the_whole_vocabulary(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sametoken")
    llm = make_llm(*pair, draft_vocab_size=10**9)
    assert drafter_of(llm).vocabulary is None
    assert [each for each in caplog.messages if "draft_vocab_size 1000000000: the draft has" in each]


@pytest.mark.parametrize(
    ("draft", "options", "words"),
    [
        ("pair", {"draft_vocab_size": 0}, "draft_vocab_size = 0"),
        ("pair", {"draft_vocab_size": -5}, "draft_vocab_size = -5"),
        ("pair", {"draft_vocab_size": 5}, "5 tokens, of which 3 are special .* expected 6 at least"),
        (None, {"draft_vocab_size": 50}, "draft_vocab_size 50: there is no draft model"),
        ("head", {"draft_vocab_size": 50}, "draft_vocab_size 50: .* is a head, whose vocabulary was chosen when"),
        ("pair", {"draft_token_map": "/no/such"}, "draft_token_map /no/such: .* expected a list of token ids"),
        (
            "pair", {"draft_vocab_size": 50, "tensor_parallel_size": 2, "draft_tensor_parallel_size": 2},
            "draft_vocab_size 50: a draft that draft_tensor_parallel_size 2 divides has all tokens",
        ),
    ],
)  # fmt: skip
def test_refusals(pair: Pair, draft: str | None, options: dict[str, Any], words: str) -> None:
    target, place = ("embedded", "embedded-eagle3") if draft == "head" else (pair[0], draft and pair[1])
    with pytest.raises(ConfigError, match=words):
        make_llm(target, place, **options)


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    place = llama(tmp_path / "model")
    speak(Path(place))
    llm = make_llm(place, place, draft_vocab_size=2 * len(SPECIAL))
    vocabulary = drafter_of(llm).vocabulary
    assert vocabulary is not None
    assert vocabulary.tokens == [*range(2 * len(SPECIAL))]
