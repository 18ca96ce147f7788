"""Tokens that a drafter with a model has read of each sequence, and the part of a long text that a draft model reads.

A shortened text has the first tokens and the last ones, as if nothing were between. It begins at position 0 of a second
row of the page table (`PageTable.short`), because pages of the row itself may be shared with other rows. It grows while
the row decodes, and is cut again when it is about twice as long. Legend: W width of the taps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

FIRST = 4  # tokens that most heads attend to when nothing else matters
SPARE = 4  # drafts past the longest text: steps of the device are under way when the host sees its length


class TextWindow(NamedTuple):
    """Part of a long text that a draft model reads.

    Attributes:
        last: number of last tokens.
        first: number of first tokens.
    """

    last: int
    first: int = FIRST

    @property
    def read(self) -> int:
        """Tokens of a text that was just cut."""
        return self.first + self.last

    @property
    def most(self) -> int:
        """Committed tokens of a shortened text at most."""
        return self.first + 2 * self.last

    def slots(self, context: int, nodes: int) -> int:
        """Cache slots of a shortened row, 0 if no text of up to `context` tokens is shortened.

        Args:
            nodes: most slots past the pending token that a draft takes.
        """
        return 0 if context <= self.read else self.most + SPARE * (1 + nodes)

    def fits(self, length: int, unread: int, *, short: bool) -> bool:
        """True if a row need not be cut: the model has read `length` of its tokens, `unread` are left.

        A complete row that was mostly read stays complete, since reading the rest is cheaper.
        """
        return unread <= self.read and not (short and length + unread > self.most)

    def cut(self, text: Sequence[int]) -> tuple[list[int], int]:
        """Shortened text, and the number of tokens that it lacks."""
        return [*text[: self.first], *text[-self.last :]], len(text) - self.read


@dataclass(slots=True)
class Row:
    """State of one sequence.

    Attributes:
        length: slots of the row in the cache.
        tokens: committed tokens from position `length` on.
        features: [count, W] features of `tokens`, if the guesser reads any.
        children: child nodes by token of every node of the last proposal.
        written: slot past `length` with the KV of each node of the last proposal.
        text: all committed tokens.
        skipped: number of these that are not read, after the first ones.
    """

    length: int = 0
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    children: dict[int, dict[int, int]] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    text: list[int] = field(default_factory=list)
    skipped: int = 0

    def take(self, count: int, lag: int, pending: Sequence[int] = ()) -> tuple[list[int], Tensor | None]:
        """Remove and return the input of the next slots: tokens, and features [count, W]."""
        read = [*self.tokens[lag : count + lag], *pending]
        features = None
        if self.features:
            features = self.features[0] if len(self.features) == 1 else torch.cat(self.features)
            features, left = features[:count], features[count:]
            self.features = [left] if len(left) else []
        del self.tokens[:count]
        return read, features


Slots = Sequence[tuple[list[int], Tensor | None]]  # per row: tokens that the next slots read, and features


def joined(slots: Slots) -> Tensor | None:
    """Features [R, W] of all rows' slots, concatenated."""
    parts = [features for _, features in slots if features is not None]
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
