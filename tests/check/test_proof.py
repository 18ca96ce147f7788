"""The proof as a library: which cases it runs, what a comparison holds, which methods it refuses."""

from __future__ import annotations

import logging

import pytest

from cli_checks import Pair
from sametoken import LLM, ConfigError, SamplingParams
from sametoken.check.proof import Case, Comparison, Difference, in_words, prove, without_advice
from sametoken.prompts.sources import encode_texts

PARAMS = SamplingParams(max_tokens=6, seed=3)


def test_prove_runs_every_method_alone_and_batched(pair: Pair) -> None:
    llm = LLM(pair.target, pair.draft)
    prompts = encode_texts(llm.tokenizer, ["a b", "one two one two"])
    found = list(prove(llm, prompts, PARAMS, [0.0, 1.0]))
    ways = [("none", True), *((m, b) for m in llm.methods if m != "none" for b in (False, True))]
    assert sorted(one.case for one in found) == sorted(Case(m, t, b) for t in (0.0, 1.0) for m, b in ways)
    assert all(one.difference is None and 0 < one.tokens <= 12 for one in found)


def test_prove_refuses_a_method_that_needs_a_draft_before_it_runs(pair: Pair) -> None:
    llm = LLM(pair.target)
    with pytest.raises(ConfigError, match=r"--method draft_target needs .*; give --draft PATH \(this engine has"):
        prove(llm, encode_texts(llm.tokenizer, ["a"]), PARAMS, methods=["draft_target"])


def test_a_difference_is_told_with_both_tokens(pair: Pair) -> None:
    llm = LLM(pair.target)
    prompts = encode_texts(llm.tokenizer, ["a", "b"])
    found = Comparison(Case("ngram", 0.7, True), 12, 1.5, Difference(1, 4, 5, None, 0.25))
    words = in_words(llm, found, prompts)
    assert words.startswith(f"first difference: method ngram, temperature 0.7, batched, prompt 1 {prompts[1].text!r}, ")
    assert words.endswith("speculative nothing (it ended); logit margin there 0.25")
    assert f"position 4: plain 5 {llm.tokenizer.token_text(5)!r}" in words


def test_without_advice_restores_the_level_of_the_log() -> None:
    log = logging.getLogger("sametoken")
    before = log.level
    with without_advice():
        assert not log.isEnabledFor(logging.WARNING)
    assert log.level == before
