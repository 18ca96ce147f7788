"""Requests with different API keys learn nothing of each other: neither from cached prompts nor from guesses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli_checks import Pair
from sametoken import LLM
from server_checks import Running, running

KEYS = ("first", "second")
PROMPT = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture(params=[False, True], ids=["apart", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def served(tiny_pair: Pair, one_thread: None, shared: bool) -> Iterator[Running]:
    llm = LLM(tiny_pair.target, speculative={"adaptive": False}, kv_cache_tokens_per_block=4)
    with running(llm, api_key=list(KEYS), share_between_keys=shared) as server:
        yield server


def ask(served: Running, key: str) -> tuple[int, int]:
    """Tokens of the prompt that were cached, and draft tokens that came true."""
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "speculative": {"report": True}}
    reply = served.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).json()
    details = reply["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens") or 0, reply["choices"][0]["speculative"]["stats"]["accepted"]


def test_a_key_profits_from_its_own_requests_alone(served: Running, shared: bool) -> None:
    cached, alone = ask(served, KEYS[0])
    assert cached == 0
    again = ask(served, KEYS[0])
    assert again[0] > 0
    assert again[1] > alone  # the first answer makes guesses for the second
    other = ask(served, KEYS[1])
    assert other == (again if shared else (0, alone))
    assert ask(served, KEYS[1]) == again
