"""A cache pool smaller than the context: refused where a context was asked for, said where it was not."""

from __future__ import annotations

import logging

import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.errors import MemoryPlanError, PromptTooLongError

POOL = {"max_tokens": 40, "tokens_per_block": 8}


def test_a_pool_that_shortens_the_context_says_so_and_is_what_errors_blame(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sametoken"):
        llm = LLM(pair.target, kv_cache=POOL)
    assert llm.max_seq_len < 40
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"the context is {llm.max_seq_len} tokens instead of 128" in message
    assert "max_tokens 40" in message
    with pytest.raises(PromptTooLongError, match=r"raise kv_cache max_tokens$"):
        llm.generate([5] * llm.max_seq_len)
    assert len(llm.generate([5] * (llm.max_seq_len - 1))[0].token_ids) == 1


@pytest.mark.parametrize("options", [{"max_seq_len": 64}, {"kv_cache": {"max_tokens": 1, "tokens_per_block": 4}}])
def test_a_pool_too_small_for_what_was_asked_is_refused(pair: Pair, options: dict[str, object]) -> None:
    with pytest.raises(MemoryPlanError, match=r"raise kv_cache max_tokens or request a shorter context"):
        LLM(pair.target, **{"kv_cache": POOL, **options})  # type: ignore[arg-type]


def test_a_context_that_was_asked_for_is_what_errors_blame(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sametoken"):
        llm = LLM(pair.target, max_seq_len=20, kv_cache=POOL)
    assert not caplog.records
    with pytest.raises(PromptTooLongError, match=r"raise max_seq_len$"):
        llm.generate([5] * 20)
    whole = LLM(pair.target)
    with pytest.raises(PromptTooLongError, match=r"take a model with a longer context$"):
        whole.generate([5] * whole.max_seq_len)
