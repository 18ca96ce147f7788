"""Prompt lookup against a search by brute force; equal work at every context length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sametoken.drafters.ngram as ngram
from drafter_checks import check_draft, drafted, mixed_text, tree_paths, work_of_steps
from sametoken.drafters.base import Proposed
from sametoken.drafters.ngram import NgramDrafter
from sametoken.drafters.padded import Guess, chain, padded
from sametoken.errors import ConfigError
from sametoken.speculation.draft import Draft, chain_parents

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def brute_force(text: list[int], pending: int, sizes: range, limit: int, oldest: bool) -> list[int]:
    """Searches the whole text for its own end, then reads on one token at a time, over the end into its own guess."""
    whole = [*text, pending]
    for size in sorted(sizes, reverse=True):
        starts = [s for s in range(len(whole) - size) if whole[s : s + size] == whole[len(whole) - size :]]
        if starts:
            end = (starts[0] if oldest else starts[-1]) + size
            guess = list(whole)
            for step in range(limit):
                guess.append(guess[end + step])
            return guess[len(whole) :]
    return []


def proposed(drafter: NgramDrafter, row: int, pending: int, limit: int) -> list[int]:
    draft = drafted(drafter, [row], [pending], [limit], None)
    check_draft(draft, [pending], [limit], drafter.nodes)
    return list(max(tree_paths(draft, 0), key=len, default=()))


@given(TOKENS, st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 9), st.booleans())
def test_equals_brute_force(text: list[int], pending: int, smallest: int, more: int, limit: int, oldest: bool) -> None:
    drafter = NgramDrafter(
        max_draft_len=9, max_matching_ngram_size=smallest + more, min_matching_ngram_size=smallest, is_use_oldest=oldest
    )
    drafter.admit(0, [])
    drafter.observe([0], [text], None)
    sizes = range(smallest, smallest + more + 1)
    assert proposed(drafter, 0, pending, limit) == brute_force(text, pending, sizes, limit, oldest)


@given(st.lists(TOKENS, max_size=5), TOKENS, st.integers(0, 3))
def test_incremental_equals_rebuilt(chunks: list[list[int]], cached: list[int], pending: int) -> None:
    """Chunks, proposals in between, a cached prefix and a row number used before leave no trace."""
    grown, rebuilt = NgramDrafter(max_draft_len=6), NgramDrafter(max_draft_len=6)
    grown.admit(0, [1, 2, 3, 1, 2, 3])
    grown.release(0)
    grown.admit(0, cached)
    for chunk in chunks:
        drafted(grown, [0], [pending], [6], None)
        grown.observe([0], [chunk], None)
    rebuilt.admit(0, [])
    rebuilt.observe([0], [cached + [token for chunk in chunks for token in chunk]], None)
    assert proposed(grown, 0, pending, 6) == proposed(rebuilt, 0, pending, 6)


def test_repetition_is_continued_past_the_end_of_the_text() -> None:
    drafter = NgramDrafter(max_draft_len=7)
    drafter.admit(0, [])
    drafter.observe([0], [[5, 6, 5, 6, 5]], None)
    assert proposed(drafter, 0, 6, 7) == [5, 6, 5, 6, 5, 6, 5]


def test_rows_of_a_batch_are_independent_and_padded() -> None:
    drafter = NgramDrafter(max_draft_len=4)
    for row, text in ((3, [1, 2, 3, 4]), (7, [9, 8]), (1, [1, 2, 3, 4])):
        drafter.admit(row, text)
    draft = drafted(drafter, [7, 3, 1], [1, 1, 1], [4, 2, 0], None)
    check_draft(draft, [1, 1, 1], [4, 2, 0], drafter.nodes)
    assert draft.tokens.tolist() == [[1, -1, -1], [1, 2, 3], [1, -1, -1]]


def test_no_draft_exceeds_max_draft_len() -> None:
    drafter = NgramDrafter(max_draft_len=2)
    drafter.admit(0, [4] * 10)
    assert proposed(drafter, 0, 4, 100) == [4, 4]


@pytest.mark.parametrize("is_public_pool", [False, True])
def test_only_a_public_pool_shares_text_between_rows(is_public_pool: bool) -> None:
    drafter = NgramDrafter(max_draft_len=3, is_public_pool=is_public_pool)
    drafter.admit(0, [11, 12, 13, 14])
    drafter.admit(1, [])
    expected = [12, 13, 14] if is_public_pool else []
    assert proposed(drafter, 1, 11, 3) == expected
    drafter.release(0)
    assert proposed(drafter, 1, 11, 3) == expected
    # The end of another row's text is the end of what is known: nothing to continue with.
    assert proposed(drafter, 1, 14, 3) == []


@given(st.lists(TOKENS, min_size=2, max_size=4), st.integers(0, 3), st.integers(1, 6))
def test_public_pool_equals_brute_force(texts: list[list[int]], pending: int, limit: int) -> None:
    """The last text that contains the longest n-gram is quoted; if it ends there, a shorter n-gram is tried."""
    drafter = NgramDrafter(max_draft_len=6, is_public_pool=True)
    for row, text in enumerate(texts):
        drafter.admit(row, text)
    own = [*texts[0], pending]
    expected: list[int] = []
    for size in range(min(3, len(own)), 0, -1):
        ends = [
            (row, end)
            for row, text in enumerate(texts)
            for end in range(size, len(text) + 1)
            if text[end - size : end] == own[-size:]
        ]
        if ends and not expected:
            row, end = ends[-1]
            quoted = list(own if row == 0 else texts[row])
            while row == 0 and len(quoted) < end + limit:
                quoted.append(quoted[end + len(quoted) - len(own)])
            expected = quoted[end : end + limit]
    assert proposed(drafter, 0, pending, limit) == expected


def test_a_full_pool_forgets_the_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_POOL_NGRAMS", 40)
    drafter = NgramDrafter(max_draft_len=2, max_matching_ngram_size=1)
    drafter.admit(0, range(100))
    _, pool = drafter._rows[0]
    assert 20 <= len(pool) <= 40
    assert proposed(drafter, 0, 90, 2) == [91, 92]
    assert proposed(drafter, 0, 50, 2) == []


def test_empty_batch_and_empty_rows() -> None:
    drafter = NgramDrafter(max_draft_len=4)
    check_draft(drafted(drafter, [], [], [], None), [], [], 4)
    drafter.admit(0, [])
    drafter.observe([0], [[]], None)
    drafter.observe([], [], None)
    assert proposed(drafter, 0, 1, 4) == []


def test_padded_keeps_parents_and_continues_the_last_node() -> None:
    draft = padded([5, 6], [Guess([1, 2, 3], [0, 0, 2]), Guess([7], [0])])
    assert torch.equal(draft.tokens, torch.tensor([[5, 1, 2, 3], [6, 7, -1, -1]]))
    assert torch.equal(draft.parents, torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]]))


def test_a_tensor_draft_is_a_proposal_of_the_guesses_before_its_padding() -> None:
    draft = Draft(torch.tensor([[7, 1, 2], [8, -1, 3], [9, 4, -1]]), chain_parents(3, 3))
    found = Proposed.of(draft)
    assert found == ([chain([1, 2]), chain([]), chain([4])], None, None)
    assert Proposed.of(found) is found


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_draft_len": -1}, "max_draft_len"),
        ({"max_draft_len": 4, "min_matching_ngram_size": 0}, "min_matching_ngram_size"),
        ({"max_draft_len": 4, "max_matching_ngram_size": 2, "min_matching_ngram_size": 3}, "max_matching_ngram_size"),
    ],
)
def test_bad_options_are_named(options: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        NgramDrafter(**options)


def test_a_step_costs_the_same_at_any_context_length() -> None:
    text = mixed_text(32_200)
    lines, memory = zip(
        *(work_of_steps(NgramDrafter(max_draft_len=8), text, context, 100) for context in (1_000, 32_000)), strict=True
    )
    assert 1_000 < lines[1] < 1.2 * lines[0]
    assert memory[1] < memory[0] + 2_000
