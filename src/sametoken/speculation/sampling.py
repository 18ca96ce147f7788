"""The target's draw after every node, and the ranking of a drafter's proposals under equal noise.

The draw is `argmax(p / E)`: p is the processed distribution on the node's own path, E the noise of its position. The
draws of a row do not depend on the other rows of the batch. No function of this module synchronises with the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.speculation import shaping
from sametoken.speculation.draft import PADDING, Draft, depth
from sametoken.speculation.noise import noise
from sametoken.speculation.processors import (
    add_bias,
    ban_end_tokens,
    ban_words,
    gaps,
    log_mass,
    mass,
    penalise,
    smallest,
    truncate,
)
from sametoken.speculation.rows import RowSampling, Sampling
from sametoken.speculation.shaping import shaped, within_sigma
from sametoken.speculation.structure import confine

__all__ = ["RowSampling", "Sampling", "TokenLogprobs", "confined_scores", "rank", "sample", "token_logprobs"]


class TokenLogprobs(NamedTuple):
    """The model's own log-probabilities, before any processor; R tokens.

    Attributes:
        chosen: [R] float32, of the given token.
        rank: [R] int64, 1 for the most probable; lower ids first among equals.
        top_values: [R, top] float32, descending.
        top_tokens: [R, top] int64.
    """

    chosen: Tensor
    rank: Tensor
    top_values: Tensor
    top_tokens: Tensor


def sample(logits: Tensor, draft: Draft, ancestor_mask: Tensor, position: Tensor, sampling: Sampling) -> Tensor:
    """Token that the target draws after every node.

    Args:
        logits: [B, N, V], any floating type.
        draft: the tree; draws after padding nodes are meaningless.
        ancestor_mask: [B, N, N] `ancestors(draft.parents)`.
        position: [B] int64, absolute position of node 0.
        sampling: sampling state of the same B rows, whose histories end with node 0.

    Returns:
        [B, N] int64; `PADDING` where no token can be drawn: the logits are not finite, or every token is banned.
    """
    if sampling.greedy:
        # max takes the first of equals, like every other path here; float32 because bfloat16 reductions are slow.
        best, token = logits.to(torch.float32).max(-1)
        return _padded_unless_finite(token, best)
    at = position.unsqueeze(1) + depth(ancestor_mask) + 1
    total, ids = _race(confined_scores(logits, draft, ancestor_mask, at, sampling), at, sampling, sampling.candidates)
    # NaN and infinite scores make every cost NaN or infinite.
    if sampling.candidates == 0:
        least, token = total.min(-1)
    else:
        least = total.amin(-1)
        token = ids.masked_fill(total > least.unsqueeze(-1), logits.shape[-1]).amin(-1)
    return _padded_unless_finite(token, least)


def _padded_unless_finite(token: Tensor, won: Tensor) -> Tensor:
    """Copy of `token` with `PADDING` where the winning value `won` is not finite."""
    return token.masked_fill_(won - won != 0, PADDING)  # inf - inf is NaN; cheaper than isfinite


def rank(logits: Tensor, position: Tensor, sampling: Sampling, k: int) -> tuple[Tensor, Tensor]:
    """Rank the k tokens that the target would most probably draw by the drafter's logits, under the target's own noise.

    Args:
        logits: [B, V] or [B, F, V] the drafter's logits after one or F nodes of each row, any floating type.
        position: [B] int64, absolute position of the tokens to be guessed.
        sampling: sampling state of the same B rows; penalties and bad words use the history, not the draft's path.
        k: number of tokens, at most V.

    Returns:
        tokens int64 and scores float32, shaped like logits with k for V, best first: log-softmax over the vocabulary
        of log p - log E, so that sums along a path rank the nodes of a tree. Greedy rows: log p. Where fewer than k
        tokens survive truncation and bans, padding with score -inf fills the remaining places.
    """
    rows = position.shape[0]
    at = position.unsqueeze(1)
    root = torch.zeros_like(at)
    frontier = logits.reshape(rows, -1, logits.shape[-1])
    scores = _edit(frontier, Draft(root, root - 1), root.unsqueeze(2) == 0, at, sampling)
    # A greedy row is normalised over its whole vocabulary, which the candidates alone cannot give.
    candidates = max(sampling.candidates, k) if sampling.candidates and sampling.noise_scale is None else 0
    total, ids = _race(scores, at.expand(scores.shape[:2]), sampling, candidates)
    total = gaps(-total)
    values, tokens = smallest(total, ids, k)
    found = (*logits.shape[:-1], k)
    none = ~(values < torch.inf)  # banned, or not a number
    scores = (-values - log_mass(mass(total))).masked_fill(none, -torch.inf)
    return tokens.masked_fill(none, PADDING).view(found), scores.view(found)


def token_logprobs(logits: Tensor, tokens: Tensor, top: int, listed: Tensor | None = None) -> TokenLogprobs:
    """Log-probabilities of `tokens` [R] and of the `top` best under `logits` [R, V].

    Args:
        listed: [K] ids of tokens to report instead of the best.
    """
    gap = gaps(logits.to(torch.float32))
    ids = torch.arange(gap.shape[-1], device=gap.device)
    total = log_mass(mass(gap))
    own = gap.gather(1, tokens.unsqueeze(1))
    ahead = (gap < own) | ((gap == own) & (ids < tokens.unsqueeze(1)))
    if listed is None:
        values, best = smallest(gap, ids, top)
    else:
        values, best = gap[:, listed], listed.expand(len(gap), -1)
    return TokenLogprobs((-own - total).squeeze(1), ahead.sum(-1) + 1, -values - total, best)


def confined_scores(logits: Tensor, draft: Draft, ancestor_mask: Tensor, at: Tensor, sampling: Sampling) -> Tensor:
    """Processed logits, restricted by the rows' grammars; not for drafters, which rank before their tree exists."""
    scores = _edit(logits, draft, ancestor_mask, at, sampling)
    if sampling.grammars is not None:
        scores = scores.clone()  # may be the logits themselves, from which log-probabilities are read
        confine(scores, draft.tokens, draft.parents, sampling.grammars)
    return scores


