"""Vocabulary of a narrowed draft model: fixed tokens, and those of recent texts in the second half of its places.

A learned token shows by the time of a guess that it occurred. So texts are learned while all have one owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.model.decoder import Decoder


class RecentTokens:
    """Tokens that a narrowed draft model guesses.

    Args:
        decoder: the narrowed model.
        tokens: [N] tokens by place, the least likely last.

    Attributes:
        tokens: the current ones, by place.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self._decoder, self.tokens = decoder, tokens.tolist()
        self._first = self.tokens[:]
        self._begin, self._next = len(self.tokens) // 2, 0
        self._kept = bytearray(decoder.config.vocab_size)
        for token in self.tokens:
            self._kept[token] = 1
        self._owner: str | None = None
        self._learns = True

    def admit(self, owner: str) -> None:
        """Record that a text of `owner` begins; with a second owner, the first tokens return and stay."""
        if self._learns and self._owner not in (None, owner):
            self._learns = False
            places = [place for place, token in enumerate(self._first) if self.tokens[place] != token]
            self._replace(places, [self._first[place] for place in places])
        self._owner = owner

    def learn(self, text: Sequence[int]) -> None:
        """Replace the tokens that were learned first by those of a text that are missing."""
        missing = [token for token in dict.fromkeys(text) if not self._kept[token]]
        size = len(self.tokens) - self._begin
        if not missing or not self._learns:
            return
        missing = missing[-size:]
        places = [self._begin + (self._next + i) % size for i in range(len(missing))]
        self._next = (self._next + len(missing)) % size
        self._replace(places, missing)

    def _replace(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        if not places:
            return
        for place, token in zip(places, tokens, strict=True):
            self._kept[self.tokens[place]] = 0
            self.tokens[place] = token
        for token in tokens:
            self._kept[token] = 1
        device = self._decoder.embed.device
        self._decoder.exchange_outputs(torch.tensor(places, device=device), torch.tensor(tokens, device=device))
