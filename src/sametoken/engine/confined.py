"""Grammars built on other grammars.

One begins after a mark in the output, one is limited to given tokens, and one ends a model's thinking after a number of
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from sametoken.errors import RequestError
from sametoken.options.sampling import ThoughtBound
from sametoken.speculation.draft import PADDING
from sametoken.speculation.structure import Grammar

MOST_BYTES = 256  # bytes at the end of the output that are searched for the mark
GOES_ON = re.compile(rb">.*\S", re.DOTALL)  # text after the end of a mark, which is ">"


class InitialGrammar(Grammar, Protocol):
    """Grammar in its initial state, from which sequences start."""

    def copy(self) -> Self:
        """Return a copy for another sequence in an equal state."""
        ...


class _PathState(NamedTuple):
    """State of a grammar after a path of tokens.

    Attributes:
        waits: true until the grammar begins.
        said: last bytes of the output until the grammar begins.
        path: tokens since the grammar's state; None if the path left the grammar.
    """

    waits: bool
    said: bytes
    path: tuple[int, ...] | None


class AfterMark:
    """Grammar that begins after a mark in the output, as after a model's thinking; any text is allowed before the mark.

    The output cannot end before the mark, and no token spans the end of the mark except with white space.

    Args:
        grammar: grammar of the text after the mark.
        after: regular expression of the mark.
        opens: text at the beginning of the output without which no mark is expected; "" if the mark always is.
        spelled: bytes of every token of the vocabulary.
        end_ids: tokens that end the output.
    """

    def __init__(
        self, grammar: InitialGrammar, after: str, opens: str, spelled: Sequence[bytes], end_ids: Sequence[int]
    ) -> None:
        self._grammar, self._after, self._opens = grammar, re.compile(after.encode()), opens.encode()
        self._spelled, self._end_ids = spelled, list(end_ids)
        self._place = _PathState(True, b"", ())
        self._beyond = [token for token, piece in enumerate(spelled) if GOES_ON.search(piece)]
        self._openers = cache(self._find_openers)

    def copy(self) -> AfterMark:
        other = object.__new__(AfterMark)
        other.__dict__ |= self.__dict__
        other._grammar = self._grammar.copy()
        return other

    @property
    def failure(self) -> RequestError | None:
        return self._grammar.failure

    def accept(self, token: int) -> bool:
        self._place = self._after_token(self._place, token)
        if self._place.waits:
            return False
        done = False
        for taken in self._place.path or ():
            done = self._grammar.accept(taken)
        self._place = self._place._replace(path=())
        return done

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        places = [self._place]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            places.append(self._after_token(places[parent], token))
        return torch.stack([self._mask(place) for place in places])

    def forced(self, limit: int) -> list[int]:
        return [] if self._place.waits else self._grammar.forced(limit)

    def _after_token(self, place: _PathState, token: int) -> _PathState:
        if not place.waits:
            return place._replace(path=None if place.path is None else (*place.path, token))
        piece = self._spelled[token] if 0 <= token < len(self._spelled) else b""
        if self._opens and len(place.said.lstrip()) < len(self._opens):
            said = (place.said + piece).lstrip()
            if not said.startswith(self._opens) and not self._opens.startswith(said):
                return _PathState(False, b"", (token,))
        said = place.said + piece
        found = self._after.search(said)
        if found is None:
            return _PathState(True, said[-MOST_BYTES:] if len(said) > MOST_BYTES + len(self._opens) else said, ())
        return _PathState(False, b"", None if said[found.end() :].strip() else ())

    def _mask(self, place: _PathState) -> Tensor:
        if not place.waits:
            path = place.path
            return self._inside(path) if path is not None else torch.ones(len(self._spelled), dtype=torch.bool)
        begun = place.said.lstrip()
        if self._opens and len(begun) < len(self._opens):
            openers = self._openers(begun)
            return openers if begun else openers | self._inside(())
        mask = torch.ones(len(self._spelled), dtype=torch.bool)
        begun_mark = b"<" in place.said[-64:]
        tokens = [token for token in self._beyond if begun_mark or b"<" in self._spelled[token]]
        mask[[*self._end_ids, *(each for each in tokens if self._after_token(place, each).path is None)]] = False
        return mask

    def _inside(self, path: Sequence[int]) -> Tensor:
        """Tokens that the grammar allows after a path."""
        nodes = [PADDING, *path]
        return self._grammar.allowed(nodes, list(range(-1, len(path))))[-1]

    def _find_openers(self, begun: bytes) -> Tensor:
        """Tokens that continue the opening text."""
        rest = self._opens[len(begun) :]
        found = [bool(piece) and (rest.startswith(piece) or piece.startswith(rest)) for piece in self._spelled]
        return torch.tensor(found)


class AllowedTokens:
    """Grammar that allows only given tokens, within another grammar if there is one.

    Args:
        mask: [V] bool, true for allowed tokens.
        grammar: other grammar; None for none.
    """

    def __init__(self, mask: Tensor, grammar: InitialGrammar | None) -> None:
        self._mask, self._grammar = mask, grammar

    def copy(self) -> AllowedTokens:
        return AllowedTokens(self._mask, None if self._grammar is None else self._grammar.copy())

    @property
    def failure(self) -> RequestError | None:
        return None if self._grammar is None else self._grammar.failure

    def accept(self, token: int) -> bool:
        return self._grammar is not None and self._grammar.accept(token)

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        if self._grammar is None:
            return self._mask.expand(len(tokens), -1)
        return self._grammar.allowed(tokens, parents) & self._mask

    def forced(self, limit: int) -> list[int]:
        return []


class _Thought(NamedTuple):
    """State of a model's thinking after a path of tokens.

    Attributes:
        phase: BEFORE, WITHIN, ENDING or BEYOND.
        left: number of tokens of thinking still allowed, or of the end mark still missing.
        said: last bytes of the text, which are searched for marks.
    """

    phase: int
    left: int = 0
    said: bytes = b""


BEFORE, WITHIN, ENDING, BEYOND = range(4)  # phases of a thought
AFTER_THOUGHT = _Thought(BEYOND)


class BoundedThought:
    """Grammar that ends a model's thinking after a number of tokens: then the end mark must follow, token by token.

    Args:
        grammar: grammar of the whole output; None if any text is allowed.
        bound: number of tokens, and the marks.
        spelled: bytes of every token of the vocabulary.
        mark: tokens of the end mark.
    """

    def __init__(
        self, grammar: InitialGrammar | None, bound: ThoughtBound, spelled: Sequence[bytes], mark: Sequence[int]
    ) -> None:
        self._grammar, self._bound, self._spelled, self._mark = grammar, bound, spelled, tuple(mark)
        self._opens, self._closes = bound.opens.encode(), bound.closes.encode()
        self._place = self._within(bound.tokens) if bound.begun else _Thought(BEFORE, bound.tokens)

    def copy(self) -> BoundedThought:
        other = object.__new__(BoundedThought)
        other.__dict__ |= self.__dict__
        other._grammar = None if self._grammar is None else self._grammar.copy()
        return other

    @property
    def failure(self) -> RequestError | None:
        return None if self._grammar is None else self._grammar.failure

    def accept(self, token: int) -> bool:
        self._place = self._after_token(self._place, token)
        return self._grammar is not None and self._grammar.accept(token)

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        if self._grammar is None:
            masks = torch.ones(len(tokens), len(self._spelled), dtype=torch.bool)
        else:
            masks = self._grammar.allowed(tokens, parents)
        places = [self._place]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            places.append(self._after_token(places[parent], token))
        for mask, place in zip(masks, places, strict=True):
            if place.phase == ENDING:
                due, allowed = self._mark[-place.left], bool(mask[self._mark[-place.left]])
                mask.fill_(False)
                mask[due] = allowed
        return masks

    def forced(self, limit: int) -> list[int]:
        if self._place.phase == ENDING:
            return list(self._mark[-self._place.left :][:limit])
        return [] if self._grammar is None or self._place.phase != BEYOND else self._grammar.forced(limit)

    def _within(self, left: int) -> _Thought:
        return _Thought(WITHIN, left) if left > 0 else _Thought(ENDING, len(self._mark))

    def _after_token(self, place: _Thought, token: int) -> _Thought:
        if place.phase == ENDING:
            return place._replace(left=place.left - 1) if place.left > 1 else AFTER_THOUGHT
        if place.phase == BEYOND:
            return place
        said = place.said + (self._spelled[token] if 0 <= token < len(self._spelled) else b"")
        if place.phase == BEFORE:
            begun = said.lstrip()
            if begun.startswith(self._opens):
                return self._within(self._bound.tokens)
            return _Thought(BEFORE, place.left, said) if self._opens.startswith(begun) else AFTER_THOUGHT
        if self._closes in said:
            return AFTER_THOUGHT
        return self._within(place.left - 1)._replace(said=said[-len(self._closes) :])
