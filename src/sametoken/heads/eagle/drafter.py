"""EAGLE: a head of a block or two guesses from the target's hidden states, and from its own where those end.

Slot i reads the token after position i and the feature of position i, and guesses the token after that. Slots of
certain tokens are fed once, with true features, when the token after them is known; what was guessed with its own
outputs is never kept. Legend: B rows, K branches, N nodes, H hidden size, W width of the taps together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.drafters.growing import GrowingDrafter
from sametoken.drafters.tree import Tree
from sametoken.heads.eagle.compiled import NativeEagle
from sametoken.heads.eagle.module import EagleHead
from sametoken.model.compiled import Certain
from sametoken.model.decoder import Decoder, attend_in
from sametoken.runtime.cache import KVCache, Span
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import PADDING, Draft, chain_parents, chain_reach
from sametoken.speculation.sampling import Sampling, rank

FEED_ROWS = 512  # most slots that one forward reads
LONG_BACKLOG = 16  # beyond this a backlog is read first, or the other rows' next feed would be padded to its width
MOST_KEPT = 512  # features that a row keeps while nobody asks for guesses; beyond, they are read


@dataclass(slots=True)
class _Row:
    """One sequence: the first `length` slots are in the cache; `tokens` and `features` are of the positions after."""

    length: int = 0
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)

    def take(self, count: int, pending: Sequence[int] = ()) -> tuple[list[int], Tensor]:
        """The next `count` slots: the tokens after them, and features [count, W]."""
        after = [*self.tokens[1 : count + 1], *pending]
        features = self.features[0] if len(self.features) == 1 else torch.cat(self.features)
        del self.tokens[:count]
        self.features = [features[count:]] if self.tokens else []
        return after, features[:count]


class EagleDrafter(GrowingDrafter[_Row]):
    """Guesses with an EAGLE head over a cache that shares the target's page table.

    Args:
        head: of any version; its token vectors and output layer may be the target's.
        target: the model whose features it reads.
        cache: the head's keys and values.
        max_draft_len, branches, budget: see `GrowingDrafter`.
    """

    namespace = "eagle"

    def __init__(
        self,
        head: EagleHead,
        target: Decoder,
        cache: KVCache,
        *,
        max_draft_len: int,
        branches: int = 1,
        budget: int | None = None,
    ) -> None:
        super().__init__(cache.keys.device, max_draft_len, min(branches, head.config.draft_vocab_size), budget)
        self.head, self.target, self.cache = head, target, cache
        self._native = NativeEagle.of(head, target)
        self.taps = head.config.taps
        self._vocabulary = target.config.vocab_size
        reduced = head.config.draft_vocab_size < self._vocabulary
        self._ids = head.draft_ids.to(self._device) if reduced else None

    def admit(self, row: int, cached: Sequence[int], held: int = 0) -> None:
        assert held == len(cached), "features of reused tokens are gone, so their slots must be there"
        self._rows[row] = _Row(length=held)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        assert features is not None
        parts = torch.split(features, [len(certain) for certain in tokens])
        for row, certain, part in zip(rows, tokens, parts, strict=True):
            if certain:
                self._rows[row].tokens.extend(certain)
                self._rows[row].features.append(part)
        self._read([row for row in rows if len(self._rows[row].tokens) > MOST_KEPT])

    def catch_up(self, rows: Sequence[int]) -> None:
        self._read(rows)

    def _read(self, rows: Sequence[int]) -> None:
        """Feeds long backlogs but for the last position, whose next token may not be known."""
        while long := [row for row in rows if len(self._rows[row].tokens) > LONG_BACKLOG]:
            states = [self._rows[row] for row in long]
            # Together, and nobody is padded.
            width = max(1, min(FEED_ROWS // len(long), *(len(state.tokens) - 1 for state in states)))
            self._feed(long, [state.take(width) for state in states])

    def _feed(self, rows: Sequence[int], slots: Sequence[tuple[list[int], Tensor]]) -> Tensor:
        """Computes certain slots into the cache.

        Args:
            slots: for each row the tokens after its next slots, one or more, and their features [slots, W].

        Returns:
            [B, H] output of each row's last slot.
        """
        widths = [len(after) for after, _ in slots]
        width, states = max(widths), [self._rows[row] for row in rows]
        tokens = self._ints([after + after[-1:] * (width - len(after)) for after, _ in slots])
        features = self._normed(_joined(slots))
        hidden = self.head.fuse(features) if self._native is None else self._native.fuse(features)
        ends = self._ints(widths)
        if min(widths) < width:  # shorter rows repeat their last slot past their end, where nothing is kept
            place = torch.arange(width, device=self._device).minimum(ends.unsqueeze(1) - 1)
            hidden = hidden[(place + (ends.cumsum(0) - ends).unsqueeze(1)).flatten()]
        starts = [state.length for state in states]
        reach = chain_reach(len(rows), width, self._device)
        span = Span(self._ints(rows), rows, self._ints(starts), reach, width, max(starts) + width)
        output = self._run(tokens, hidden, span)
        for state, count in zip(states, widths, strict=True):
            state.length += count
        return output.view(len(rows), width, -1)[torch.arange(len(rows), device=self._device), ends - 1]

    def _normed(self, features: Tensor) -> Tensor:  # [T, W] -> [T, W]
        """What slots read of the target: EAGLE-1 what its output layer reads, EAGLE-3 the taps as they are."""
        normed: Tensor = self.target.norm(features) if self.head.config.version == 1 else features
        return normed

    def _run(self, tokens: Tensor, hidden: Tensor, span: Span) -> Tensor:
        """Outputs [B * N, H] of slots with the tokens [B, N] after them and hidden states [B * N, H]."""
        view = self.cache.view([span])
        if self._native is not None:
            return self._native(tokens.flatten(), hidden, self.cache, view)
        embed = self.target.embed if self.head.embed is None else self.head.embed
        embedded = embed(tokens.flatten().clamp(min=0))
        output: Tensor = self.head(embedded, hidden, self.head.rope(view.positions), attend_in(self.cache, view))
        return output

    def propose(self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling) -> Draft:
        self._read(rows)
        states = [self._rows[row] for row in rows]
        assert all(state.tokens for state in states), "a slot needs a feature that was not used yet"
        slots = [state.take(len(state.tokens), [token]) for state, token in zip(states, pending, strict=True)]
        limits = [min(limit, self.max_draft_len) for limit in limits]
        if self.branches == 1:
            return self._chain(rows, slots, limits, sampling)
        return self._tree(rows, pending, limits, self._feed(rows, slots), sampling)

    def _chain(
        self, rows: Sequence[int], slots: Sequence[tuple[list[int], Tensor]], limits: Sequence[int], sampling: Sampling
    ) -> Draft:
        """The tree of one branch: each level is the head's own draw under the target's rule.

        Args:
            slots: what each row reads first, as `_feed` takes it; the last tokens are the pending ones.
        """
        levels = max(limits)
        if self._native is None or sampling.edited:
            drawn = self._drawn(rows, slots, levels, sampling)
        else:
            states = [self._rows[row] for row in rows]
            after, features = [tokens for tokens, _ in slots], self._normed(_joined(slots))
            certain = Certain(rows, [state.length for state in states], after, features)
            drawn = self._native.guess(certain, self.cache, levels, sampling)
            for state, tokens in zip(states, after, strict=True):
                state.length += len(tokens)
        if min(limits) < levels:
            past = torch.arange(levels + 1, device=self._device) > self._ints(limits).unsqueeze(1)
            drawn = drawn.masked_fill(past, PADDING)
        return Draft(drawn, chain_parents(len(rows), levels + 1, self._device))

    def _drawn(
        self, rows: Sequence[int], slots: Sequence[tuple[list[int], Tensor]], levels: int, sampling: Sampling
    ) -> Tensor:
        """[B, 1 + levels] the pending tokens and the guesses after them, one forward a level."""
        output, host = self._feed(rows, slots), [self._rows[row].length for row in rows]
        starts, at = self._ints(host), self._ints(rows)
        tokens = [self._ints([after[-1] for after, _ in slots])]
        for level in range(levels):
            if level > 0:
                reach = chain_reach(len(rows), level, self._device)
                span = Span(at, rows, starts, reach, 1, max(host) + level)
                output = self._run(tokens[-1].unsqueeze(1), self.head.recycle(output), span)
            tokens.append(self._draw(output, starts + level, sampling))
        return torch.stack(tokens, dim=1)

    def _draw(self, output: Tensor, position: Tensor, sampling: Sampling) -> Tensor:
        """[B] the best single guess after slots that read the tokens at `position` [B]."""
        logits = self._logits(output)
        if sampling.greedy:
            best = logits.to(torch.float32).argmax(-1)
            return best if self._ids is None else self._ids[best]
        root = torch.zeros_like(position).unsqueeze(1)
        wide = self._widened(logits).unsqueeze(1)
        return draw(wide, Draft(root, root - 1), (root == 0).unsqueeze(2), position, sampling).squeeze(1)

    def _tree(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], output: Tensor, sampling: Sampling
    ) -> Draft:
        """The best `budget` candidates of a tree whose every level expands the best `branches` (EAGLE-2)."""
        host = [self._rows[row].length for row in rows]
        starts, at = self._ints(host), self._ints(rows)
        tree = Tree(self._ints(pending), self._ints(limits), self.branches)
        output = output.unsqueeze(1)
        while tree.level < max(limits):
            if tree.level > 0:
                tokens, reach = tree.enter_frontier()
                above = output.gather(1, tree.origin.unsqueeze(2).expand(-1, -1, output.shape[2]))
                span = Span(at, rows, starts, reach, tokens.shape[1], max(host) + reach.shape[1])
                output = self._run(tokens, self.head.recycle(above.flatten(0, 1)), span)
                output = output.view(*tokens.shape, -1)
            tree.grow(*self._rank(output, starts + tree.level + 1, sampling))
        return tree.best([self._kept(limit) for limit in limits])[0]

    def _rank(self, output: Tensor, position: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """[B, frontier, K] tokens and scores of the guesses at `position` [B] after outputs [B, frontier, H]."""
        logits = self._logits(output.flatten(0, 1))
        if self._ids is None or not sampling.greedy:
            wide = self._widened(logits).view(*output.shape[:2], -1)
            return rank(wide, position, sampling, self.branches)
        tokens, scores = rank(logits.view(*output.shape[:2], -1), position, sampling, self.branches)
        return self._ids[tokens], scores

    def _logits(self, output: Tensor) -> Tensor:
        """[T, draft vocabulary] scores after outputs [T, H]."""
        if self._native is not None:
            return self._native.logits(output)
        if self.head.head is None:
            return self.target.project(self.head.normed(output))
        return self.head.logits(output)

    def _widened(self, logits: Tensor) -> Tensor:
        """Scores [T, V] for the target's vocabulary, in which bans, penalties and noise are told."""
        if self._ids is None:
            return logits
        wide = logits.new_full((logits.shape[0], self._vocabulary), float("-inf"))
        return wide.index_copy_(1, self._ids, logits)


def _joined(slots: Sequence[tuple[list[int], Tensor]]) -> Tensor:
    """[T, W] features of all rows' slots."""
    return slots[0][1] if len(slots) == 1 else torch.cat([features for _, features in slots])
