"""Tensors of one step: layout of the plan, forward of the target, verification of drafts, commit of the paths.

Trees of equal size are one rectangle of the forward, so that a row with few guesses is not padded to the largest draft.
The module has rows, lengths and tokens, but no requests, drafters or text. Legend: B rows, N nodes of the largest tree,
T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.drafters.padded import NO_GUESS, Guess, padded
from sametoken.engine.plan import Decode, Plan, PromptPiece
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, Span
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import PADDING, Draft, ancestors, chain_mask
from sametoken.speculation.sampling import Sampling
from sametoken.speculation.verify import Verdict, verify

SamplingOf = Callable[[Sequence[int]], Sampling]  # sampling of the sampled rows at some places


class Trees(NamedTuple):
    """Trees of equal size.

    Attributes:
        places: indices of the rows of the trees among the sampled rows of the step.
        first: index of the first token of the trees among the tokens with logits.
        draft: [len(places), nodes].
        ancestor_mask: [len(places), nodes, nodes] of the draft.
    """

    places: Sequence[int]
    first: int
    draft: Draft
    ancestor_mask: Tensor

    @property
    def nodes(self) -> int:
        return self.draft.tokens.shape[1]

    @property
    def end(self) -> int:
        """Index past the last token of the trees."""
        return self.first + self.draft.tokens.numel()

    def of(self, values: Tensor) -> Tensor:
        """Part [len(places), nodes, ...] of values [tokens, ...] for these trees."""
        return values[self.first : self.end].view(len(self.places), self.nodes, *values.shape[1:])


def groups(pending: Sequence[int], guesses: Sequence[Guess], device: torch.device, ragged: bool) -> list[Trees]:
    """Group the trees of rows by size, smallest first; one group unless `ragged`.

    Args:
        pending: [B] root tokens.
        guesses: [B] guesses after each root.
        device: device of the drafts.
        ragged: true for groups of equal size; false to pad all trees to the largest.
    """
    counts = [len(guess.tokens) for guess in guesses]
    sizes = counts if ragged else [max(counts, default=0)] * len(counts)
    found: list[Trees] = []
    for size in sorted(set(sizes)):
        places = [place for place, each in enumerate(sizes) if each == size]
        draft = padded([pending[place] for place in places], [guesses[place] for place in places], device)
        found.append(Trees(places, found[-1].end if found else 0, draft, ancestors(draft.parents)))
    return found


class Verified(NamedTuple):
    """Results of the target for a step.

    Attributes:
        paths: accepted nodes of each sampled row, the root first; sampled rows are the decoding rows, then the `last`
            pieces of prompts.
        bonuses: the target's own draw after each path; `PADDING` if no token can be drawn.
        logits: [S, V] logits of the S nodes of all sampled rows; None without sampled rows.
        first: index of the root of each sampled row among the S nodes; the other nodes of the row follow.
        features: hidden states of the taps for each decoding row, [nodes of its path, taps * H], then for each piece of
            a prompt, [tokens, taps * H]; None without taps.
        prompt_hidden: [tokens, H] last hidden states of each piece of a prompt.
        tokens: number of tokens of the decoding rows in the forward.
    """

    paths: list[list[int]]
    bonuses: list[int]
    logits: Tensor | None
    first: list[int]
    features: Sequence[Tensor] | None
    prompt_hidden: Sequence[Tensor]
    tokens: int


class Runner:
    """Runner of the target over its cache.

    Args:
        decoder: target.
        cache: cache of the target.
        taps: decoder layers whose outputs are the features.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, taps: tuple[int, ...]) -> None:
        self.decoder, self.cache, self.taps = decoder, decoder.owns(cache), taps
        self.device = decoder.embed.device

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def forward(self, plan: Plan, pending: Sequence[int], guesses: Sequence[Guess], sampling: SamplingOf) -> Verified:
        """Run the forward of a plan; draw, verify and commit its tokens.

        Args:
            plan: rows of the step.
            pending: token before the guesses of each decoding row.
            guesses: guesses of each decoding row.
            sampling: function that returns the sampling of some of the sampled rows.
        """
        decode, pieces = plan.decode, plan.prefill
        # On a GPU one wide call is cheaper than several small ones; on a CPU every padding node costs time.
        decoding = groups(pending, guesses, self.device, ragged=self.device.type == "cpu")
        spans = [self._tree_span(trees, decode) for trees in decoding] + [self._span(piece) for piece in pieces]
        tokens = [trees.draft.tokens.flatten() for trees in decoding] + [self._ints(piece.tokens) for piece in pieces]
        hidden = self.decoder.run(torch.cat(tokens), self.cache, spans, self.taps)
        count, lengths = decoding[-1].end if decoding else 0, [len(piece.tokens) for piece in pieces]
        prompt_hidden = torch.split(hidden.last[count:], lengths) if pieces else ()
        ended = [(piece, end - 1) for piece, end in zip(pieces, accumulate(lengths), strict=True) if piece.last]
        logits, last = None, hidden.last[:count]
        if ended:
            last = torch.cat([last, hidden.last[self._ints([count + place for _, place in ended])]])
            root = padded([piece.tokens[-1] for piece, _ in ended], [NO_GUESS] * len(ended), self.device)
            places = range(len(decode), len(decode) + len(ended))
            decoding = [*decoding, Trees(places, count, root, ancestors(root.parents))]
        starts = [item.start for item in decode] + [piece.start + len(piece.tokens) - 1 for piece, _ in ended]
        paths: list[list[int]] = [[] for _ in starts]
        bonuses, first = [PADDING] * len(starts), [0] * len(starts)
        if starts:
            logits = self.decoder.logits(last)
        for trees in decoding:
            assert logits is not None
            verdict = self._verify(trees, logits, self._ints([starts[place] for place in trees.places]), sampling)
            if trees.places[0] < len(decode) and trees.nodes > 1:
                self._commit([decode[place] for place in trees.places], verdict.path)
            found = zip(trees.places, _paths(verdict), verdict.bonus.tolist(), strict=True)
            for at, (place, path, bonus) in enumerate(found):
                paths[place], bonuses[place], first[place] = path, bonus, trees.first + at * trees.nodes
        features = None
        if self.taps:
            features = _rows(torch.cat(hidden.taps, dim=1), paths[: len(decode)], first, count, lengths)
        return Verified(paths, bonuses, logits, first, features, prompt_hidden, count)

    def _verify(self, trees: Trees, logits: Tensor, starts: Tensor, sampling: SamplingOf) -> Verdict:
        drawn = draw(trees.of(logits), trees.draft, trees.ancestor_mask, starts, sampling(trees.places))
        return verify(trees.draft, trees.ancestor_mask, drawn)

    def _tree_span(self, trees: Trees, decode: Sequence[Decode]) -> Span:
        rows, starts = zip(*((decode[place].row, decode[place].start) for place in trees.places), strict=True)
        longest = max(starts) + trees.nodes
        return Span(self._ints(rows), rows, self._ints(starts), trees.ancestor_mask, trees.nodes, longest)

    def _commit(self, items: Sequence[Decode], path: Tensor) -> None:
        """Move the K/V of the accepted paths to the front."""
        rows, starts = self._ints([item.row for item in items]), self._ints([item.start for item in items])
        self.cache.commit(rows, starts, path)

    def _span(self, piece: PromptPiece) -> Span:
        width = len(piece.tokens)
        row, start = self._ints([piece.row]), self._ints([piece.start])
        return Span(row, [piece.row], start, chain_mask(1, width, self.device), width, piece.start + width)


def _paths(verdict: Verdict) -> list[list[int]]:
    found = zip(verdict.path.tolist(), verdict.length.tolist(), strict=True)
    return [path[: accepted + 1] for path, accepted in found]


def _rows(
    features: Tensor, paths: Sequence[Sequence[int]], first: Sequence[int], count: int, lengths: Sequence[int]
) -> list[Tensor]:
    """Features of every path and of every piece of a prompt, from those of all T tokens.

    Args:
        features: [T, taps * H].
        paths: nodes of each path.
        first: index of the root of each path among the tokens.
        count: number of tokens before the first prompt.
        lengths: number of tokens of each piece of a prompt.
    """
    at = [begin + node for begin, path in zip(first, paths, strict=False) for node in path]
    taken = torch.split(features[at], [len(path) for path in paths]) if paths else ()
    return [*taken, *(torch.split(features[count:], list(lengths)) if lengths else ())]
