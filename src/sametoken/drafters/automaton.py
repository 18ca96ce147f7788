"""A suffix automaton with counts: the longest suffix of a text that occurred before, and the tokens that followed it.

Works on token ids only, not on rows or drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

# Only the first 32 distinct followers of a context are counted, to bound the work of a step. A follower with a
# probability of 10 % is missing from them with a probability of 3 %.
MAX_FOLLOWERS = 32


class Match(NamedTuple):
    """A string in an automaton: its last `length` tokens lead from the start to `state`."""

    state: int
    length: int


NO_MATCH = Match(0, 0)


class Follower(NamedTuple):
    """A token that may follow a match: its share of all continuations, and the match after it."""

    share: float
    token: int
    match: Match


class SuffixAutomaton:
    """Index of all substrings of the texts fed so far, with exact counts for strings of at most `max_depth` tokens.

    The automaton of Blumer et al. (1985), several texts in one: at most two states per token, O(1) amortised time per
    token; a text that was fed before adds no state. States are numbers; state 0 is the empty string. Strings of one
    state have the same occurrences; its longest has `length` tokens, and `link` is the state of the longest shorter
    suffix that has more occurrences.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_context = max_depth - 1
        self._next: list[dict[int, int]] = [{}]
        self._link = array("i", [-1])
        self._length = array("i", [0])
        self._count = array("i", [0])
        self.begin()

    def __len__(self) -> int:
        return len(self._next)

    def begin(self) -> None:
        """Start a new text."""
        self._last = 0
        self.cursor = NO_MATCH  # the last `max_context` tokens of the text

    def extend(self, token: int) -> None:
        """Append one token to the current text."""
        self._last = self._append(token)
        state, length = self.cursor  # if this state has just been split, both parts still lead to the same child
        child = self._next[state][token]
        self.cursor = self._clip(Match(child, min(length + 1, self.max_context)))
        # The strings that have just occurred are the suffixes of at most max_depth tokens; a link shortens, so the
        # walk has at most max_depth steps. Longer strings of the same text are neither counted nor looked up.
        link, count = self._link, self._count
        while child > 0:
            count[child] += 1
            child = link[child]

    def advance(self, match: Match, token: int) -> Match:
        """Longest suffix of `match` + `token` that has occurred, at most `max_context` tokens."""
        state, length = match
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        child = self._next[state].get(token)
        if child is None:
            return NO_MATCH
        return self._clip(Match(child, min(length + 1, self.max_context)))

    def match(self, tokens: Iterable[int]) -> Match:
        """The longest suffix of `tokens` that has occurred, at most `max_context` tokens."""
        found = NO_MATCH
        for token in tokens:
            found = self.advance(found, token)
        return found

    def followers(self, match: Match, least_share: float = 0.0) -> list[Follower]:
        """Tokens that followed the match with at least this share, in the order of first occurrence.

        If no token followed the match: those that followed its longest suffix with a continuation.
        """
        state, length = match
        while state and not self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if state == 0:
            return []
        counts = self._count
        following = [(token, child, counts[child]) for token, child in islice(self._next[state].items(), MAX_FOLLOWERS)]
        # The end of a text counts as a continuation by nothing, except for the text that is still being written.
        total = max(sum(count for _, _, count in following), counts[state] - 1)
        longer = min(length + 1, self.max_context)
        return [
            Follower(count / total, token, self._clip(Match(child, longer)))
            for token, child, count in following
            if count / total >= least_share
        ]

    def _clip(self, match: Match) -> Match:
        """Match of the string in its current state; after a split or a cut, possibly of a shorter string."""
        state, length = match
        while 0 < length <= self._length[self._link[state]]:
            state = self._link[state]
        return Match(state, length)

    def _append(self, token: int) -> int:
        here = self._last
        if token in self._next[here]:
            return self._exact(here, token)
        new = self._add(self._length[here] + 1, {}, 0, 0)
        following, link = self._next, self._link
        while here >= 0 and token not in following[here]:
            following[here][token] = new
            here = link[here]
        if here >= 0:
            self._link[new] = self._exact(here, token)
        return new

    def _exact(self, here: int, token: int) -> int:
        """State whose longest string is the longest of `here` + `token`, split off from longer ones if needed."""
        child = self._next[here][token]
        length = self._length[here] + 1
        if self._length[child] == length:
            return child
        clone = self._add(length, self._next[child].copy(), self._link[child], self._count[child])
        self._link[child] = clone
        while here >= 0 and self._next[here].get(token) == child:
            self._next[here][token] = clone
            here = self._link[here]
        return clone

    def _add(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        return len(self._next) - 1
