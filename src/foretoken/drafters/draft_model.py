"""Draft-target speculation: a small model of the same tokenizer grows a tree of guesses, best first.

The draft keeps its own keys and values in the pages the target's rows own. Scores are ranked under the noise that the
target draws with, which is what makes guesses come true at temperature > 0.
Legend: B rows, K branches, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.drafters.base import Drafter
from foretoken.model.decoder import Decoder, Hidden
from foretoken.runtime.cache import KVCache, Span
from foretoken.speculation.draft import PADDING, Draft, chain_parents, chain_reach
from foretoken.speculation.sampling import Sampling, rank, sample

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


class DraftModelDrafter(Drafter):
    """Guesses with a decoder over a cache that shares the target's page table.

    Args:
        decoder: the draft model; its vocabulary is the target's.
        cache: its keys and values.
        max_draft_len: depth of the tree.
        branches: candidates that each level keeps and expands; 1 is a chain.
        budget: draft tokens a proposal keeps of all candidates, best cumulative score first.
    """

    namespace = "draft_target"

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, max_draft_len: int, branches: int = 1, budget: int | None = None
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.max_draft_len, self.branches = max_draft_len, branches
        self.budget = budget if budget is not None else max_draft_len
        # The cache must hold what is proposed and, past the committed length, what is run to propose it.
        self.nodes = max(self.budget, branches * (max_draft_len - 1))
        self._rows: dict[int, _Row] = {}
        self._device = decoder.embed.weight.device

    def _ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def admit(self, row: int, cached: Sequence[int], held: int = 0) -> None:
        self._rows[row] = _Row(length=held, backlog=list(cached[held:]))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

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

    def held(self, row: int) -> int:
        return self._rows[row].length

    def slots(self, limit: int) -> int:
        return max(self._kept(limit), self.branches * (limit - 1))

    def _kept(self, limit: int) -> int:
        """Draft tokens of a proposal: their share of the budget, but a whole path if there is room for one."""
        limit = min(limit, self.max_draft_len)
        return min(self.budget, max(limit, -(-self.budget * limit // self.max_draft_len)))

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
        hidden = self._feed(rows, [[*state.backlog, token] for state, token in zip(states, pending, strict=True)])
        for state in states:
            state.backlog = []
        levels = min(max(limits), self.max_draft_len)
        if self.branches == 1:
            return self._chain(rows, pending, [min(limit, levels) for limit in limits], hidden, sampling)
        tree = _Tree(self._ints(pending), self._ints(limits), self.branches)
        while tree.level < levels:
            if tree.level > 0:
                hidden = self._forward(rows, tree)
            tree.grow(*self._rank(hidden, rows, sampling, tree))
        draft, chosen = tree.best([self._kept(limit) for limit in limits])
        self._remember(states, draft, chosen, tree)
        return draft

    def _rank(self, hidden: Tensor, rows: Sequence[int], sampling: Sampling, tree: _Tree) -> tuple[Tensor, Tensor]:
        """[B, frontier, K] tokens and scores of the frontier's children."""
        logits = self.decoder.logits(hidden)
        position = self._ints([self._rows[row].length for row in rows]) + tree.level
        logits = logits.view(len(rows), -1, logits.shape[1])
        return rank(logits, position, sampling, self.branches)

    def _chain(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], hidden: Tensor, sampling: Sampling
    ) -> Draft:
        """The tree of one branch, grown without looking for one: each level is the draft's own draw under the target's
        rule, its best single guess.
        """
        states = [self._rows[row] for row in rows]
        starts, at = self._ints([state.length for state in states]), self._ints(rows)
        root = self._ints(pending).unsqueeze(1)
        if sampling.greedy and self.decoder.native is not None:
            drawn = torch.cat([root, self.decoder.native.chain(hidden, self.cache, at, starts, max(limits))], dim=1)
        else:
            drawn = self._draw(root, at, starts, max(limits), hidden, sampling)
        if min(limits) < max(limits):
            past = torch.arange(drawn.shape[1], device=self._device) > self._ints(limits).unsqueeze(1)
            drawn = drawn.masked_fill(past, PADDING)
        for state, guesses, limit in zip(states, drawn.tolist(), limits, strict=True):
            state.children = {node: {guesses[node + 1]: node + 1} for node in range(limit)}
            state.written = {node: node - 1 for node in range(1, min(limit + 1, drawn.shape[1] - 1))}
        return Draft(drawn, chain_parents(len(rows), drawn.shape[1], self._device))

    def _draw(
        self, pending: Tensor, rows: Tensor, starts: Tensor, levels: int, hidden: Tensor, sampling: Sampling
    ) -> Tensor:
        """[B, 1 + levels] the pending tokens and what is drawn after them, one forward a level."""
        root, count = torch.zeros_like(pending), len(rows)
        alone, itself = Draft(root, root - 1), (root == 0).unsqueeze(2)
        nodes, longest = max(1, self.decoder.least_rows // count), int(starts.max())
        tokens = [pending]
        for level in range(levels):
            if level > 0:
                total = level - 1 + nodes  # where one token is too few for a forward, padding goes on with the chain
                reach = chain_reach(count, total, self._device)
                span = Span(rows, rows.tolist(), starts, reach, nodes, longest + total)
                padding = [tokens[-1].new_full((count, nodes - 1), PADDING)] if nodes > 1 else []
                hidden = self._run(torch.cat([tokens[-1], *padding], dim=1), span)[::nodes]
            logits = self.decoder.logits(hidden).unsqueeze(1)
            tokens.append(sample(logits, alone, itself, starts + (level - 1), sampling))
        return torch.cat(tokens, dim=1)

    def _forward(self, rows: Sequence[int], tree: _Tree) -> Tensor:
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

    def _remember(self, states: Sequence[_Row], draft: Draft, chosen: Tensor, tree: _Tree) -> None:
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


class _Tree:
    """A tree under growth: all candidates so far, level by level, and the frontier that is expanded next.

    Candidate 0 is the root. `forwarded[b, c]` is the place of candidate c among the nodes that ran, or -1.
    """

    def __init__(self, pending: Tensor, limits: Tensor, branches: int) -> None:
        rows = pending.shape[0]
        self.limits, self.branches, self.level = limits, branches, 0
        device = pending.device
        self.tokens, self.parents = pending.unsqueeze(1), torch.full((rows, 1), -1, device=device)
        self.scores = torch.zeros(rows, 1, device=device)
        self.forwarded = torch.full((rows, 1), -1, device=device)
        self.reach = torch.zeros(rows, 0, 0, dtype=torch.bool, device=device)
        self._frontier = torch.zeros_like(self.tokens)  # candidates expanded by the next `grow`

    def grow(self, tokens: Tensor, scores: Tensor) -> None:
        """Adds K children [B, frontier, K] to every frontier node and takes the K best of them as the next frontier."""
        branches = tokens.shape[2]
        total = self.scores.gather(1, self._frontier).unsqueeze(2) + scores
        total = total.masked_fill((self.limits <= self.level).view(-1, 1, 1), float("-inf")).flatten(1)
        first = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], dim=1)
        self.scores = torch.cat([self.scores, total], dim=1)
        parents = self._frontier.repeat_interleave(branches, dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.forwarded = torch.cat([self.forwarded, torch.full_like(parents, -1)], dim=1)
        self._frontier = first + total.topk(branches, dim=1).indices
        self.level += 1

    def enter_frontier(self) -> tuple[Tensor, Tensor]:
        """The frontier takes its place in the cache: its tokens [B, K] and the reach of all nodes that ever ran."""
        rows, width = self._frontier.shape
        size = self.reach.shape[1]
        above = self.forwarded.gather(1, self.parents.gather(1, self._frontier))  # -1: the committed root
        grown = self.reach.new_zeros(rows, size + width, size + width)
        grown[:, :size, :size] = self.reach
        if size:
            inherited = self.reach.gather(1, above.clamp(min=0).unsqueeze(2).expand(-1, -1, size))
            grown[:, size:, :size] = inherited & (above >= 0).unsqueeze(2)
        grown[:, size:, size:] = torch.eye(width, dtype=torch.bool, device=grown.device)
        self.reach = grown
        place = size + torch.arange(width, device=grown.device)
        self.forwarded.scatter_(1, self._frontier, place.expand(rows, -1))
        return self.tokens.gather(1, self._frontier), grown

    def best(self, budgets: Sequence[int]) -> tuple[Draft, Tensor]:
        """Each row's root and its `budgets[b]` best candidates as a draft, and their candidate numbers [B, N].

        A child never scores above its parent and a tie goes to the earlier candidate, so the choice is a tree.
        """
        rows, count = self.tokens.shape
        keep = min(max(budgets), count - 1)
        order = self.scores[:, 1:].sort(dim=1, descending=True, stable=True).indices[:, :keep] + 1
        # What is over a row's budget goes to the end, where padding belongs.
        over = torch.arange(keep, device=order.device) >= torch.tensor(budgets, device=order.device).unsqueeze(1)
        taken = (order + over * count).sort(dim=1).values
        chosen = torch.cat([torch.zeros_like(self.tokens[:, :1]), taken % count], dim=1)
        place = torch.arange(keep + 1, device=chosen.device).expand(rows, -1)
        node = torch.zeros_like(self.tokens).scatter(1, chosen, place)
        parents = node.gather(1, self.parents.gather(1, chosen).clamp(min=0))
        tokens = self.tokens.gather(1, chosen)
        dead = self.scores.gather(1, chosen) == float("-inf")
        dead[:, 1:] |= taken >= count
        tokens = tokens.masked_fill(dead, PADDING)
        parents = torch.where(dead, chain_parents(rows, keep + 1, chosen.device), parents)
        parents[:, 0] = -1
        return Draft(tokens, parents), chosen
