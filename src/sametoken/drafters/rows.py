"""Drafters that grow trees with a model: row state, and calls of `growing.grow` on the host or in a captured step.

Legend: B rows, N nodes of a draft, R slots of all rows, H hidden size, K longest path, W width of the taps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sametoken.control.worth import Worth
from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.device import Proposer
from sametoken.drafters.growing import Guesser, Place, grow
from sametoken.drafters.padded import Guess, guesses_of
from sametoken.drafters.reading import Row, Slots, TextWindow, joined
from sametoken.drafters.tree import Chain, Grown, Tree, chain_of
from sametoken.model.compiled_guesses import Committed, TreeBounds
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.speculation.draft import Draft, chain_mask
from sametoken.speculation.sampling import Sampling

FEED_ROWS = 512  # most slots that one forward reads
LONG_BACKLOG = 16  # longer backlogs are read separately: the other rows' feed is not padded to their width
MOST_KEPT = 512  # features stored for a row that is not drafted; more are read by the model at once


class GrowingDrafter(Drafter):
    """Drafter with a model whose KV cache shares the target's page table.

    Args:
        guesser: the draft model or head.
        max_draft_len: depth of a tree, at most `budget`.
        branches: candidates that each level keeps and expands; 1 for a chain.
        budget: draft tokens of a proposal, by cumulative score of all candidates; None for one path.
        window: part of a long text that the model reads; None for all of it.
    """

    runs_model = True

    def __init__(
        self, guesser: Guesser, max_draft_len: int, branches: int, budget: int | None, window: TextWindow | None = None
    ) -> None:
        self.guesser, self.cache = guesser, guesser.cache
        self.budget, self.branches = budget if budget is not None else max_draft_len, branches
        self.max_draft_len = min(max_draft_len, self.budget)  # a path has no more nodes than its draft
        # The cache must hold the proposal and, past the committed length, the nodes that are run to propose it.
        self.nodes = self.slots(self.max_draft_len)
        self._rows: dict[int, Row] = {}
        self._device = guesser.cache.keys.device
        self.window, table = window, self.cache.table
        # By row, for captured steps: the row of the page table that the model reads, and `Row.skipped`.
        self.places = torch.stack([self._ints(range(table.spare + 1)), self._ints([0] * (table.spare + 1))])

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        assert not self.taps or draft_cached == len(cached), (
            "features of reused tokens are gone, so their slots must be there"
        )
        self._rows[row] = Row(draft_cached, list(cached[draft_cached:]), text=list(cached))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def cached_tokens(self, row: int) -> int:
        state = self._rows[row]
        return 0 if state.skipped else state.length

    def unread(self, row: int, context: int) -> int:
        if self.window is not None and not self.fits(row):
            return self.window.read
        return context - self._rows[row].length - self._rows[row].skipped

    def fits(self, row: int) -> bool:
        """True if the row need not be shortened before the model reads more of it."""
        state = self._rows[row]
        return self.window is None or self.window.fits(state.length, len(state.tokens), short=state.skipped > 0)

    def slots(self, limit: int) -> int:
        return max(self.nodes_of(limit), self.branches * (min(limit, self.max_draft_len) - 1))

    def branch(self, branches: int, budget: int) -> None:
        """Change the shape of trees, without needing more slots than at first; no row may be admitted yet."""
        assert not self._rows, "rows keep what was proposed for them"
        self.branches, self.budget = branches, budget

    def nodes_of(self, limit: int) -> int:
        """Draft tokens of a proposal with this limit: a proportional part of the budget, at least a complete path."""
        limit = min(limit, self.max_draft_len)
        return max(limit, -(-self.budget * limit // self.max_draft_len))

    def _ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    # Reading.

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        parts: Sequence[Tensor | None] = [None] * len(rows)
        if features is not None:
            parts = torch.split(features, [len(each) for each in tokens])
        for row, committed, part in zip(rows, tokens, parts, strict=True):
            state = self._rows[row]
            state.text.extend(committed)
            kept = self._keep_path(row, state, committed) if state.children else 0
            if committed[kept:]:
                state.tokens.extend(committed[kept:])
                if part is not None:
                    state.features.append(part)
        if features is not None:
            self._read([row for row in rows if len(self._rows[row].tokens) > MOST_KEPT])

    def catch_up(self, rows: Sequence[int]) -> None:
        self._read(rows)

    def _read(self, rows: Sequence[int]) -> None:
        """Run the model over long backlogs together, without padding any row."""
        self._shorten(rows)
        lag = self.guesser.lag
        while long := [row for row in rows if len(self._rows[row].tokens) > LONG_BACKLOG]:
            states = [self._rows[row] for row in long]
            width = max(1, min(FEED_ROWS // len(long), *(len(state.tokens) - lag for state in states)))
            self._feed(long, [state.take(width, lag) for state in states])

    def _feed(self, rows: Sequence[int], slots: Slots) -> Tensor:
        """Write the KV of committed tokens to the cache; return the output [B, H] of each row's last slot."""
        widths = [len(tokens) for tokens, _ in slots]
        width, lengths = max(widths), self._ints(widths)
        # Shorter rows repeat their last slot past their end, where the cache is free.
        tokens = self._ints([[*each, *each[-1:] * (width - len(each))] for each, _ in slots])
        features, hidden = joined(slots), None
        if features is not None:
            hidden = self.guesser.fuse(features)
            if min(widths) < width:
                place = torch.arange(width, device=self._device).minimum(lengths.unsqueeze(1) - 1)
                hidden = hidden[(place + (lengths.cumsum(0) - lengths).unsqueeze(1)).flatten()]
        span = self._place(rows).span(chain_mask(len(rows), width, self._device), width)
        output = self.guesser.run(tokens, hidden, span)
        for row, count in zip(rows, widths, strict=True):
            self._rows[row].length += count
        return output[torch.arange(len(rows), device=self._device), lengths - 1]

    def _place(self, rows: Sequence[int]) -> Place:
        lengths, own = [self._rows[row].length for row in rows], self._own(rows)
        return Place(self._ints(own), own, self._ints(lengths), max(lengths), self._ints(self._skipped(rows)))

    def _own(self, rows: Sequence[int]) -> list[int]:
        """Rows of the page table that the model reads."""
        return [self.cache.table.short(row) if self._rows[row].skipped else row for row in rows]

    def _skipped(self, rows: Sequence[int]) -> list[int]:
        return [self._rows[row].skipped for row in rows]

    def _shorten(self, rows: Sequence[int]) -> None:
        """Begin the rows whose text is too long anew, with its first and last tokens."""
        for row in rows:
            if self.window is not None and not self.fits(row):
                state = self._rows[row]
                state.length, state.tokens, state.skipped = 0, *self.window.cut(state.text)

    # Proposing.

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: Worth | None = None,
    ) -> Proposed:  # fmt: skip
        self._read(rows)
        states = [self._rows[row] for row in rows]
        assert not self.taps or all(state.tokens for state in states), "a slot needs a feature that was not used yet"
        lag = self.guesser.lag
        slots = [state.take(len(state.tokens), lag, [token]) for state, token in zip(states, pending, strict=True)]
        limits = [min(limit, self.max_draft_len) for limit in limits]
        grown = self._compiled(rows, slots, limits, sampling, worth)
        if grown is None:
            output, place = self._feed(rows, slots), self._place(rows)
            grown = grow(self.guesser, place, output, self._tree(pending, limits), max(limits), sampling)
        guesses = guesses_of(grown.draft)
        if not self.taps:
            self._remember(states, guesses, grown.written)
        return Proposed(guesses, grown.shares, grown.ended)

    def _tree(self, pending: Sequence[int], limits: Sequence[int]) -> Chain | Tree:
        if self.branches == 1:
            return Chain(self._ints(pending), self._cut(limits))
        budgets = [self.nodes_of(limit) for limit in limits]
        return Tree(self._ints(pending), self._ints(limits), self.branches, self._ints(budgets), max(budgets))

    def _cut(self, limits: Sequence[int]) -> Tensor | None:
        """Limits [B] of the rows' chains; None if all are equal."""
        return self._ints(limits) if min(limits) < max(limits) else None

    def _compiled(
        self, rows: Sequence[int], slots: Slots, limits: Sequence[int], sampling: Sampling, worth: Worth | None
    ) -> Grown | None:
        """Read tokens and grow trees in one call of the compiled kernels; None if unsupported."""
        states, tokens = [self._rows[row] for row in rows], [each for each, _ in slots]
        lengths, skipped = [state.length for state in states], self._skipped(rows)
        read = Committed(self._own(rows), lengths, tokens, joined(slots), skipped)
        if self.branches == 1:
            grown = self._chains(read, limits, sampling, worth)
        else:
            grown = self._trees(read, limits, sampling)
        if grown is not None:
            for state, each in zip(states, tokens, strict=True):
                state.length += len(each)
        return grown

    def _chains(self, read: Committed, limits: Sequence[int], sampling: Sampling, worth: Worth | None) -> Grown | None:
        drawn = self.guesser.guess(read, limits, sampling, worth)
        if drawn is None:
            return None
        if drawn.tree is None:
            return chain_of(drawn.tokens, self._cut(limits))._replace(shares=drawn.shares)
        parents, written = drawn.tree
        return Grown(Draft(drawn.tokens, parents), written, drawn.shares, drawn.ended)

    def _trees(self, read: Committed, limits: Sequence[int], sampling: Sampling) -> Grown | None:
        bounds = TreeBounds(self.branches, limits, [self.nodes_of(limit) for limit in limits])
        found = self.guesser.branch(read, bounds, sampling)
        return None if found is None else Grown(Draft(*found[:2]), found[2])

    # Steps that the device takes.

    def captured(self) -> Proposer:
        return CapturedGrowing(self)

    def settle(self, row: int) -> Tensor | None:
        """Read all committed tokens whose slots do not read the pending one; return their features (None: no taps)."""
        self._shorten([row])
        state, lag = self._rows[row], self.guesser.lag
        self.places[:, row] = self._ints([*self._own([row]), state.skipped])
        while (count := len(state.tokens) - lag) > 0:
            self._feed([row], [state.take(min(count, FEED_ROWS), lag)])
        return state.features[0] if state.features else None

    def resume(self, row: int, start: int, committed: Sequence[int]) -> None:
        """Record that a captured step read the token at `start` and committed tokens from there on."""
        kept = 1 - self.guesser.lag
        if self.branches == 1 and not self.taps:  # its accepted path is in place already, except for the last token
            kept = max(1, len(committed) - 1)
        before = self._rows[row]
        text, length = before.text, start + kept - before.skipped
        text[start:] = committed
        self._rows[row] = Row(length, list(committed[kept:]), text=text, skipped=before.skipped)

    def give(self, row: int, features: Tensor) -> None:
        """Set the features [count, W] of the row's unread tokens."""
        self._rows[row].features = [features]

    # Reuse of accepted guesses.

    def _remember(self, states: Sequence[Row], guesses: Sequence[Guess], written: Tensor) -> None:
        """Record the proposed nodes that are in the cache, to keep those that are accepted.

        Only without taps: a slot that read the guesser's own output instead of a feature is computed again.
        """
        for state, (tokens, parents), places in zip(states, guesses, written.tolist(), strict=True):
            state.children, state.written = {0: {}}, {}
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
                state.children.setdefault(parent, {}).setdefault(token, node)
                if places[node] >= 0:
                    state.written[node] = places[node]

    def _keep_path(self, row: int, state: Row, committed: Sequence[int]) -> int:
        """Commit the accepted nodes that the last proposal computed; return the number of `committed` in the cache."""
        node = 0
        path: list[int] = []
        for token in committed[1:]:
            node = state.children.get(node, {}).get(token, -1)
            if node not in state.written:
                break
            path.append(state.written[node])
        if path and path != list(range(len(path))):
            self.cache.commit(self._ints(self._own([row])), self._ints([state.length]), self._ints([path]))
        state.length += len(path)
        state.children, state.written = {}, {}
        return min(len(committed), 1 + len(path))  # `propose` has read the pending token


