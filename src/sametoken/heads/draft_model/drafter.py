"""Draft-target speculation: a small model of the same tokenizer grows a tree of guesses, best first.

The draft keeps its own keys and values in the pages the target's rows own. Scores are ranked under the noise that the
target draws with, which is what makes guesses come true at temperature > 0.
Legend: B rows, K branches, N nodes, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.drafters.growing import GrowingDrafter
from sametoken.drafters.tree import Tree
from sametoken.model.compiled import Certain
from sametoken.model.decoder import Decoder, Hidden
from sametoken.runtime.cache import KVCache, Span
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import PADDING, Draft, chain_parents, chain_reach
from sametoken.speculation.sampling import Sampling, rank

FEED_ROWS = 512  # most tokens that one forward reads
LONG_BACKLOG = 16  # beyond this a backlog is read first, or the other rows' next feed would be padded to its width


@dataclass(slots=True)
class _Row:
    """One sequence: `length` tokens are in the draft's cache, `backlog` became certain but is not yet."""

    length: int = 0
    backlog: list[int] = field(default_factory=list)
    # The last proposal: child tokens of every node, and where its own forward lies past `length`.
    children: dict[int, dict[int, int]] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)


class DraftModelDrafter(GrowingDrafter[_Row]):
    """Guesses with a decoder over a cache that shares the target's page table.

    Args:
        decoder: the draft model; its vocabulary is the target's.
        cache: its keys and values.
        max_draft_len, branches, budget: see `GrowingDrafter`.
    """

    namespace = "draft_target"

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, max_draft_len: int, branches: int = 1, budget: int | None = None
    ) -> None:
        super().__init__(decoder.embed.weight.device, max_draft_len, branches, budget)
        self.decoder, self.cache = decoder, cache

    def admit(self, row: int, cached: Sequence[int], held: int = 0) -> None:
        self._rows[row] = _Row(length=held, backlog=list(cached[held:]))

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        for row, certain in zip(rows, tokens, strict=True):
            state = self._rows[row]
            if state.children:
                self._keep_path(row, state, certain)
            else:  # nothing was proposed: the common case while speculation is off
                state.backlog.extend(certain)

    def catch_up(self, rows: Sequence[int]) -> None:
        while long := [row for row in rows if len(self._rows[row].backlog) > LONG_BACKLOG]:
            backlogs = [self._rows[row].backlog for row in long]
            width = max(1, min(FEED_ROWS // len(long), *map(len, backlogs)))  # together, and nobody is padded
            self._feed(long, [backlog[:width] for backlog in backlogs])
            for backlog in backlogs:
                del backlog[:width]

    def settle(self, row: int) -> None:
        """Reads the whole backlog, so that everything certain is in the cache."""
        backlog = self._rows[row].backlog
        while backlog:
            self._feed([row], [backlog[:FEED_ROWS]])
            del backlog[:FEED_ROWS]

    def resume(self, row: int, certain: Sequence[int]) -> None:
        """All of `certain` is in the cache, the last token perhaps not: a captured step put it there."""
        self._rows[row] = _Row(length=len(certain) - 1, backlog=list(certain[-1:]))

    def _keep_path(self, row: int, state: _Row, certain: Sequence[int]) -> None:
        """Commits what the last proposal already computed of the accepted path; the rest joins the backlog."""
        node, kept = 0, 0
        path: list[int] = []
        if state.children and certain:
            kept = 1  # the pending token itself, which `propose` fed
            for token in certain[1:]:
                node = state.children.get(node, {}).get(token, -1)
                if node not in state.written:
                    break
                path.append(state.written[node])
                kept += 1
        if path and path != list(range(len(path))):
            self.cache.commit(self._ints([row]), self._ints([state.length]), self._ints([path]))
        state.length += len(path)
        state.backlog.extend(certain[kept:])
        state.children, state.written = {}, {}

    def _feed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Reads certain tokens into the cache; returns the last hidden state of each row, [B, H]."""
        widths = [len(t) for t in tokens]
        width = max(max(widths), self.decoder.least_rows if len(rows) == 1 else 1)
        padded = self._ints([[*t, *[PADDING] * (width - len(t))] for t in tokens])
        lengths = [self._rows[row].length for row in rows]
        reach = chain_reach(len(rows), width, self._device)
        span = Span(self._ints(rows), rows, self._ints(lengths), reach, width, max(lengths) + width)
        hidden = self._run(padded, span)
        for row, count in zip(rows, widths, strict=True):
            self._rows[row].length += count
        return hidden[[place * width + count - 1 for place, count in enumerate(widths)]]

    def _run(self, tokens: Tensor, span: Span) -> Tensor:
        """Last hidden states [B * N, H] of `tokens` [B, N]."""
        hidden: Hidden = self.decoder(tokens.flatten(), self.cache, self.cache.view([span]))
        return hidden.last

    def propose(self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling) -> Draft:
        self.catch_up(rows)
        states = [self._rows[row] for row in rows]
        certain = [[*state.backlog, token] for state, token in zip(states, pending, strict=True)]
        for state in states:
            state.backlog = []
        levels = min(max(limits), self.max_draft_len)
        if self.branches == 1:
            return self._chain(rows, certain, [min(limit, levels) for limit in limits], sampling)
        hidden = self._feed(rows, certain)
        tree = Tree(self._ints(pending), self._ints(limits), self.branches)
        while tree.level < levels:
            if tree.level > 0:
                hidden = self._forward(rows, tree)
            tree.grow(*self._rank(hidden, rows, sampling, tree))
        draft, chosen = tree.best([self._kept(limit) for limit in limits])
        self._remember(states, draft, chosen, tree)
        return draft

    def _rank(self, hidden: Tensor, rows: Sequence[int], sampling: Sampling, tree: Tree) -> tuple[Tensor, Tensor]:
        """[B, frontier, K] tokens and scores of the frontier's children."""
        logits = self.decoder.logits(hidden)
        position = self._ints([self._rows[row].length for row in rows]) + tree.level
        logits = logits.view(len(rows), -1, logits.shape[1])
        return rank(logits, position, sampling, self.branches)

    def _chain(
        self, rows: Sequence[int], certain: Sequence[Sequence[int]], limits: Sequence[int], sampling: Sampling
    ) -> Draft:
        """The tree of one branch, grown without looking for one: each level is the draft's own draw under the target's
        rule, its best single guess.

        Args:
            certain: what each row reads first, the pending token last.
        """
        states = [self._rows[row] for row in rows]
        if self.decoder.native is not None and not sampling.edited:
            feed = Certain(rows, [state.length for state in states], certain)
            drawn = self.decoder.native.guess(feed, self.cache, max(limits), sampling)
            for state, tokens in zip(states, certain, strict=True):
                state.length += len(tokens)
        else:
            drawn = self._draw(rows, certain, max(limits), sampling)
        if min(limits) < max(limits):
            past = torch.arange(drawn.shape[1], device=self._device) > self._ints(limits).unsqueeze(1)
            drawn = drawn.masked_fill(past, PADDING)
        for state, guesses, limit in zip(states, drawn.tolist(), limits, strict=True):
            state.children = {node: {guesses[node + 1]: node + 1} for node in range(limit)}
            state.written = {node: node - 1 for node in range(1, min(limit + 1, drawn.shape[1] - 1))}
        return Draft(drawn, chain_parents(len(rows), drawn.shape[1], self._device))

    def _draw(self, rows: Sequence[int], certain: Sequence[Sequence[int]], levels: int, sampling: Sampling) -> Tensor:
        """[B, 1 + levels] the pending tokens and what is drawn after them, one forward a level."""
        hidden, pending = self._feed(rows, certain), self._ints([tokens[-1:] for tokens in certain])
        at, starts = self._ints(rows), self._ints([self._rows[row].length for row in rows])
        root, count = torch.zeros_like(pending), len(rows)
        alone, itself = Draft(root, root - 1), (root == 0).unsqueeze(2)
        nodes, longest = max(1, self.decoder.least_rows // count), int(starts.max())
        tokens = [pending]
        for level in range(levels):
            if level > 0:
                total = level - 1 + nodes  # where one token is too few for a forward, padding goes on with the chain
                reach = chain_reach(count, total, self._device)
                span = Span(at, rows, starts, reach, nodes, longest + total)
                padding = [tokens[-1].new_full((count, nodes - 1), PADDING)] if nodes > 1 else []
                hidden = self._run(torch.cat([tokens[-1], *padding], dim=1), span)[::nodes]
            logits = self.decoder.logits(hidden).unsqueeze(1)
            tokens.append(draw(logits, alone, itself, starts + (level - 1), sampling))
        return torch.cat(tokens, dim=1)

    def _forward(self, rows: Sequence[int], tree: Tree) -> Tensor:
        """Runs the frontier past the committed length; returns its hidden states [B * frontier, H]."""
        lengths = [self._rows[row].length for row in rows]
        tokens, reach = tree.enter_frontier()
        width = tokens.shape[1]
        if tokens.numel() < self.decoder.least_rows:  # a padding node that sees itself
            tokens = torch.cat([tokens, tokens.new_full((1, 1), PADDING)], dim=1)
            size = reach.shape[1]
            padded = reach.new_zeros(1, size + 1, size + 1)
            padded[:, :size, :size] = reach
            padded[:, size, size] = True
            reach = padded
        longest = max(lengths) + reach.shape[1]
        span = Span(self._ints(rows), rows, self._ints(lengths), reach, tokens.shape[1], longest)
        hidden = self._run(tokens, span)
        return hidden.view(len(rows), -1, hidden.shape[1])[:, :width].flatten(0, 1)

    def _remember(self, states: Sequence[_Row], draft: Draft, chosen: Tensor, tree: Tree) -> None:
        """Notes which proposed nodes are in the cache, to keep them if they are accepted."""
        slots = tree.forwarded.gather(1, chosen).tolist()
        for state, tokens, parents, slot in zip(
            states, draft.tokens.tolist(), draft.parents.tolist(), slots, strict=True
        ):
            state.children, state.written = {0: {}}, {}
            for node in range(1, len(tokens)):
                if tokens[node] != PADDING:
                    state.children.setdefault(parents[node], {}).setdefault(tokens[node], node)
                    if slot[node] >= 0:
                        state.written[node] = slot[node]
