"""The suffix automaton and the trees grown from it against counting by brute force; equal work at every length."""

from __future__ import annotations

from heapq import nlargest

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sametoken.drafters.suffix as suffix
from drafter_checks import check_draft, drafted, mixed_text, tree_paths, work_of_steps
from sametoken.drafters.automaton import MAX_FOLLOWERS, SuffixAutomaton
from sametoken.drafters.base import RowOrigin
from sametoken.drafters.suffix import OutputStore, SuffixDrafter
from sametoken.errors import ConfigError

Tokens = list[int]
TOKENS = st.lists(st.integers(0, 2), max_size=30)
TEXTS = st.lists(TOKENS, max_size=4)
DEPTH = st.integers(2, 6)
LEAST = 0.23  # no product of small fractions, so rounding cannot decide what is dropped


def automaton_of(texts: list[Tokens], max_depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_depth)
    for text in texts:
        automaton.begin()
        for token in text:
            automaton.extend(token)
    return automaton


def occurrences(texts: list[Tokens], string: Tokens) -> int:
    n = len(string)
    return sum(text[i : i + n] == string for text in texts for i in range(len(text) - n + 1))


def longest_suffix(texts: list[Tokens], string: Tokens, longest: int) -> Tokens:
    """The longest suffix of `string`, of at most `longest` tokens, that some text contains; [] if none."""
    for n in range(min(longest, len(string)), 0, -1):
        if occurrences(texts, string[-n:]):
            return string[-n:]
    return []


def shares(texts: list[Tokens], context: Tokens) -> dict[int, float]:
    """What followed `context`, or the longest suffix of it that anything followed, by searching all texts."""
    for n in range(len(context), 0, -1):
        suffix_ = context[-n:]
        counts = {token: occurrences(texts, [*suffix_, token]) for token in range(3)}
        if any(counts.values()):
            total = max(sum(counts.values()), occurrences(texts, suffix_) - 1)
            return {token: count / total for token, count in counts.items() if count}
    return {}


