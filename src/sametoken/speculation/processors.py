"""Logits processors: from a model's logits to the processed distribution of a node, computed on that node's own path.

Editors (bias, bans, penalties) change scores in place; truncation (min-p, top-k, top-p) keeps a prefix of the tokens in
the order of (gap, id). Sums of probabilities are taken in integers, so they do not depend on order, batch or kernel.
Shapes: B rows, N nodes, V tokens; `scores` [B, N, V] are float32 logits. A single node's tokens and positions
broadcast over N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ANY = -2  # matches every token in `BadWords.prefixes`; -1 is padding and matches none
_UNIT = 2.0**40  # integer mass of the best token; 2**22 tokens of it still fit 63 bits
_WHOLE = 2**63 - 1


class Bias(NamedTuple):
    """Logit biases of M (row, token) pairs, each of which occurs once. All fields [M]."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


class EndBan(NamedTuple):
    """Bans of M (row, end token) pairs at positions below `until`; each pair occurs once. All fields [M]."""

    rows: Tensor
    tokens: Tensor
    until: Tensor


class BadWords(NamedTuple):
    """W banned token sequences ("bad words").

    Attributes:
        rows: [W] int64.
        tokens: [W] int64, the last token of each sequence.
        prefixes: [W, L] int64, the tokens before it, newest first, filled up with `ANY`.
        history: [B, L] int64, the newest tokens of each row, newest first, node 0 included, filled up with -1.
    """

    rows: Tensor
    tokens: Tensor
    prefixes: Tensor
    history: Tensor


class Penalties(NamedTuple):
    """P rows with penalties.

    Attributes:
        rows: [P] int64.
        factors: [3, P, 1, 1] float32: repetition, presence, frequency.
        prompt: [P, V] bool, tokens that the prompt contains.
        counts: [P, V] float32, occurrences of each token in the output, node 0 included.
    """

    rows: Tensor
    factors: Tensor
    prompt: Tensor
    counts: Tensor


class Truncation(NamedTuple):
    """Rules for the tokens that are kept; each field broadcasts over [B, N, V], None if no row has such a rule.

    Attributes:
        max_cost: [B, 1, 1] float32, -log(min_p); infinite for rows without.
        top_k: [B, 1, 1] int64; V or more for rows without.
        top_p: [B, 1, 1] float64; 1 for rows without.
    """

    max_cost: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None


def add_bias(scores: Tensor, bias: Bias) -> None:
    """Add logit biases in place."""
    scores[bias.rows, :, bias.tokens] += bias.values.unsqueeze(1)


def ban_end_tokens(scores: Tensor, position: Tensor, ban: EndBan) -> None:
    """Ban end tokens in place; `position` [B, N] is the position of the token drawn after each node."""
    early = position[ban.rows] < ban.until.unsqueeze(1)
    scores[ban.rows, :, ban.tokens] = scores[ban.rows, :, ban.tokens].masked_fill(early, -torch.inf)


def ban_words(scores: Tensor, tokens: Tensor, parents: Tensor, words: BadWords) -> None:
    """Ban in place each token that would complete a bad word after a node of `tokens` [B, N]."""
    recent = _recent(tokens, parents, words.history)[words.rows]
    wanted = words.prefixes.unsqueeze(1)
    complete = ((recent == wanted) | (wanted == ANY)).all(-1)
    ban = torch.zeros(complete.shape, device=scores.device).masked_fill_(complete, -torch.inf)
    at = (words.rows.unsqueeze(1), torch.arange(scores.shape[1], device=scores.device), words.tokens.unsqueeze(1))
    # Two words of a row may share their last token; accumulating lets either of them ban it.
    scores.index_put_(at, ban, accumulate=True)


def _recent(tokens: Tensor, parents: Tensor, history: Tensor) -> Tensor:
    """Last L tokens [B, N, L] of the path of each node, newest first.

    The history and the nodes 1 .. N - 1 are concatenated, each with a pointer to its predecessor.
    """
    length, nodes = history.shape[1], tokens.shape[1]
    line = torch.cat((history, tokens[:, 1:]), dim=1)
    index = torch.arange(length + nodes - 1, device=tokens.device)
    older = (index[:length] + 1).clamp(max=length - 1).expand(history.shape)
    before = torch.where(parents[:, 1:] > 0, parents[:, 1:] + (length - 1), 0)
    older = torch.cat((older, before), dim=1)
    at = torch.cat((index.new_zeros(1), index[length:])).expand(tokens.shape)
    recent = tokens.new_empty(*tokens.shape, length)
    for back in range(length):
        recent[:, :, back] = line.gather(1, at)
        at = older.gather(1, at)
    return recent


def penalise(scores: Tensor, tokens: Tensor, ancestor_mask: Tensor, penalties: Penalties) -> None:
    """Apply repetition, frequency and presence penalties in place, counting tokens on each node's own path."""
    repetition, presence, frequency = penalties.factors
    own, guessed = scores[penalties.rows], tokens[penalties.rows]
    vocabulary = own.shape[-1]
    # Node 0 is counted in the history already; padding and tokens outside the target's vocabulary are on no path.
    known = (guessed >= 0) & (guessed < vocabulary)
    known[:, 0] = False
    on_path = (ancestor_mask[penalties.rows] & known.unsqueeze(1)).to(torch.float32)
    index = guessed.clamp(0, vocabulary - 1).unsqueeze(1).expand_as(on_path)
    counts = penalties.counts.unsqueeze(1).repeat(1, guessed.shape[1], 1).scatter_add_(2, index, on_path)
    emitted = counts > 0
    repeated = penalties.prompt.unsqueeze(1) | emitted
    own = torch.where(repeated, torch.where(own > 0, own / repetition, own * repetition), own)
    scores[penalties.rows] = own.sub_(frequency * counts).sub_(presence * emitted)


