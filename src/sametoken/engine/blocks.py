"""Ownership of the cache's pages by rows: allocation, sharing of equal prefixes, eviction. No tensors, no models.

Only full pages of committed tokens are shared. A page is identified by the digest of all tokens up to its end. Apart
from the target's keys and values, a page may hold those of drafters, recorded by drafter name.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

GAP = 256  # most pages that a running row keeps free behind it when another row begins there
ROOM = 128  # pages that a new row can grow by, if any run of free pages has them


class PageListener(Protocol):
    """Callbacks for pages that are offered to other rows, on the thread that steps the engine."""

    def stored(self, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """Handle the offer of a page of `tokens`; `parent` is the digest of the page before it, b"" for none."""
        ...

    def removed(self, digest: bytes) -> None:
        """Handle the end of the offer of a page."""
        ...


class PrefixMatch(NamedTuple):
    """Shared pages that hold a prefix.

    Attributes:
        pages: numbers of the pages.
        draft_cached: number of leading pages that also hold the drafter's keys and values.
    """

    pages: list[int]
    draft_cached: int


class FreePages:
    """Numbers of free pages as ascending runs of neighbours; even a large pool has few runs."""

    def __init__(self, begin: int, end: int) -> None:
        self._begins, self._stops = ([begin], [end]) if begin < end else ([], [])
        self.count = end - begin

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(range, self._begins, self._stops))

    def add(self, page: int) -> None:
        at = bisect_right(self._begins, page)
        self._begins.insert(at, page)
        self._stops.insert(at, page + 1)
        self.count += 1
        for left in (at, at - 1):  # join the neighbouring runs
            if 0 <= left < len(self._stops) - 1 and self._stops[left] == self._begins[left + 1]:
                del self._stops[left], self._begins[left + 1]

    def take(self, count: int, after: int | None, running: Container[int]) -> list[int]:
        """Take `count` free pages after page `after` if possible, else where a new row may begin.

        Args:
            count: number of pages.
            after: last page of the row so far.
            running: pages of all rows.
        """
        at = -1 if after is None else bisect_right(self._begins, after + 1) - 1
        begin = 0 if after is None else after + 1
        if at < 0 or begin >= self._stops[at]:
            at, begin = self._beginning(count, running)
        taken: list[int] = []
        while len(taken) < count:
            at %= len(self._begins)
            first, end = self._begins[at], self._stops[at]
            begin = max(begin, first) if not taken else first
            stop = min(end, begin + count - len(taken))
            taken += range(begin, stop)
            kept = [(a, b) for a, b in ((first, begin), (stop, end)) if a < b]
            self._begins[at : at + 1], self._stops[at : at + 1] = [a for a, _ in kept], [b for _, b in kept]
            at += len(kept)
        self.count -= count
        return taken

    def _beginning(self, count: int, running: Container[int]) -> tuple[int, int]:
        """Run and first page of a new row: in the first run in which it can grow by `ROOM` pages, else in the longest.

        Low pages come first, since pages that were never used take new memory: a huge page for the keys of each layer.
        The row before the run may be running; then it is left half of the run to grow, `GAP` pages at most.
        """
        longest, found = -1, (0, 0)
        for at, (begin, end) in enumerate(zip(self._begins, self._stops, strict=True)):
            gap = max(0, min((end - begin - count) // 2, GAP)) if begin - 1 in running else 0
            if end - begin > longest:
                longest, found = end - begin, (at, begin + gap)
            if end - begin - gap - count >= ROOM:
                return at, begin + gap
        return found


class BlockManager:
    """Owners of pages 1 .. pages - 1 of one pool; page 0 is the sink of `runtime.cache`.

    A page is free, owned by one or more rows, or idle: without an owner, but kept for its prefix until space is needed.

    Args:
        pages: number of pages, the sink included.
        page_size: tokens of a page.
        reuse: true to share pages of equal prefixes.

    Attributes:
        listener: callbacks for offered pages; None for none.
    """

    def __init__(self, pages: int, page_size: int, *, reuse: bool = True) -> None:
        self.pages, self.page_size, self.reuse = pages, page_size, reuse
        self._free = FreePages(1, pages)
        self._count: dict[int, int] = {}
        self._digest: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # For shared pages: drafters with keys and values in the page, and the next token when these were computed.
        self._draft_kv: dict[int, dict[str, int | None]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.listener: PageListener | None = None

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can take now."""
        return self._free.count + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Take `count` pages, adjacent to page `after` if possible; take none and return None if there are too few.

        Args:
            count: number of pages.
            after: last page of the row so far.
        """
        if count > self.available:
            return None
        while self._free.count < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._free.add(page)
        taken = self._free.take(count, after, self._count) if count else []
        self._count.update(dict.fromkeys(taken, 1))
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Release one ownership of each page; shared prefixes stay idle until their space is needed."""
        for page in reversed(pages):  # a prefix is more useful than its continuation, so it becomes the most recent
            self._count[page] -= 1
            if self._count[page]:
                continue
            del self._count[page]
            if page in self._digest:
                self._idle[page] = None
            else:
                self._free.add(page)

    def forget(self) -> None:
        """Drop every prefix that no row owns; its pages become free."""
        for page in list(self._idle):
            self._drop(page)

    def match(
        self, tokens: Sequence[int], draft_kv: str = "", *, complete: bool = False, salt: bytes = b""
    ) -> PrefixMatch:
        """Take ownership of the longest run of shared pages that hold a proper prefix of `tokens`.

        Args:
            tokens: tokens of the sequence.
            draft_kv: drafter whose keys and values are needed; "" for those of the target, which every page holds.
            complete: true to take only pages with the drafter's keys and values, computed with an equal next token.
            salt: only pages that were offered with an equal salt match.
        """
        found: list[int] = []
        draft_cached = 0
        if not self.reuse:
            return PrefixMatch(found, draft_cached)
        # At least one token is left to compute: the first draw needs its logits.
        for i, digest in enumerate(self._digests(tokens[: len(tokens) - 1], salt), start=1):
            page = self._page_of.get(digest)
            if page is None:
                break
            holds = not draft_kv or draft_kv in self._draft_kv[page]
            if complete and draft_kv and self._draft_kv[page].get(draft_kv) != tokens[i * self.page_size]:
                break
            draft_cached += holds and draft_cached == len(found)
            self._idle.pop(page, None)
            self._count[page] = self._count.get(page, 0) + 1
            found.append(page)
        return PrefixMatch(found, draft_cached)

    def offered(self, tokens: Sequence[int], salt: bytes = b"") -> tuple[list[int], dict[str, int]]:
        """Find the longest run of shared pages that hold the beginning of a sequence, without ownership.

        Args:
            tokens: tokens of the sequence.
            salt: see `match`.

        Returns:
            the pages, and by drafter the number of leading tokens with its keys and values for this sequence.
        """
        found: list[int] = []
        drafts: dict[str, int] = {}
        for i, digest in enumerate(self._digests(tokens, salt), start=1):
            page = self._page_of.get(digest)
            if page is None:
                break
            after = next(iter(tokens[i * self.page_size :][:1]), None)
            for name, followed in self._draft_kv[page].items():
                if followed == after and drafts.get(name, 0) == (i - 1) * self.page_size:
                    drafts[name] = i * self.page_size
            found.append(page)
        return found, drafts

    def erase(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Stop offering the pages of a sequence; return the number of their tokens. For `salt` see `match`."""
        pages, _ = self.offered(tokens, salt)
        for page in reversed(pages):
            self._drop(page)
        return len(pages) * self.page_size

    def publish(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        draft_kv: str = "",
        draft_cached: int = 0,
        *,
        salt: bytes = b"",
    ) -> None:
        """Offer the full pages among `pages`, which hold the committed `tokens`, to other rows.

        Args:
            tokens: committed tokens.
            pages: pages of the row.
            draft_kv: drafter whose keys and values the pages also hold; "" for none.
            draft_cached: number of leading tokens with these keys and values.
            salt: see `match`.
        """
        if not self.reuse:
            return
        parent = b""
        for i, (page, digest) in enumerate(zip(pages, self._digests(tokens, salt), strict=False), start=1):
            holds = bool(draft_kv) and i * self.page_size <= draft_cached
            if page not in self._digest:
                known = self._page_of.get(digest)
                if known is not None and holds and draft_kv not in self._draft_kv[known]:
                    self._drop(known)  # the new page is of more use
                if digest not in self._page_of:
                    self._page_of[digest] = page
                    self._digest[page] = digest
                    self._draft_kv[page] = {}
                    if self.listener is not None:
                        self.listener.stored(digest, parent, tokens[(i - 1) * self.page_size : i * self.page_size])
            if holds and self._page_of[digest] == page:
                self._draft_kv[page][draft_kv] = next(iter(tokens[i * self.page_size :][:1]), None)
            parent = digest

    def _digests(self, tokens: Sequence[int], salt: bytes) -> Iterator[bytes]:
        digest = salt
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            block = array("q", tokens[end - self.page_size : end]).tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            yield digest

    def _drop(self, page: int) -> None:
        """Stop offering a page; the page becomes free as soon as it has no owner."""
        self._forget(page)
        if page in self._idle:
            del self._idle[page]
            self._free.add(page)

    def _forget(self, page: int) -> None:
        digest = self._digest.pop(page)
        del self._page_of[digest], self._draft_kv[page]
        if self.listener is not None:
            self.listener.removed(digest)

    def check(self) -> None:
        """Raise AssertionError unless every page is free, owned or idle, exactly once (for tests)."""
        states = [set(self._free), set(self._count), set(self._idle)]
        assert sum(map(len, states)) == self.pages - 1
        assert set.union(*states) == set(range(1, self.pages))
        assert all(self._page_of[d] == p for p, d in self._digest.items())
        assert set(self._idle) <= set(self._digest) == set(self._draft_kv)
