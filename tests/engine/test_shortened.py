"""A draft model that reads a part of a long text: the target's text is the same, and reading is bounded.

A draft that equals its target, both without attention, finds every token whatever it has read: its guesses show that
noise is taken at the places of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny_models
from cli_checks import speak
from engine_checks import DEPTH, ahead, alone, check_idle, make_llm, prompts, said, save_pair, sharpen
from sametoken import LLM, Completion, SamplingParams
from sametoken.drafters.reading import FIRST, SPARE, TextWindow
from sametoken.heads.draft_model.drafts import DraftModelDrafter
from sametoken.model.compiled_guesses import Committed

Pair = tuple[str, str]
LONG = prompts(8, longest=70)
TEMPERATURES = (0.0, 0.7, 1.0)
TREE = {"tree_top_k": 3, "max_total_draft_tokens": 9}
REQUESTS = [
    (prompt, SamplingParams(temperature=TEMPERATURES[i % 3], seed=i, max_tokens=24, ignore_eos=True, logprobs=2))
    for i, prompt in enumerate([*LONG, LONG[2]])
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and a draft that is often right."""
    return save_pair("llama-3.1", tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[tuple[Any, ...]]:
    oracle = make_llm(pair[0], cache={"enable_block_reuse": False})
    return [said(alone(oracle, *request)) for request in REQUESTS]


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose guesses depend on the last token alone."""
    model = sharpen(tiny_models.build("llama-3.1"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    root = tmp_path_factory.mktemp("forgetful")
    model.save_pretrained(root)
    speak(root)
    return str(root)


def drafter_of(llm: LLM) -> DraftModelDrafter:
    drafter = llm.engine.drafters["draft_target"]
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


def generate(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]] = REQUESTS) -> list[Completion]:
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])


def shortened(llm: LLM) -> list[int]:
    """Rows that are cut from now on."""
    drafter, cut = drafter_of(llm), list[int]()
    shorten = drafter._shorten

    def noted(rows: Sequence[int]) -> None:
        cut.extend(row for row in rows if not drafter.fits(row))
        shorten(rows)

    drafter._shorten = noted  # type: ignore[method-assign]
    return cut


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [1, 6, 20])
def test_no_window_changes_a_token(
    pair: Pair, expected: list[tuple[Any, ...]], window: int, shape: dict[str, int], dtype: str
) -> None:
    """Eight rows, of which some are cut again while they decode, and a ninth that begins with pages of the third."""
    llm = make_llm(*pair, draft_window=window, dtype=dtype, **shape)
    cut = shortened(llm)
    if dtype == "bfloat16":
        oracle = make_llm(pair[0], dtype=dtype)
        expected = [said(alone(oracle, *request)) for request in REQUESTS]
    found = generate(llm)
    assert [said(each) for each in found] == expected
    assert sum(each.speculation.accepted for each in found) > 0
    assert len(set(cut)) < len(REQUESTS)  # a prompt of one token is read whole
    assert len(cut) > len(set(cut)) or window > 6
    check_idle(llm.engine)
    again = generate(llm)
    assert [said(each) for each in again] == expected
    assert any(each.cached_tokens for each in again)


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_is_that_of_the_whole_text(forgetful: str, dtype: str, shape: dict[str, int]) -> None:
    """The compiled kernels in bfloat16, torch's levels in float32: both guess as they do without a window."""
    hot = [(prompt, replace(params, temperature=1.0, logprobs=None)) for prompt, params in REQUESTS[1:4]]
    found = []
    for window in (6, 10_000):
        llm = make_llm(forgetful, forgetful, draft_window=window, dtype=dtype, **shape)
        cut = shortened(llm)
        found.append([each.speculation.accepted_lengths for each in generate(llm, hot)])
        assert bool(cut) == (window == 6)
    assert found[0] == found[1]
    assert sum(sum(each[2:]) for each in found[0]) > 0


def test_a_window_over_the_text_changes_no_guess(pair: Pair) -> None:
    """With rows for shortened texts, and without: the context is too short for any."""
    guesses: list[list[Any]] = []
    for window in (80, 10_000):
        llm = make_llm(*pair, draft_window=window, dtype="bfloat16")
        assert bool(llm.engine.table.short_pages) == (window == 80)
        drafter, made = drafter_of(llm), list[Any]()
        propose = drafter.propose

        def noted(*given: Any, propose: Any = propose, made: list[Any] = made) -> Any:
            made.append(propose(*given))
            return made[-1]

        drafter.propose = noted  # type: ignore[method-assign]
        generate(llm, REQUESTS[:3])
        guesses.append([(each.drafts, torch.as_tensor(each.shares).tolist()) for each in made])
    assert guesses[0] == guesses[1]


def tokens_read(llm: LLM) -> list[int]:
    """Numbers of committed tokens that the draft model reads from now on, call by call."""
    drafter, counts = drafter_of(llm), list[int]()
    feed, compiled = drafter._feed, drafter._compiled

    def fed(rows: Sequence[int], slots: Any) -> Any:
        counts.extend(len(tokens) for tokens, _ in slots)
        return feed(rows, slots)

    def committed(rows: Sequence[int], slots: Any, *rest: Any) -> Any:
        found = compiled(rows, slots, *rest)
        counts.extend(len(tokens) for tokens, _ in slots if found is not None)
        return found

    drafter._feed, drafter._compiled = fed, committed  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("window", [8, 30])
def test_reading_a_prompt_is_bounded(pair: Pair, window: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    counts: list[list[int]] = []
    for length in (60, 85):
        llm = make_llm(*pair, draft_window=window, dtype="bfloat16")
        counts.append(tokens_read(llm))
        llm.generate([LONG[2] + LONG[2]][0][:length], params)
        assert FIRST + window <= sum(counts[-1]) <= FIRST + window + params.max_tokens
    assert counts[0] == counts[1]


def test_a_shortened_text_never_leaves_its_pages(pair: Pair) -> None:
    llm = make_llm(*pair, draft_window=5, max_seq_len=128, dtype="bfloat16")
    assert llm.engine.table.short_pages * 8 >= TextWindow(5).slots(128, DEPTH) == FIRST + 10 + SPARE * (1 + DEPTH)
    drafter, reads = drafter_of(llm), list[Committed]()
    guess = drafter.guesser.guess

    def noted(read: Committed, *rest: Any) -> Any:
        reads.append(read)
        return guess(read, *rest)

    drafter.guesser.guess = noted  # type: ignore[method-assign]
    llm.generate(LONG[2], SamplingParams(temperature=0.7, seed=4, max_tokens=50, ignore_eos=True))
    ends = [read.starts[0] + len(read.tokens[0]) for read in reads]
    assert max(ends) + DEPTH <= TextWindow(5).slots(128, DEPTH)
    assert all(read.rows[0] > llm.engine.table.spare for read in reads)
    assert [read.drawn_at(0)[0] for read in reads] == sorted({read.drawn_at(0)[0] for read in reads})


def test_rows_that_draft_late(pair: Pair) -> None:
    """Only the last two rows draft: what they decoded plainly is longer than the window."""
    late = [(LONG[n], replace(REQUESTS[n][1], max_tokens=80 if n == 1 else 40)) for n in (1, 0, 3, 7)]
    oracle = make_llm(pair[0])
    expected = [said(alone(oracle, *request)) for request in late]
    for window in (3, 20):
        llm = make_llm(*pair, draft_window=window, draft_len_schedule={2: DEPTH})
        cut, counts = shortened(llm), tokens_read(llm)
        assert [said(each) for each in generate(llm, late)] == expected
        assert cut
        assert max(counts) <= FIRST + window + 1  # the pending token may be read with them


def test_preempted_rows_and_shared_pages(pair: Pair, expected: list[tuple[Any, ...]]) -> None:
    llm = make_llm(*pair, draft_window=7, cache={"max_tokens": 200})
    assert [said(each) for each in generate(llm)] == expected
    assert llm.engine.load.preemptions > 0
    check_idle(llm.engine)


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_steps_of_the_device(forgetful: str, shape: dict[str, int]) -> None:
    """A captured step finds a shortened row by tensors; the host cuts it again before it leaves its pages."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=50, ignore_eos=True)
    found = []
    for window in (6, 10_000):
        llm = make_llm(forgetful, forgetful, draft_window=window, max_seq_len=128, **shape)
        keys, cut = ahead(llm), shortened(llm)
        found.append(llm.generate([LONG[2], LONG[7]], params))
        assert keys
        assert len(cut) > 4 or window > 6
    oracle = make_llm(forgetful, max_seq_len=128)
    for one, other, prompt in zip(*found, (LONG[2], LONG[7]), strict=True):
        assert said(one) == said(other) == said(alone(oracle, prompt, params))
        assert one.speculation.accepted_lengths == other.speculation.accepted_lengths