def remember_words(words: BadWords, tokens: Tensor, count: Tensor) -> None:
    """Append the first `count` [B] of the emitted `tokens` [B, N] to the history in `words`, in place."""
    length = words.history.shape[1]
    line = torch.cat((words.history.flip(1), tokens), dim=1)
    newest = length - 1 + count.unsqueeze(1)
    words.history.copy_(line.gather(1, newest - torch.arange(length, device=tokens.device)))


def remember_counts(penalties: Penalties, tokens: Tensor, count: Tensor) -> None:
    """Add the first `count` [B] of the emitted `tokens` [B, N] to `penalties.counts`, in place."""
    said, taken = tokens[penalties.rows], count[penalties.rows].unsqueeze(1)
    emitted = torch.arange(tokens.shape[1], device=tokens.device) < taken
    index = said.clamp(0, penalties.counts.shape[1] - 1)
    penalties.counts.scatter_add_(1, index, emitted.to(penalties.counts.dtype))


def gaps(scores: Tensor) -> Tensor:
    """Distance of each score below the best of its row: >= 0, never -0, infinite for banned tokens."""
    best = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    return (best - scores).abs_()


def smallest(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest of non-negative float32 `values` [..., K] in the order of (value, id), with their ids.

    Bits of non-negative floats are ordered like the floats, so a value and its id make one sortable integer:
    ties are decided by id, not by the kernel.
    """
    keys = (values.view(torch.int32).to(torch.int64) << 32) | ids
    keys = keys.topk(count, dim=-1, largest=False, sorted=True).values
    return (keys >> 32).to(torch.int32).view(torch.float32), keys & 0xFFFFFFFF


def mass(cost: Tensor) -> Tensor:
    """Masses in int64 proportional to exp(-cost), 2**40 at cost 0."""
    return torch.exp(-cost).mul_(_UNIT).to(torch.int64)


def log_mass(masses: Tensor) -> Tensor:
    """Logarithm [..., 1] float32 of the sum of exp(-cost), from `mass`."""
    return (masses.sum(-1, keepdim=True).to(torch.float64) / _UNIT).log_().to(torch.float32)


def truncate(gap: Tensor, cost: Tensor, rules: Truncation, *, ordered: bool) -> Tensor:
    """Copy of `cost` with infinity for each token that min-p, then top-k, then top-p remove.

    Args:
        gap: [B, N, K] from `gaps`; decides the order, equal gaps by position in the last dimension.
        cost: [B, N, K] gap over temperature: negative log-probability up to a constant.
        rules: the tokens to keep.
        ordered: the last dimension is sorted by (gap, id) already; otherwise it is in the order of ids.
    """
    # Each rule drops the tokens after a prefix; dropped tokens cost infinity, so they have no mass in the next rule.
    if rules.max_cost is not None:
        cost = cost.masked_fill(cost > rules.max_cost, torch.inf)
    if rules.top_k is not None:
        ones = torch.ones_like(cost, dtype=torch.int64)
        cost = cost.masked_fill(beyond(gap, ones, rules.top_k, ordered=ordered), torch.inf)
    if rules.top_p is not None:
        masses = mass(cost)
        wanted = (masses.sum(-1, keepdim=True).to(torch.float64) * rules.top_p).ceil().to(torch.int64)
        # A row without top-p must not lose its last tokens to the rounding of its total.
        wanted = wanted.clamp_(min=1).masked_fill(rules.top_p >= 1, _WHOLE)
        cost = cost.masked_fill(beyond(gap, masses, wanted, ordered=ordered), torch.inf)
    return cost


def beyond(gap: Tensor, weight: Tensor, wanted: Tensor, *, ordered: bool) -> Tensor:
    """Mask of the tokens before which, in the order of (gap, position), the weights sum to at least `wanted`.

    Args:
        gap: [..., K] float32, non-negative.
        weight: [..., K] int64, non-negative.
        wanted: [..., 1] int64, positive.
        ordered: true if K is sorted by gap.
    """
    if ordered:
        return weight.cumsum(-1) - weight >= wanted
    # Radix selection of the gap at which the weight is reached: 11 + 10 + 10 bits by integer histograms. It is exact,
    # and several times faster than sorting a vocabulary. The outer bins collect the gaps before and after the digit.
    wanted = wanted.expand_as(weight[..., :1]).contiguous()
    bits = gap.view(torch.int32)
    pivot = torch.zeros_like(bits[..., :1])
    reached = torch.zeros_like(weight[..., :1])
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        last = 1 << width
        digit = (bits - pivot).bitwise_right_shift_(shift).add_(1).clamp_(0, last + 1).to(torch.int64)
        bins = weight.new_zeros(*gap.shape[:-1], last + 2).scatter_add_(-1, digit, weight)
        through = bins.cumsum(-1)
        chosen = torch.searchsorted(through, wanted).clamp_(1, last)  # the first bin through which it is reached
        reached = through.gather(-1, chosen - 1)
        pivot += (chosen - 1).to(torch.int32) << shift
    tie = bits == pivot
    inside = weight * tie
    ahead = inside.cumsum(-1).sub_(inside)
    return (bits > pivot) | (tie & (ahead >= wanted - reached))
