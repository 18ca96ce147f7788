"""BlockManager against a model that remembers what every page holds: nothing leaks, and what is shared is true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from sametoken.engine.blocks import BlockManager

PAGES, SIZE = 10, 2
Name = tuple[int, ...]  # all tokens up to the end of a page
# Two token ids and two drafters: prefixes meet often.
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
DRAFTERS = st.sampled_from(["", "draft_target"])


def names(tokens: list[int]) -> list[Name]:
    """The names of the full pages of a text."""
    return [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]


class Heard:
    """A listener that knows pages by their events alone."""

    def __init__(self) -> None:
        self.names: dict[bytes, Name] = {b"": ()}

    def stored(self, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        assert digest not in self.names
        self.names[digest] = (*self.names[parent], *tokens)  # whoever continues a page has heard of it

    def removed(self, digest: bytes) -> None:
        del self.names[digest]


class Blocks(RuleBasedStateMachine):
    """Sequences come, grow and go as in an engine."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(PAGES, SIZE)
        self.blocks.listener = self.heard = Heard()
        self.owners: dict[int, int] = {}
        self.found: dict[Name, int] = {}  # what may be found, and where
        self.with_draft: dict[
            int, int | None
        ] = {}  # of those that hold the drafter's keys and values, the token after them then

    def take(self, count: int, after: int | None) -> list[int] | None:
        """Allocates and holds the answer to the rules."""
        idle = set(self.found.values()) - self.owners.keys()
        free = set(range(1, PAGES)) - self.owners.keys() - idle
        pages = self.blocks.allocate(count, after)
        if count > len(free) + len(idle):
            assert pages is None
            return None
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        assert free | idle >= set(pages)
        if count <= len(free):
            assert not idle & set(pages), "a prefix was forgotten although there was room"
            if after is not None and after + 1 in free and count:
                assert pages[0] == after + 1, "the row's next page was free and not taken"
        # More may be forgotten than is handed out only if the pool takes pages it does not need.
        assert self.blocks.idle == len(idle) - max(0, count - len(free))
        self.owners.update(dict.fromkeys(pages, 1))
        self.forget()
        return pages

    def forget(self) -> None:
        """Drops the names of pages that the pool says it evicted."""
        known = set(self.blocks._digest)
        assert known <= set(self.found.values())
        self.found = {name: page for name, page in self.found.items() if page in known}
        self.with_draft = {page: after for page, after in self.with_draft.items() if page in known}

    @rule(target=sequences, tokens=TEXTS, draft_kv=DRAFTERS, complete=st.booleans())
    def begin(self, tokens: list[int], draft_kv: str, complete: bool) -> Any:
        pages, draft_cached = self.blocks.match(tokens, draft_kv, complete=complete)
        expected: list[int] = []
        for name in names(tokens[:-1]):
            if name not in self.found:
                break
            page = self.found[name]
            if complete and draft_kv and (page not in self.with_draft or self.with_draft[page] != tokens[len(name)]):
                break
            expected.append(self.found[name])
        assert pages == expected
        assert draft_cached == next(
            (i for i, page in enumerate(pages) if draft_kv and page not in self.with_draft), len(pages)
        )
        for page in pages:
            self.owners[page] = self.owners.get(page, 0) + 1
        new = self.take(self.blocks.pages_for(len(tokens)) - len(pages), pages[-1] if pages else None)
        if new is None:
            self.give(pages)
            return multiple()
        return tokens, draft_kv, [*pages, *new]

    @rule(target=sequences, sequence=consumes(sequences), more=TEXTS)
    def grow(self, sequence: tuple[list[int], str, list[int]], more: list[int]) -> Any:
        tokens, draft_kv, pages = sequence
        longer = tokens + more
        new = self.take(self.blocks.pages_for(len(longer)) - len(pages), pages[-1])
        return sequence if new is None else (longer, draft_kv, [*pages, *new])

    @rule(sequence=consumes(sequences), lag=st.integers(0, 3))
    def end(self, sequence: tuple[list[int], str, list[int]], lag: int) -> None:
        tokens, draft_kv, pages = sequence
        self.blocks.publish(tokens, pages, draft_kv, len(tokens) - lag)
        for name, page in zip(names(tokens), pages, strict=False):
            holds = bool(draft_kv) and len(name) <= len(tokens) - lag
            lacks = name not in self.found or (holds and self.found[name] not in self.with_draft)
            if lacks and page not in self.found.values():  # whose drafter's keys and values are missing is replaced
                self.found[name] = page
            if holds and self.found[name] == page:
                self.with_draft[page] = tokens[len(name)] if len(name) < len(tokens) else None
        self.give(pages)

    @rule(sequence=consumes(sequences))
    def vanish(self, sequence: tuple[list[int], str, list[int]]) -> None:
        self.give(sequence[2])

    def give(self, pages: list[int]) -> None:
        self.blocks.free(pages)
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                del self.owners[page]

    @invariant()
    def every_page_is_somewhere(self) -> None:
        self.blocks.check()
        assert self.blocks.available == PAGES - 1 - len(self.owners)
        assert self.blocks.idle == len(set(self.found.values()) - self.owners.keys())

    @invariant()
    def events_tell_what_may_be_found(self) -> None:
        assert set(self.heard.names.values()) - {()} == set(self.found)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlocks = Blocks.TestCase


