"""Growing chains and trees with a model over a cache: written once, for draft models and heads, host and device.

A `Guesser` is such a model. It reads committed tokens, and then its own guesses level by level. A chain is the tree of
one branch. Three back ends grow it: the compiled kernels in one call (`Guesser.guess`), torch driven by the host
(`GrowingDrafter`), and a captured step (`drafters.device`).
Legend: B rows, F nodes of a level, N tokens of a row, H hidden size, V vocabulary, W width of the taps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter
from sametoken.drafters.tree import Chain, Grown, Tree, chain_of
from sametoken.model.compiled import Certain
from sametoken.runtime.cache import KVCache, Span
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import PADDING, Draft, chain_reach
from sametoken.speculation.sampling import Sampling, rank

FEED_ROWS = 512  # most slots that one forward reads
LONG_BACKLOG = 16  # beyond this a backlog is read first, or the other rows' next feed would be padded to its width
MOST_KEPT = 512  # features that a row keeps while nobody asks for guesses; beyond, they are read


class Guesser(Protocol):
    """A model that guesses one token after another.

    Attributes:
        cache: its keys and values, in the pages of the target's rows.
        lag: the slot at index i reads the token at position i + lag: 0 for a decoder, 1 for a head, whose slot reads
            the feature of position i and the token after it.
        ids: [outputs] the target's token of each output; None where the outputs are the target's vocabulary.
        vocabulary: V of the target.
    """

    cache: KVCache
    lag: int
    ids: Tensor | None
    vocabulary: int

    def guess(self, read: Certain, levels: int, sampling: Sampling) -> Tensor | None:
        """Reads and grows whole chains [B, 1 + levels] in one call of the compiled kernels; None where they cannot."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """[R, H] what slots of committed tokens read beside them, from features [R, W]; not asked without taps."""
        ...

    def recycle(self, output: Tensor) -> Tensor | None:
        """[R, H] what slots of guesses read in place of a feature, from outputs [R, H]; None for nothing."""
        ...

    def run(self, tokens: Tensor, hidden: Tensor | None, span: Span) -> Tensor:
        """Outputs [B, N, H] of slots that read tokens [B, N] and hidden states [B * N, H]."""
        ...

    def scores(self, output: Tensor) -> Tensor:
        """[R, outputs] after outputs [R, H]."""
        ...


class Place(NamedTuple):
    """Where rows stand in the cache of a guesser.

    Attributes:
        rows: [B] rows of the page table; `host_rows` the same as Python ints, () where the host must not know.
        starts: [B] slots that each row has there; `longest` bounds them.
    """

    rows: Tensor
    host_rows: Sequence[int]
    starts: Tensor
    longest: int

    def span(self, reach: Tensor, nodes: int) -> Span:
        """The last `nodes` nodes of the trees `reach` [B, M, M] past the rows' slots."""
        return Span(self.rows, self.host_rows, self.starts, reach, nodes, self.longest + reach.shape[1])


def grow(guesser: Guesser, place: Place, output: Tensor, tree: Chain | Tree, levels: int, sampling: Sampling) -> Grown:
    """Grows a tree to `levels` levels; a forward for each level but the first.

    Args:
        place: after the slots of the pending tokens.
        output: [B, H] of those slots.
    """
    output, pending = output.unsqueeze(1), place.starts + (guesser.lag - 1)
    for level in range(levels):
        if level > 0:
            tokens, reach = tree.enter_frontier()
            hidden = guesser.recycle(tree.above(output).flatten(0, 1))
            output = guesser.run(tokens, hidden, place.span(reach, tokens.shape[1]))
        tree.grow(*_guesses(guesser, output, pending + level, sampling, tree.branches))
    return tree.grown()


def _guesses(
    guesser: Guesser, output: Tensor, position: Tensor, sampling: Sampling, count: int
) -> tuple[Tensor, Tensor]:
    """[B, F, count] tokens and scores of the best guesses after outputs [B, F, H] of tokens at `position` [B].

    A single guess is the model's own draw under the target's rule; nobody asks what it scores.
    """
    logits, ids = guesser.scores(output.flatten(0, 1)), guesser.ids
    if ids is not None and not sampling.greedy:  # bans, penalties and noise are about the target's tokens
        wide = logits.new_full((logits.shape[0], guesser.vocabulary), float("-inf"))
        logits, ids = wide.index_copy_(1, ids, logits), None
    logits = logits.view(*output.shape[:2], -1)
    if count == 1:
        root = torch.zeros_like(position).unsqueeze(1)
        tokens = draw(logits, Draft(root, root - 1), (root == 0).unsqueeze(2), position, sampling).unsqueeze(2)
        scores = tokens
    else:
        tokens, scores = rank(logits, position + 1, sampling, count)
    return tokens if ids is None else torch.where(tokens < 0, PADDING, ids[tokens.clamp(min=0)]), scores