def tree(texts: list[Tokens], context: Tokens, longest: int, depth: int) -> dict[tuple[int, ...], float]:
    """Every path of at most `depth` tokens with a probability of at least LEAST."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        level = {
            (*path, token): probability * share
            for path, probability in level.items()
            for token, share in shares(texts, longest_suffix(texts, [*context, *path], longest)).items()
            if probability * share >= LEAST
        }
        found |= level
    return found


@given(TEXTS, TOKENS, DEPTH)
def test_match_is_the_longest_suffix_that_occurred(texts: list[Tokens], context: Tokens, max_depth: int) -> None:
    automaton = automaton_of(texts, max_depth)
    expected = longest_suffix(texts, context, max_depth - 1)
    assert automaton.match(context).length == len(expected)
    assert automaton.match(context) == automaton.match(expected)


@given(TEXTS, TOKENS, DEPTH)
def test_followers_are_counted_exactly(texts: list[Tokens], context: Tokens, max_depth: int) -> None:
    automaton = automaton_of(texts, max_depth)
    known = longest_suffix(texts, context, max_depth - 1)
    followers = automaton.followers(automaton.match(context))
    assert {each.token: each.share for each in followers} == pytest.approx(shares(texts, known))
    for each in followers:
        assert each.match == automaton.match(longest_suffix(texts, [*known, each.token], max_depth - 1))


@given(TOKENS, DEPTH)
def test_cursor_is_the_end_of_the_text(text: Tokens, max_depth: int) -> None:
    automaton = automaton_of([text], max_depth)
    assert automaton.cursor == automaton.match(text[-(max_depth - 1) :])
    assert automaton.cursor.length == min(len(text), max_depth - 1)


@given(TEXTS, DEPTH)
def test_memory_is_two_states_a_token_and_none_for_a_text_known(texts: list[Tokens], max_depth: int) -> None:
    once = automaton_of(texts, max_depth)
    assert len(once) <= 1 + 2 * sum(map(len, texts))
    prefixes = [text[: len(text) // 2] for text in texts]
    assert len(automaton_of([*texts, *texts, *prefixes], max_depth)) <= len(once) + sum(map(len, texts))
    assert len(automaton_of([*texts, *texts], max_depth)) == len(automaton_of([*texts, *texts, *texts], max_depth))


def test_a_context_with_many_followers_costs_no_more_than_the_first_of_them() -> None:
    text = [token for follower in range(1, 1_000) for token in (0, follower)]
    automaton = automaton_of([text], 4)
    followers = automaton.followers(automaton.match([0]))
    assert [each.token for each in followers] == list(range(1, 1 + MAX_FOLLOWERS))
    assert followers[0].share == pytest.approx(1 / 998)  # of all followers, not of those looked at


@given(TEXTS, TOKENS, st.integers(0, 2), st.integers(0, 8), st.integers(0, 5), DEPTH)
@example([[0, 1, 2, 0, 1, 2]], [0, 1], 2, 8, 5, 6)
def test_proposal_is_the_best_tree_of_the_best_source(
    outputs: list[Tokens], text: Tokens, pending: int, budget: int, limit: int, max_tree_depth: int
) -> None:
    """The most probable paths of the own text or of the outputs of earlier rows, whichever promises more."""
    drafter = SuffixDrafter(budget=budget, max_tree_depth=max_tree_depth, max_spec_factor=2.0, min_token_prob=LEAST)
    for output in outputs:
        drafter.admit(0, [2, 2, 1])
        drafted(drafter, [0], [0], [1], None)
        drafter.observe([0], [output], None)
        drafter.release(0)
    drafter.admit(0, text)
    draft = drafted(drafter, [0], [pending], [limit], None)
    check_draft(draft, [pending], [limit], budget)

    context, longest = [*text, pending], max_tree_depth - 1
    proposed = tree_paths(draft, 0)
    best, reached = 0.0, 0.0
    for texts in ([text], outputs):
        paths = tree(texts, context, longest, limit)
        nodes = min(budget, 2 * len(longest_suffix(texts, context, longest)))
        best = max(best, sum(nlargest(nodes, paths.values())))
        if len(proposed) <= nodes and paths.keys() >= set(proposed):
            reached = max(reached, sum(paths[path] for path in proposed))
    assert reached == pytest.approx(best)


@given(st.lists(TOKENS, max_size=5), TOKENS, st.integers(0, 2))
def test_incremental_equals_rebuilt(chunks: list[Tokens], cached: Tokens, pending: int) -> None:
    """Chunks, proposals in between, a cached prefix and a row number used before leave no trace."""
    grown, rebuilt = (SuffixDrafter(budget=8, max_cached_requests=0) for _ in range(2))
    grown.admit(0, [1, 2, 0, 1, 2])
    grown.release(0)
    grown.admit(0, cached)
    for chunk in chunks:
        drafted(grown, [0], [pending], [8], None)
        grown.observe([0], [chunk], None)
    rebuilt.admit(0, [])
    rebuilt.observe([0], [cached + [token for chunk in chunks for token in chunk]], None)
    left, right = (drafted(drafter, [0], [pending], [8], None) for drafter in (grown, rebuilt))
    assert left.tokens.tolist() == right.tokens.tolist()
    assert left.parents.tolist() == right.parents.tolist()


def test_repeated_text_is_predicted_exactly() -> None:
    text = list(range(40))
    drafter = SuffixDrafter(budget=16)
    drafter.admit(0, [*text, *text[:20]])
    draft = drafted(drafter, [0], [20], [16], None)
    assert draft.tokens.tolist() == [list(range(20, 37))]
    assert draft.parents.tolist() == [list(range(-1, 16))]


def test_a_short_period_is_continued_past_the_end_of_the_text() -> None:
    drafter = SuffixDrafter(budget=12)
    drafter.admit(0, [5, 6] * 10)
    assert drafted(drafter, [0], [5], [12], None).tokens.tolist() == [[5, *[6, 5] * 6]]


def test_rivals_become_siblings_the_frequent_one_first() -> None:
    drafter = SuffixDrafter(budget=3, min_token_prob=0.3)
    drafter.admit(0, [8, 9, 1, 0, 8, 9, 2, 0, 8, 9, 2, 0, 3, 8])
    draft = drafted(drafter, [0], [9], [1], None)
    assert draft.tokens.tolist() == [[9, 2, 1]]
    assert draft.parents.tolist() == [[-1, 0, 0]]


def test_a_path_is_dropped_when_its_whole_probability_is_too_small() -> None:
    """1 and 2 follow equally often, and so do two tokens after each of them: a half, then a quarter."""
    text = [8, 9, 1, 3, 8, 9, 1, 4, 8, 9, 2, 5, 8, 9, 2, 6, 7, 8]
    for least, depth in ((0.6, 0), (0.3, 1), (0.2, 2)):
        drafter = SuffixDrafter(budget=6, max_spec_factor=3.0, min_token_prob=least)
        drafter.admit(0, text)
        paths = tree_paths(drafted(drafter, [0], [9], [2], None), 0)
        assert max(map(len, paths), default=0) == depth


def test_only_outputs_are_remembered_and_an_output_begins_with_the_first_proposal() -> None:
    drafter = SuffixDrafter(budget=4)
    drafter.admit(0, [1, 2, 3])
    drafter.observe([0], [[4, 5, 6]], None)
    drafted(drafter, [0], [11], [4], None)
    drafter.observe([0], [[11, 12, 13]], None)
    drafted(drafter, [0], [14], [4], None)
    drafter.observe([0], [[14, 15]], None)
    drafter.release(0)
    drafter.release(0)  # a row that is not there is none to release
    drafter.admit(0, [11, 12, 7, 2])
    assert drafted(drafter, [0], [3], [4], None).tokens.tolist() == [[3]]
    drafter.observe([0], [[11, 12]], None)
    assert drafted(drafter, [0], [13], [4], None).tokens.tolist() == [[13, 14, 15]]


def test_a_preempted_row_resumes_with_its_own_text_as_prompt() -> None:
    drafter = SuffixDrafter(budget=2)
    drafter.admit(4, [1, 2, 3])
    drafted(drafter, [4], [1], [2], None)
    drafter.observe([4], [[1, 2]], None)
    drafter.release(4)
    drafter.admit(4, [1, 2])
    drafter.observe([4], [[3, 1, 2]], None)
    assert drafted(drafter, [4], [3], [2], None).tokens.tolist() == [[3, 1, 2]]


def test_rows_of_a_batch_are_independent_and_padded() -> None:
    drafter = SuffixDrafter(budget=4, max_cached_requests=0)
    for row, text in ((3, [1, 2, 3, 4, 1]), (7, [9, 8]), (1, [1, 2, 3, 4, 1])):
        drafter.admit(row, text)
    draft = drafted(drafter, [7, 3, 1], [2, 2, 2], [4, 4, 0], None)
    check_draft(draft, [2, 2, 2], [4, 4, 0], drafter.nodes)
    assert draft.tokens.tolist() == [[2, -1, -1], [2, 3, 4], [2, -1, -1]]


def test_empty_batch_and_empty_rows() -> None:
    drafter = SuffixDrafter(budget=4)
    check_draft(drafted(drafter, [], [], [], None), [], [], 4)
    drafter.admit(0, [])
    drafter.observe([0], [[]], None)
    drafter.observe([], [], None)
    check_draft(drafted(drafter, [0], [1], [4], None), [1], [4], 4)


def known(store: OutputStore, owner: str = "") -> set[int]:
    """Which of the one-token texts 0 .. 99 the store remembers of an owner."""
    return {token for token in range(100) for past in store.of(owner) if past.match([token]).length}


def test_the_cache_forgets_the_older_half() -> None:
    cache = OutputStore(4, max_requests=6, max_tokens=1_000)
    for token in range(20):
        cache.add("", [token])
        newest = set(range(max(0, token - 2), token + 1))
        assert newest <= known(cache)
        assert len(known(cache)) <= 6
    by_tokens = OutputStore(4, max_requests=1_000, max_tokens=20)
    for first in range(0, 90, 3):
        by_tokens.add("", [first, first + 1, first + 2])
        assert len(known(by_tokens)) <= 20
    by_tokens.add("", list(range(50)))
    assert set(range(40, 50)) <= known(by_tokens)
    assert len(known(by_tokens)) <= 20


def test_a_cache_of_zero_requests_remembers_none() -> None:
    cache = OutputStore(4, max_requests=0, max_tokens=1_000)
    cache.add("", [1, 2, 3])
    assert not cache.of("")
    assert cache.tokens == 0


def test_owners_learn_nothing_of_each_other() -> None:
    store = OutputStore(4, max_requests=100, max_tokens=1_000)
    store.add("a", [1, 2, 3])
    store.add("b", [4, 5])
    assert known(store, "a") == {1, 2, 3}
    assert known(store, "b") == {4, 5}
    assert known(store) == known(store, "c") == set()
    drafter = SuffixDrafter(budget=4)
    for owner, first in (("a", 10), ("b", 20), ("", 30)):
        drafter.admit(0, [], origin=RowOrigin(owner))
        drafted(drafter, [0], [first], [4], None)
        drafter.observe([0], [range(first, first + 8)], None)
        drafter.release(0)
    for owner, first in (("a", 10), ("b", 20), ("", 30)):
        drafter.admit(0, [], origin=RowOrigin(owner))
        for other in (10, 20, 30):
            guesses = [[other, other + 1]] if other == first else [[other]]
            assert drafted(drafter, [0], [other], [4], None).tokens.tolist() == guesses
        drafter.release(0)


def test_all_owners_together_are_bounded() -> None:
    store = OutputStore(4, max_requests=1_000, max_tokens=20)
    for number in range(30):
        store.add(f"owner {number}", [number, number + 1, number + 2])
        assert store.tokens <= 20
        assert known(store, f"owner {number}") == {number, number + 1, number + 2}
    assert not known(store, "owner 0")


def test_the_drafter_bounds_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_CACHED_TOKENS", 20)
    drafter = SuffixDrafter(budget=4)
    for first in (0, 100, 200, 300):
        drafter.admit(0, [])
        drafted(drafter, [0], [first], [4], None)
        drafter.observe([0], [range(first, first + 8)], None)
        drafter.release(0)
    drafter.admit(0, [])
    assert drafted(drafter, [0], [300], [4], None).tokens.tolist() == [[300, 301]]
    assert drafted(drafter, [0], [0], [4], None).tokens.tolist() == [[0]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", -1),
        ("max_tree_depth", 1),
        ("max_cached_requests", 1),
        ("max_cached_requests", -1),
        ("max_spec_factor", 0.0),
        ("min_token_prob", 1.5),
    ],
)
def test_bad_options_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value}: expected"):
        SuffixDrafter(**{"budget": 4, name: value})


def test_a_step_costs_the_same_at_any_context_length() -> None:
    text = mixed_text(32_200)
    lines, memory = zip(
        *(work_of_steps(SuffixDrafter(budget=8), text, context, 100) for context in (1_000, 32_000)), strict=True
    )
    assert 1_000 < lines[1] < 1.3 * lines[0]  # longer matches are found in more text; a rescan would be 32 times
    assert memory[1] < memory[0] + 2_000