def published(blocks: BlockManager, tokens: list[int], draft_kv: str = "", draft_cached: int = 0) -> list[int]:
    """Pages of a sequence that came and went."""
    pages = blocks.allocate(blocks.pages_for(len(tokens)))
    assert pages is not None
    blocks.publish(tokens, pages, draft_kv, draft_cached)
    blocks.free(pages)
    return pages


def test_the_last_token_is_always_computed() -> None:
    blocks = BlockManager(8, 2)
    pages = published(blocks, [1, 2, 3, 4])
    assert blocks.match([1, 2, 3, 4]).pages == pages[:1]
    assert blocks.match([1, 2, 3, 4, 5]).pages == pages


def test_a_page_is_named_by_everything_before_it() -> None:
    blocks = BlockManager(8, 2)
    published(blocks, [1, 2, 3, 4])
    assert blocks.match([9, 9, 3, 4, 5]).pages == []
    assert blocks.match([3, 4, 5]).pages == []


def test_a_page_names_the_drafters_whose_kv_it_holds() -> None:
    blocks = BlockManager(12, 2)
    pages = published(blocks, [1, 2, 3, 4, 5, 6], "draft", 5)  # the third page lacks its last token
    text = [1, 2, 3, 4, 5, 6, 7]
    assert blocks.match(text) == (pages, 3)
    assert blocks.match(text, "draft") == (pages, 2)
    assert blocks.match(text, "other") == (pages, 0)
    assert blocks.match(text, "draft", complete=True) == (pages[:2], 2)
    assert blocks.match(text, "other", complete=True) == ([], 0)
    blocks.publish([1, 2, 3, 4, 5, 6], pages, "draft", 6)  # whoever shared them read the rest
    assert blocks.match(text, "draft") == (pages, 3)


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    blocks = BlockManager(7, 2)
    old = published(blocks, [1, 1, 1, 1, 1, 1])
    published(blocks, [2, 2, 2, 2, 2, 2])
    kept = blocks.match([1, 1, 1, 1, 1, 1, 1]).pages
    assert kept == old
    blocks.free(kept)  # used last, though it came first
    assert blocks.allocate(2) is not None
    assert len(blocks.match([2, 2, 2, 2, 2, 2, 2]).pages) == 1
    assert blocks.match([1, 1, 1, 1, 1, 1, 1]).pages == old


def test_nothing_is_kept_without_reuse() -> None:
    blocks = BlockManager(8, 2, reuse=False)
    published(blocks, [1, 2, 3, 4])
    assert blocks.idle == 0
    assert blocks.match([1, 2, 3, 4, 5]).pages == []


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_grow_in_turn_stay_in_one_piece(rows: int) -> None:
    """Side by side pages are read as a view, without a copy."""
    blocks = BlockManager(1 + 8 * rows, 2)
    owned: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(3):
        for pages in owned:
            new = blocks.allocate(1, pages[-1] if pages else None)
            assert new is not None
            pages += new
    assert all(pages == list(range(pages[0], pages[0] + 3)) for pages in owned)


def test_rows_one_after_the_other_take_few_pages_and_rows_together_have_room() -> None:
    """Each page far from others takes memory of its own: two megabytes for the keys of every layer."""
    blocks = BlockManager(100_000, 2)
    taken = [published(blocks, [row] * 5) for row in range(50)]
    assert max(map(max, taken)) == 2 * 50 + 1  # two full pages of each row are kept
    for wave in range(10):
        running: list[list[int]] = []
        for _ in range(8):
            running.append(blocks.allocate(3) or [])
        for number, pages in enumerate(running):
            for _ in range(100):
                pages += blocks.allocate(1, pages[-1]) or []
            assert pages == list(range(pages[0], pages[0] + 103))
            blocks.publish([wave, number, 1], pages)
            blocks.free(pages)
        assert max(map(max, running)) < 3000