@dataclass(slots=True)
class Row:
    """One sequence.

    Attributes:
        length: slots in the cache.
        tokens: committed tokens from position `length` on; `features` [count, W] are theirs, if the guesser reads any.
        children: of the last proposal, the child nodes of every node by token.
        written: of the last proposal, where a node's keys and values lie past `length`.
    """

    length: int = 0
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    children: dict[int, dict[int, int]] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)

    def take(self, count: int, lag: int, pending: Sequence[int] = ()) -> tuple[list[int], Tensor | None]:
        """The next slots: the tokens that they read, and features [count, W]."""
        read = [*self.tokens[lag : count + lag], *pending]
        features = None
        if self.features:
            whole = self.features[0] if len(self.features) == 1 else torch.cat(self.features)
            features, left = whole[:count], whole[count:]
            self.features = [left] if len(left) else []
        del self.tokens[:count]
        return read, features


Slots = Sequence[tuple[list[int], Tensor | None]]  # of each row the tokens that its next slots read, and features


class GrowingDrafter(Drafter):
    """Guesses with a model over a cache that shares the target's page table.

    Args:
        guesser: the model.
        max_draft_len: depth of a tree, at most `budget`.
        branches: candidates that each level keeps and expands; 1 is a chain.
        budget: draft tokens a proposal keeps of all candidates, best cumulative score first; None is one path.
    """

    runs_model = True

    def __init__(self, guesser: Guesser, max_draft_len: int, branches: int, budget: int | None) -> None:
        self.guesser, self.cache = guesser, guesser.cache
        self.budget, self.branches = budget if budget is not None else max_draft_len, branches
        self.max_draft_len = min(max_draft_len, self.budget)  # a path has no more nodes than its draft
        # The cache must hold what is proposed and, past the committed length, what is run to propose it.
        self.nodes = self.slots(self.max_draft_len)
        self._rows: dict[int, Row] = {}
        self._device = guesser.cache.keys.device

    def admit(self, row: int, cached: Sequence[int], held: int = 0) -> None:
        assert not self.taps or held == len(cached), "features of reused tokens are gone, so their slots must be there"
        self._rows[row] = Row(held, list(cached[held:]))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def held(self, row: int) -> int:
        return self._rows[row].length

    def slots(self, limit: int) -> int:
        return max(self._kept(limit), self.branches * (min(limit, self.max_draft_len) - 1))

    def _kept(self, limit: int) -> int:
        """Draft tokens of a proposal: their share of the budget, but at least a whole path."""
        limit = min(limit, self.max_draft_len)
        return max(limit, -(-self.budget * limit // self.max_draft_len))

    def _ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    # What the rows read.

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        parts: Sequence[Tensor | None] = [None] * len(rows)
        if features is not None:
            parts = torch.split(features, [len(each) for each in tokens])
        for row, committed, part in zip(rows, tokens, parts, strict=True):
            state = self._rows[row]
            kept = self._keep_path(row, state, committed) if state.children else 0
            if committed[kept:]:
                state.tokens.extend(committed[kept:])
                if part is not None:
                    state.features.append(part)
        if features is not None:
            self._read([row for row in rows if len(self._rows[row].tokens) > MOST_KEPT])

    def catch_up(self, rows: Sequence[int]) -> None:
        self._read(rows)

    def settle(self, row: int) -> None:
        """Reads all committed tokens that can be read: a head needs the token after each."""
        state = self._rows[row]
        while (count := len(state.tokens) - self.guesser.lag) > 0:
            self._feed([row], [state.take(min(count, FEED_ROWS), self.guesser.lag)])

    def resume(self, row: int, committed: Sequence[int]) -> None:
        """All of `committed` is in the cache, the last token perhaps not: a captured step put it there."""
        self._rows[row] = Row(len(committed) - 1, list(committed[-1:]))

    def _read(self, rows: Sequence[int]) -> None:
        """Reads long backlogs, together and so that nobody is padded."""
        lag = self.guesser.lag
        while long := [row for row in rows if len(self._rows[row].tokens) > LONG_BACKLOG]:
            states = [self._rows[row] for row in long]
            width = max(1, min(FEED_ROWS // len(long), *(len(state.tokens) - lag for state in states)))
            self._feed(long, [state.take(width, lag) for state in states])

    def _feed(self, rows: Sequence[int], slots: Slots) -> Tensor:
        """Computes slots of committed tokens into the cache; [B, H] output of each row's last one."""
        widths = [len(tokens) for tokens, _ in slots]
        width, ends = max(widths), self._ints(widths)
        # Shorter rows repeat their last slot past their end, where nothing is kept.
        tokens = self._ints([[*each, *each[-1:] * (width - len(each))] for each, _ in slots])
        features, hidden = _joined(slots), None
        if features is not None:
            hidden = self.guesser.fuse(features)
            if min(widths) < width:
                place = torch.arange(width, device=self._device).minimum(ends.unsqueeze(1) - 1)
                hidden = hidden[(place + (ends.cumsum(0) - ends).unsqueeze(1)).flatten()]
        span = self._place(rows).span(chain_reach(len(rows), width, self._device), width)
        output = self.guesser.run(tokens, hidden, span)
        for row, count in zip(rows, widths, strict=True):
            self._rows[row].length += count
        return output[torch.arange(len(rows), device=self._device), ends - 1]

    def _place(self, rows: Sequence[int]) -> Place:
        lengths = [self._rows[row].length for row in rows]
        return Place(self._ints(rows), rows, self._ints(lengths), max(lengths))

    # What is proposed.

    def propose(self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling) -> Draft:
        self._read(rows)
        states = [self._rows[row] for row in rows]
        assert not self.taps or all(state.tokens for state in states), "a slot needs a feature that was not used yet"
        lag = self.guesser.lag
        slots = [state.take(len(state.tokens), lag, [token]) for state, token in zip(states, pending, strict=True)]
        limits = [min(limit, self.max_draft_len) for limit in limits]
        grown = self._compiled(rows, slots, limits, sampling) if self.branches == 1 else None
        if grown is None:
            output, place = self._feed(rows, slots), self._place(rows)
            grown = grow(self.guesser, place, output, self._tree(pending, limits), max(limits), sampling)
        if self.branches > 1:
            grown = grown.trimmed()
        if not self.taps:
            self._remember(states, grown)
        return grown.draft

    def _tree(self, pending: Sequence[int], limits: Sequence[int]) -> Chain | Tree:
        if self.branches == 1:
            return Chain(self._ints(pending), self._cut(limits))
        budgets = [self._kept(limit) for limit in limits]
        return Tree(self._ints(pending), self._ints(limits), self.branches, self._ints(budgets), max(budgets))

    def _cut(self, limits: Sequence[int]) -> Tensor | None:
        """[B] where the rows' chains end; None where they end together."""
        return self._ints(limits) if min(limits) < max(limits) else None

    def _compiled(self, rows: Sequence[int], slots: Slots, limits: Sequence[int], sampling: Sampling) -> Grown | None:
        """Reads and grows chains in one call; None where the compiled kernels cannot."""
        states, tokens = [self._rows[row] for row in rows], [each for each, _ in slots]
        read = Certain(rows, [state.length for state in states], tokens, _joined(slots))
        drawn = self.guesser.guess(read, max(limits), sampling)
        if drawn is None:
            return None
        for state, each in zip(states, tokens, strict=True):
            state.length += len(each)
        return chain_of(drawn, self._cut(limits))

    # Guesses that came true.

    def _remember(self, states: Sequence[Row], grown: Grown) -> None:
        """Notes which proposed nodes are in the cache, to keep them if they are accepted.

        Only without taps: a slot that read the guesser's own output instead of a feature is computed again.
        """
        lists = (grown.draft.tokens.tolist(), grown.draft.parents.tolist(), grown.written.tolist())
        for state, tokens, parents, written in zip(states, *lists, strict=True):
            state.children, state.written = {0: {}}, {}
            for node in range(1, len(tokens)):
                if tokens[node] != PADDING:
                    state.children.setdefault(parents[node], {}).setdefault(tokens[node], node)
                    if written[node] >= 0:
                        state.written[node] = written[node]

    def _keep_path(self, row: int, state: Row, committed: Sequence[int]) -> int:
        """Commits what the last proposal computed of the accepted path; how many of the tokens are in the cache now."""
        node = 0
        path: list[int] = []
        for token in committed[1:]:
            node = state.children.get(node, {}).get(token, -1)
            if node not in state.written:
                break
            path.append(state.written[node])
        if path and path != list(range(len(path))):
            self.cache.commit(self._ints([row]), self._ints([state.length]), self._ints([path]))
        state.length += len(path)
        state.children, state.written = {}, {}
        return min(len(committed), 1 + len(path))  # `propose` has read the pending token


def _joined(slots: Slots) -> Tensor | None:
    """[R, W] features of all rows' slots."""
    parts = [features for _, features in slots if features is not None]
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
