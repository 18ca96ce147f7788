"""Drafts that nobody asked for: their method and their length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cli_checks import Pair
from sametoken import LLM, SamplingParams
from sametoken.commands import serve
from sametoken.commands.models import open_llm
from sametoken.commands.options import Chosen
from sametoken.commands.resolution import resolve
from sametoken.options.speculation import FREE, FREE_LENGTH

LIMITS: list[dict[str, Any]] = [
    {"max_draft_len": 4},
    {"method": "suffix"},
    {"tree_top_k": 2},
    {"max_total_draft_tokens": 4},
    {"draft_len_schedule": {4: 4}},
]


def test_a_target_alone_drafts_without_being_asked(tiny_pair: Pair) -> None:
    llm = LLM(tiny_pair.target)
    assert (llm.method, llm.speculative.max_draft_len) == (FREE, FREE_LENGTH)


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_asked_for_stays(tiny_pair: Pair, limit: Mapping[str, Any]) -> None:
    assert LLM(tiny_pair.target, speculative=limit).speculative.max_draft_len == 4


def test_a_draft_has_the_length_of_drafts(tiny_pair: Pair) -> None:
    alone = LLM(tiny_pair.target, tiny_pair.draft, {"method": "draft_target"})
    assert (alone.method, alone.speculative.max_draft_len) == ("draft_target", 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures what the draft model does alone")
def test_a_draft_model_is_joined_by_what_guesses_for_nothing(tiny_pair: Pair) -> None:
    """Unless something about drafts was set: whoever tunes the draft means the draft."""
    joined = LLM(tiny_pair.target, tiny_pair.draft)
    assert (joined.method, joined.speculative.max_draft_len) == ("auto", 12)
    assert joined.make_requests([5], SamplingParams())[0].methods == ("suffix", "draft_target")
    for setting in ({"max_draft_len": 4}, {"adaptive": False}, {"tree_top_k": 2}):
        assert LLM(tiny_pair.target, tiny_pair.draft, setting).method == "draft_target"


@pytest.mark.parametrize(("asked", "length"), [({}, FREE_LENGTH), ({"max_draft_len": 4}, 4)])
def test_the_command_line_tells_a_length_from_none(tiny_pair: Pair, asked: dict[str, Any], length: int) -> None:
    chosen = Chosen({option.name: option.default for option in serve.OPTIONS} | asked, asked)
    values = resolve(tiny_pair.target, chosen).values
    assert open_llm(tiny_pair.target, values, calibrated=False).speculative.max_draft_len == length
