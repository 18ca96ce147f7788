"""Logits processors that read a row's newest tokens on the host: penalties over a window, and DRY.

The logits of a node depend on the tokens of its own path: the row's history and the draft tokens above the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sametoken.options.shaping import WHOLE, Shaping
from sametoken.speculation.draft import Draft

MOST_LOG = 88.7228391  # logarithm of the greatest float32, at which llama.cpp caps the exponent


class PathHistory:
    """Tokens of a row, with the length of the repetition that ends at each of them (for DRY).

    Args:
        shaping: llama.cpp samplers of the request.
        penalties: repetition, presence and frequency penalty.
        breakers: ids of tokens at which a repetition ends.
        tokens: prompt.
    """

    def __init__(
        self, shaping: Shaping, penalties: tuple[float, float, float], breakers: frozenset[int], tokens: Sequence[int]
    ) -> None:
        self._shaping, self._penalties, self._breakers = shaping, penalties, breakers
        self._tokens = torch.tensor(tokens, dtype=torch.int64)
        self._runs = _repeats(tokens) if shaping.dry else torch.zeros(len(tokens), dtype=torch.int64)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens, in order."""
        for token in tokens:
            self._tokens, self._runs = self._after(self._tokens, self._runs, token)

    def edit(self, scores: Tensor, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Change the logits `scores` [N, V] of the row's nodes in place.

        Args:
            tokens, parents: [N], or [1] to edit all N rows alike; node 0 is in the history already.
        """
        known = {0: (self._tokens, self._runs)}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node:
                known[node] = self._after(*known[max(0, parent)], token)
            own = scores if len(tokens) == 1 else scores[node : node + 1]
            self._penalise(own, known[node][0])
            for named, penalty in self._repeated(*known[node]):
                if named < own.shape[1]:
                    own[:, named] -= penalty

    def _after(self, text: Tensor, runs: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Tokens and repetition lengths after appending `token`."""
        if self._shaping.dry:
            before = torch.nn.functional.pad(runs[:-1], (1, 0))[: len(runs)]
            runs = torch.where(text == token, before + 1, 0)
        longer = torch.cat((text, text.new_tensor([token])))
        return longer, torch.cat((runs, runs.new_tensor([len(longer)])))

    def _penalise(self, scores: Tensor, text: Tensor) -> None:
        size, (repetition, presence, frequency) = self._shaping.repeat_last_n, self._penalties
        if not size or (repetition, presence, frequency) == (1.0, 0.0, 0.0):
            return
        newest = text if size == WHOLE else text[-size:]
        counts = torch.bincount(newest[(newest >= 0) & (newest < scores.shape[1])])
        ids = counts.nonzero().flatten()
        where, times = ids.to(scores.device), counts[ids].to(scores.device, torch.float32)
        own = scores[:, where]
        own = torch.where(own > 0, own / repetition, own * repetition) - times * frequency - presence
        scores[:, where] = own

    def _repeated(self, text: Tensor, runs: Tensor) -> Iterator[tuple[int, float]]:
        """Yield each token that would extend a repetition, with its DRY penalty."""
        asked = self._shaping
        if not asked.dry:
            return
        size = len(text) if asked.dry_penalty_last_n == WHOLE else min(len(text), asked.dry_penalty_last_n)
        begin, longest = len(text) - size, size
        for back, token in enumerate(text[begin:].flip(0).tolist()):
            if token in self._breakers:
                longest = back
                break
        if size <= asked.dry_allowed_length or longest < asked.dry_allowed_length:
            return
        at = torch.arange(begin, len(text) - 1)
        length = runs[begin:-1].minimum(at - begin + 1).clamp(max=longest)
        enough = length >= asked.dry_allowed_length
        most: dict[int, int] = {}
        for token, repeat in zip(text[at[enough] + 1].tolist(), length[enough].tolist(), strict=True):
            most[token] = max(repeat, most.get(token, 0))
        limit = int(MOST_LOG / math.log(asked.dry_base)) if asked.dry_base > 1.000001 else 0
        for token, repeat in most.items():
            if token not in self._breakers and token >= 0:
                exponent = repeat - asked.dry_allowed_length
                yield token, asked.dry_multiplier * asked.dry_base ** (min(exponent, limit) if limit else exponent)


def edit(scores: Tensor, draft: Draft, histories: Sequence[PathHistory | None]) -> None:
    """Edit in place the logits `scores` [B, N, V] of the rows that have a history."""
    for row, history in enumerate(histories):
        if history is not None:
            history.edit(scores[row], draft.tokens[row].tolist(), draft.parents[row].tolist())


def _repeats(tokens: Sequence[int]) -> Tensor:
    """Length, for each token, of the longest end of the text that also ends at that token; Z-algorithm from the end."""
    text, size = list(reversed(tokens)), len(tokens)
    found, left, right = [0] * size, 0, 0
    for place in range(1, size):
        length = min(right - place, found[place - left]) if place < right else 0
        while place + length < size and text[length] == text[place + length]:
            length += 1
        if place + length > right:
            left, right = place, place + length
        found[place] = length
    if size:
        found[0] = size
    return torch.tensor(found[::-1], dtype=torch.int64)
