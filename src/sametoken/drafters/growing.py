"""Growth of chains and trees with a draft model or head and its KV cache, on host and device.

A `Guesser` is a model that reads committed tokens and then its own guesses level by level. A chain is a tree of one
branch. `drafters.rows` calls `grow` on the host or in a captured step; the compiled kernels do it all in one call.
Legend: B rows, F nodes of a level, N tokens of a row, H hidden size, V vocabulary, W width of the taps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.control.worth import Worth
from sametoken.drafters.tree import Chain, Grown, Tree
from sametoken.model.compiled_guesses import Committed, Guesses, TreeBounds
from sametoken.runtime.cache import KVCache, Span
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import PADDING, Draft
from sametoken.speculation.sampling import Sampling, rank


class Guesser(Protocol):
    """Protocol of a model that drafts autoregressively.

    Attributes:
        cache: KV cache of the model, in the pages of the target's rows.
        lag: the slot at index i reads the token at position i + lag: 0 for a decoder, 1 for a head, whose slot reads
            the feature of position i and the token after it.
        ids: [outputs] the target's token of each output; None where the outputs are the target's vocabulary.
        vocabulary: V, size of the target's vocabulary.
    """

    cache: KVCache
    lag: int
    ids: Tensor | None
    vocabulary: int

    def guess(self, read: Committed, limits: Sequence[int], sampling: Sampling, worth: Worth | None) -> Guesses | None:
        """Read tokens and grow chains in one call of the compiled kernels (`Compiled.guess`); None if unsupported."""
        ...

    def branch(self, read: Committed, bounds: TreeBounds, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor] | None:
        """Read tokens and grow trees in one call of the compiled kernels; return tokens, parents, places [B, N]."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden input [R, H] of slots of committed tokens, from features [R, W]; not called without taps."""
        ...

    def recycle(self, output: Tensor) -> Tensor | None:
        """Hidden input [R, H] of slots of guesses from the previous outputs [R, H]; None if slots read tokens alone."""
        ...

    def run(self, tokens: Tensor, hidden: Tensor | None, span: Span) -> Tensor:
        """Outputs [B, N, H] of slots with input tokens [B, N] and hidden states [B * N, H]."""
        ...

    def scores(self, output: Tensor) -> Tensor:
        """Logits [R, outputs] after outputs [R, H]."""
        ...


class Place(NamedTuple):
    """Position of each row in the cache of a guesser.

    Attributes:
        rows: [B] rows of the page table.
        host_rows: `rows` as Python ints, () if the host must not read them.
        starts: [B] slots of each row that are in use.
        longest: upper bound of `starts`.
        skipped: [B] tokens of each row's text that are not in the cache, see `drafters.reading`.
    """

    rows: Tensor
    host_rows: Sequence[int]
    starts: Tensor
    longest: int
    skipped: Tensor | int = 0

    def span(self, ancestor_mask: Tensor, nodes: int) -> Span:
        """Span of the last `nodes` nodes of the trees `ancestor_mask` [B, M, M] past the rows' slots."""
        return Span(self.rows, self.host_rows, self.starts, ancestor_mask, nodes, self.longest + ancestor_mask.shape[1])


def grow(guesser: Guesser, place: Place, output: Tensor, tree: Chain | Tree, levels: int, sampling: Sampling) -> Grown:
    """Grow a tree to `levels` levels, with one forward for each level but the first.

    Args:
        place: position after the slots of the pending tokens.
        output: [B, H] of those slots.
    """
    output, pending = output.unsqueeze(1), place.starts + place.skipped + (guesser.lag - 1)
    for level in range(levels):
        if level > 0:
            tokens, ancestor_mask = tree.enter_frontier()
            hidden = guesser.recycle(tree.above(output).flatten(0, 1))
            output = guesser.run(tokens, hidden, place.span(ancestor_mask, tokens.shape[1]))
        tree.grow(*_guesses(guesser, output, pending + level, sampling, tree.branches))
    return tree.grown()


def _guesses(
    guesser: Guesser, output: Tensor, position: Tensor, sampling: Sampling, count: int
) -> tuple[Tensor, Tensor]:
    """Tokens and scores [B, F, count] of the best guesses, from outputs [B, F, H] of tokens at `position` [B].

    A single guess is the model's own draw under the target's sampling; its score is not used.
    """
    logits, ids = guesser.scores(output.flatten(0, 1)), guesser.ids
    if ids is not None and not sampling.greedy:  # bans, penalties and noise apply to the target's token ids
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