class CapturedGrowing(Proposer):
    """Proposer that grows trees inside a captured step and recomputes the slots of guesses from the accepted tokens.

    Every step first reads the tokens that the previous step emitted, padded to the maximum, since their number is known
    only on the device. For chains without taps, all but the last two are in the cache already.
    """

    def __init__(self, drafter: GrowingDrafter) -> None:
        self._drafter, self._guesser = drafter, drafter.guesser
        self.depth, self.branches, self.taps = drafter.max_draft_len, drafter.branches, drafter.taps
        self.chain = self.branches == 1
        candidates = self.branches * (1 + self.branches * (self.depth - 1))
        self.nodes = 1 + (self.depth if self.chain else min(drafter.nodes_of(self.depth), candidates))
        self.slots = 1 + max(self.depth, drafter.nodes)
        self._width = 2 if self.chain and not self.taps else self.depth + 1

    def enter(self, row: int) -> Tensor | None:
        return self._drafter.settle(row)

    def committed(self, row: int, start: int, tokens: Sequence[int]) -> None:
        self._drafter.resume(row, start, tokens)

    def outgrown(self, row: int) -> bool:
        return not self._drafter.fits(row)

    def leave(self, row: int, features: Tensor) -> None:
        if self.taps:
            self._drafter.give(row, features)

    def guess(self, graph_slots: GraphSlots, sampling: Sampling, keys: int) -> Draft:
        guesser, newest = self._guesser, graph_slots.latest(self._width)
        hidden = guesser.fuse(newest.features.flatten(0, 1)) if self.taps else None
        rows, skipped = self._drafter.places[:, graph_slots.rows]
        after = graph_slots.lengths - skipped + (1 - guesser.lag)  # slots in use once the pending token is read
        place = Place(rows, (), after - newest.counts, keys - self.slots, skipped)
        ancestor_mask = chain_mask(graph_slots.batch, self._width, after.device)
        output = guesser.run(newest.tokens, hidden, place.span(ancestor_mask, self._width))
        last = (newest.counts - 1).view(-1, 1, 1).expand(-1, 1, output.shape[2])
        output = output.gather(1, last).squeeze(1)
        tree, place = self._tree(graph_slots), place._replace(starts=after, longest=place.longest + 1)
        return grow(guesser, place, output, tree, self.depth, sampling).draft

    def _tree(self, graph_slots: GraphSlots) -> Chain | Tree:
        limits = graph_slots.longest
        if self.chain:
            return Chain(graph_slots.pending, limits)
        share = (self._drafter.budget * limits + (self.depth - 1)) // self.depth
        return Tree(graph_slots.pending, limits, self.branches, torch.maximum(limits, share), self.nodes - 1)