def _edit(logits: Tensor, draft: Draft, ancestor_mask: Tensor, at: Tensor, sampling: Sampling) -> Tensor:
    """Logits [B, N, V] float32 after bias, bans and penalties; `at` [B, N] is the position of each draw.

    A draft and positions of a single node apply to all N nodes.
    """
    scores = logits.to(torch.float32, copy=sampling.edited)
    if sampling.bias is not None:
        add_bias(scores, sampling.bias)
    if sampling.words is not None:
        ban_words(scores, draft.tokens, draft.parents, sampling.words)
    if sampling.end_ban is not None:
        ban_end_tokens(scores, at, sampling.end_ban)
    if sampling.penalties is not None:
        penalise(scores, draft.tokens, ancestor_mask, sampling.penalties)
    if sampling.histories is not None:
        shaping.edit(scores, draft, sampling.histories)
    return scores


def _race(scores: Tensor, at: Tensor, sampling: Sampling, candidates: int) -> tuple[Tensor, Tensor]:
    """Values log E - log p up to a constant, with their token ids; the token of the least value is drawn.

    With `candidates` = 0 both span the vocabulary; otherwise only that many best tokens, sorted, noise included: a
    token has equal numbers either way.
    """
    gap = gaps(scores)
    ids = torch.arange(gap.shape[-1], device=gap.device)
    if candidates:
        gap, ids = smallest(gap, ids, candidates)
    cost = gap if sampling.temperature is None else gap / sampling.temperature
    if sampling.shape is not None:
        cost = within_sigma(gap, cost, sampling.shape)
    if sampling.truncation is not None:
        cost = truncate(gap, cost, sampling.truncation, ordered=candidates > 0)
    if sampling.seed is None:
        return cost, ids
    if sampling.shape is not None:
        cost = shaped(cost, sampling.shape, at, sampling.seed)
    seeds = sampling.seed.unsqueeze(1).expand_as(at).reshape(-1)
    log_noise = noise(seeds, at.reshape(-1), ids.flatten(0, -2) if candidates else ids).log_().view_as(cost)
    if sampling.noise_scale is not None:
        log_noise *= sampling.noise_scale
    return log_noise.add_(cost), ids
