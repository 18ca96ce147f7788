"""SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): trees of the tokens that followed the longest known suffix.

Works on token ids only; the work of a step does not depend on how long the row's context is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from torch import Tensor

from sametoken.control.worth import EndedChains, Worth
from sametoken.drafters.automaton import Follower, Match, SuffixAutomaton
from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import Guess
from sametoken.drafters.priced import PricedChain, RowPrice, priced_chain, trust
from sametoken.errors import ConfigError
from sametoken.options.speculation import SpeculativeConfig

BYTES_PER_TOKEN = 400  # of a stored output, about
MAX_CACHED_TOKENS = 2**18  # of all stored outputs, about 100 MB


class Bounds(NamedTuple):
    """Bounds of a tree: most nodes, most nodes on a path, least probability of a path."""

    nodes: int
    depth: int
    probability: float


def grow(automaton: SuffixAutomaton, match: Match, bounds: Bounds) -> tuple[Guess, float, list[list[float]]]:
    """Most probable nodes after `match`, their expected number of acceptances, and the shares [L][1] of first children.

    A node's probability is the product of the shares on its path, so a child never precedes its parent.
    """
    shares: list[list[float]] = []
    tokens: list[int] = []
    parents: list[int] = []
    depths = [0]
    score = 0.0
    serial = count()  # insertion order decides among equals
    frontier: list[tuple[float, int, int, Follower]] = []
    node, probability, tip = 0, 1.0, 0
    while len(tokens) < bounds.nodes:
        if depths[node] < bounds.depth:
            for follower in automaton.followers(match, bounds.probability / probability):
                heappush(frontier, (-probability * follower.share, next(serial), node, follower))
        if not frontier:
            break
        negated, _, parent, chosen = heappop(frontier)
        tokens.append(chosen.token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        if parent == tip:
            shares.append([trust(chosen, chosen.match.length - 1)])
            tip = len(tokens)
        node, probability, match = len(tokens), -negated, chosen.match
        score += probability
    return Guess(tokens, parents), score, shares


@dataclass
class _Generation:
    """Outputs of one owner that are dropped together."""

    index: SuffixAutomaton
    requests: int = 0
    tokens: int = 0


class OutputStore:
    """Outputs of earlier requests, per owner in two generations of half the limits; a third one replaces the first.

    An automaton cannot remove a single text, and rebuilding it would stall every row of the batch.

    Args:
        max_tree_depth: see `SuffixDrafter`.
        max_requests: outputs per owner.
        max_tokens: tokens per owner, and of all owners together.
    """

    def __init__(self, max_tree_depth: int, max_requests: int, max_tokens: int) -> None:
        self._max_tree_depth, self._most_requests, self._most_tokens = (
            max_tree_depth,
            max_requests // 2,
            max_tokens // 2,
        )
        self._owners: OrderedDict[str, list[_Generation]] = OrderedDict()  # in the order of last addition

    @property
    def tokens(self) -> int:
        """Number of stored tokens."""
        return sum(each.tokens for generations in self._owners.values() for each in generations)

    def of(self, owner: str) -> list[SuffixAutomaton]:
        """Suffix automata of an owner's outputs, one per generation, the older first."""
        return [each.index for each in self._owners.get(owner, ())]

    def add(self, owner: str, output: Sequence[int]) -> None:
        """Store `output`, or the last tokens of a very long one."""
        kept = output[-self._most_tokens :]
        if not kept or self._most_requests == 0:
            return
        generations = self._owners.setdefault(owner, [])
        self._owners.move_to_end(owner)
        young = generations[-1] if generations else None
        if young is None or young.requests == self._most_requests or young.tokens + len(kept) > self._most_tokens:
            young = _Generation(SuffixAutomaton(self._max_tree_depth))
            generations.append(young)
            del generations[:-2]
        young.index.begin()
        for token in kept:
            young.index.extend(token)
        young.requests += 1
        young.tokens += len(kept)
        while self.tokens > 2 * self._most_tokens:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop the first generation of the owner whose last output is the oldest."""
        owner, generations = next(iter(self._owners.items()))
        del generations[0]
        if not generations:
            del self._owners[owner]


@dataclass
class _IndexedRow:
    """State of one sequence: index of its whole text, last tokens, and output once it has begun."""

    local: SuffixAutomaton
    recent: deque[int]
    owner: str
    output: list[int] | None = None


class SuffixDrafter(Drafter):
    """Drafter of trees from the row's own text or earlier outputs of its owner, by the higher expected acceptance.

    Only outputs are stored across rows: prompts are longer, and a model seldom repeats the prompts of other requests.
    A row's output begins with its first `propose`.

    Args:
        budget: most draft tokens of a proposal.
        max_draft_len: path length that takes the whole budget, a shorter one a proportional part; None for any length.
        max_tree_depth: tokens of the longest counted string: a context and the token after it.
        max_cached_requests: stored outputs per owner, 0 for none; beyond it (or 2**18 tokens) the older half is
            dropped. Outputs serve requests of the same owner only.
        max_spec_factor: draft tokens per matched token, so that longer matches give longer drafts.
        min_token_prob: estimated path probability below which a node is dropped.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        *,
        budget: int,
        max_draft_len: int | None = None,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        remembers = max_cached_requests == 0 or max_cached_requests >= 2
        _require(budget >= 0, "budget", budget, "0 or more; 8 to 16 suits most texts")
        _require(max_tree_depth >= 2, "max_tree_depth", max_tree_depth, "2 or more; the default is 24")
        _require(remembers, "max_cached_requests", max_cached_requests, "0 for none, or 2 or more")
        _require(max_spec_factor > 0, "max_spec_factor", max_spec_factor, "more than 0; the default is 1.0")
        _require(0 <= min_token_prob <= 1, "min_token_prob", min_token_prob, "0 to 1; the default is 0.1")
        self.nodes = budget
        self._max_draft_len = max_draft_len or 1
        self._max_tree_depth = max_tree_depth
        self._max_spec_factor = max_spec_factor
        self._min_token_prob = min_token_prob
        self.store = OutputStore(max_tree_depth, max_cached_requests, MAX_CACHED_TOKENS)
        self._rows: dict[int, _IndexedRow] = {}

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        recent = deque[int](maxlen=self._max_tree_depth - 2)
        self._rows[row] = _IndexedRow(SuffixAutomaton(self._max_tree_depth), recent, origin.owner)
        self._extend(row, cached)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        for row, committed in zip(rows, tokens, strict=True):
            self._extend(row, committed)

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: object,
        worth: Worth | None = None,
    ) -> Proposed:  # fmt: skip
        """Draft trees of at most `nodes` draft tokens, `limits[i]` on a path; with `worth`, only guesses that pay.

        `sampling` is ignored: frequencies are no logits to rank under its noise.
        """
        if worth is None:
            found = [self._tree(*each) for each in zip(rows, pending, limits, strict=True)]
            return Proposed([guess for guess, _ in found], [shares for _, shares in found])
        made = [
            self._priced(row, token, limit, RowPrice.of(worth, i))
            for i, (row, token, limit) in enumerate(zip(rows, pending, limits, strict=True))
        ]
        ended = EndedChains(
            [max(1, len(each.kept)) for each in made], [each.kept for each in made], [each.candidates for each in made]
        )
        return Proposed([each.guess for each in made], [each.shares for each in made], ended)

    def release(self, row: int) -> None:
        """Drop the state of `row` and store its output; for a preempted row, the part written so far."""
        state = self._rows.pop(row, None)
        if state is not None and state.output is not None:
            self.store.add(state.owner, state.output)

    @property
    def remembered(self) -> int:
        return BYTES_PER_TOKEN * self.store.tokens

    def slots(self, limit: int) -> int:
        return min(self.nodes, -(-self.nodes * limit // self._max_draft_len))

    def _extend(self, row: int, tokens: Sequence[int]) -> None:
        state = self._rows[row]
        for token in tokens:
            state.local.extend(token)
        state.recent.extend(tokens)
        if state.output is not None:
            state.output.extend(tokens)

    def _matches(self, row: int, pending: int) -> list[tuple[SuffixAutomaton, Match]]:
        """Longest suffix of the row's text and pending token that occurs in each of the indexes open to the row."""
        state = self._rows[row]
        if state.output is None:
            state.output = []
        matches = [(state.local, state.local.advance(state.local.cursor, pending))]
        # Matching the last tokens again costs less than updating a cursor per automaton throughout the prompt.
        return matches + [(past, past.match((*state.recent, pending))) for past in self.store.of(state.owner)]

    def _tree(self, row: int, pending: int, limit: int) -> tuple[Guess, list[list[float]]]:
        """Tree with the most expected acceptances, and the shares on its path of first children, see `priced.trust`."""
        grown = [
            (*grow(known, match, self._bounds(match, limit)), match) for known, match in self._matches(row, pending)
        ]
        guess, _, shares, _ = max(grown, key=lambda each: each[1])
        return guess, shares

    def _priced(self, row: int, pending: int, limit: int, price: RowPrice) -> PricedChain:
        most = min(self.slots(limit), limit)
        made = [priced_chain(known, match, most, price) for known, match in self._matches(row, pending)]
        return max(made, key=lambda each: (each.value, sum(map(sum, each.shares))))

    def _bounds(self, match: Match, limit: int) -> Bounds:
        trusted = int(self._max_spec_factor * match.length + 1e-6)  # 0.29 * 100 is 28.99...
        return Bounds(min(self.slots(limit), trusted), limit, self._min_token_prob)


def _require(holds: bool, name: str, value: float, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value}: expected {expected}")


def build(config: SpeculativeConfig) -> Drafter:
    """Build the drafter from these settings."""
    return SuffixDrafter(
        budget=config.budget,
        max_draft_len=config.longest,
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )
