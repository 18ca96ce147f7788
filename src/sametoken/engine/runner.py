"""Tensors of one step: the plan laid out, the target run, its draws compared with the draft, the path committed.

Knows rows, lengths and tokens; nothing of requests, drafters or text. Legend: B sampled rows, N nodes, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.engine.plan import Plan, PromptPiece
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, Span
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import PADDING, Draft, ancestors, chain_mask, chain_parents
from sametoken.speculation.sampling import Sampling
from sametoken.speculation.verify import Verdict, verify


class Verified(NamedTuple):
    """What the target said of a step.

    Attributes:
        paths: for each sampled row (the decoding rows, then the pieces of prompts that were `last`) its accepted
            nodes, the root first.
        bonuses: the target's own draw after each path, `PADDING` where it can draw nothing.
        logits: [B, N, V] of the sampled rows; None without any.
        features: for each decoding row [nodes of its path, taps * H], then for each piece of a prompt [tokens,
            taps * H]: the hidden states of the taps. None without taps.
        prompt_hidden: [tokens, H] last hidden states of each piece of a prompt.
    """

    paths: list[list[int]]
    bonuses: list[int]
    logits: Tensor | None
    features: Sequence[Tensor] | None
    prompt_hidden: Sequence[Tensor]


class Runner:
    """Runs the target over its cache.

    Args:
        taps: blocks whose outputs are the features.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, taps: tuple[int, ...]) -> None:
        self.decoder, self.cache, self.taps = decoder, cache, taps
        self.device = decoder.embed.weight.device

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def forward(self, plan: Plan, draft: Draft, sampling: Sampling | None) -> Verified:
        """Forward, draw, verify and commit what a plan computes.

        Args:
            draft: [decoding rows, N], roots included.
            sampling: of the sampled rows in order, None where there are none.
        """
        decode, pieces, nodes = plan.decode, plan.prefill, draft.tokens.shape[1]
        draft = Draft(draft.tokens.to(self.device), draft.parents.to(self.device))
        ancestor_mask, host_rows = ancestors(draft.parents), [item.row for item in decode]
        starts, rows = self._ints([item.start for item in decode]), self._ints(host_rows)
        spans, tokens = [self._span(piece) for piece in pieces], [self._ints(piece.tokens) for piece in pieces]
        if decode:
            longest = max(item.start for item in decode) + nodes
            spans.insert(0, Span(rows, host_rows, starts, ancestor_mask, nodes, longest))
            tokens.insert(0, draft.tokens.flatten())
        hidden = self.decoder.run(torch.cat(tokens), self.cache, spans, self.taps)
        lengths = [len(piece.tokens) for piece in pieces]
        prompt_hidden = torch.split(hidden.last[len(decode) * nodes :], lengths) if pieces else ()
        features = torch.cat(hidden.taps, dim=1) if self.taps else None
        verdict, logits = None, None
        if sampling is not None:
            draft, ancestor_mask, starts, last = self._sampled(plan, draft, ancestor_mask, starts, hidden.last)
            logits = self.decoder.logits(last).view(starts.shape[0], nodes, -1)
            verdict = verify(draft, ancestor_mask, draw(logits, draft, ancestor_mask, starts, sampling))
            if decode:
                self._commit(rows, starts[: len(decode)], verdict.path[: len(decode)])
        paths = [] if verdict is None else _paths(verdict)
        bonuses = [] if verdict is None else verdict.bonus.tolist()
        if features is None:
            return Verified(paths, bonuses, logits, None, prompt_hidden)
        return Verified(paths, bonuses, logits, _rows(features, paths[: len(decode)], nodes, lengths), prompt_hidden)

    def _commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Moves what was accepted to the front, in the caches of all ranks."""
        self.cache.commit(rows, starts, path)
        if self.decoder.ranks is not None:
            self.decoder.ranks.commit(rows, starts, path)

    def _span(self, piece: PromptPiece) -> Span:
        width = len(piece.tokens)
        row, start = self._ints([piece.row]), self._ints([piece.start])
        return Span(row, [piece.row], start, chain_mask(1, width, self.device), width, piece.start + width)

    def _sampled(
        self, plan: Plan, draft: Draft, ancestor_mask: Tensor, starts: Tensor, last: Tensor
    ) -> tuple[Draft, Tensor, Tensor, Tensor]:
        """Draft, ancestors, root positions and hidden states [B * N, H] of the sampled rows.

        The last token of a prompt is the root of a tree of one node, padded to N.
        """
        nodes, end = draft.tokens.shape[1], draft.tokens.numel()
        last_places = []
        for piece in plan.prefill:
            end += len(piece.tokens)
            last_places.append((piece, end - 1))
        lasts = [(piece, place) for piece, place in last_places if piece.last]
        if not lasts:
            return draft, ancestor_mask, starts, last[: draft.tokens.numel()]
        at = self._ints([place for _, place in lasts]).unsqueeze(1).expand(-1, nodes).flatten()
        states = torch.cat([last[: draft.tokens.numel()], last[at]])
        ended = roots([piece.tokens[-1] for piece, _ in lasts], nodes)
        tokens = torch.cat([draft.tokens, ended.tokens.to(self.device)])
        draft = Draft(tokens, torch.cat([draft.parents, ended.parents.to(self.device)]))
        starts = torch.cat([starts, self._ints([piece.start + len(piece.tokens) - 1 for piece, _ in lasts])])
        return draft, ancestors(draft.parents), starts, states


def _paths(verdict: Verdict) -> list[list[int]]:
    found = zip(verdict.path.tolist(), verdict.length.tolist(), strict=True)
    return [path[: accepted + 1] for path, accepted in found]


def _rows(features: Tensor, paths: Sequence[Sequence[int]], nodes: int, lengths: Sequence[int]) -> list[Tensor]:
    """The features of every path and of every piece of a prompt, from those of all T tokens."""
    first = len(paths) * nodes
    at = [row * nodes + node for row, path in enumerate(paths) for node in path]
    taken = torch.split(features[at], [len(path) for path in paths]) if paths else ()
    return [*taken, *(torch.split(features[first:], list(lengths)) if lengths else ())]


def merge(pending: Sequence[int], drafts: Sequence[tuple[Sequence[int], Draft]]) -> Draft:
    """One rectangular draft of B rows from several drafters'; rows that nobody drafted are plain.

    Args:
        pending: [B] root tokens.
        drafts: which of the B rows a draft covers, and the draft.
    """
    if len(drafts) == 1 and len(drafts[0][0]) == len(pending):
        return drafts[0][1]
    nodes = max([1, *(draft.tokens.shape[1] for _, draft in drafts)])
    plain = roots(pending, nodes)
    tokens, parents = plain.tokens, plain.parents.clone()
    for places, draft in drafts:
        at, width = torch.tensor(places), draft.tokens.shape[1]
        tokens[at, :width] = draft.tokens.to(tokens.device)
        parents[at, :width] = draft.parents.to(tokens.device)
    return Draft(tokens, parents)


def roots(pending: Sequence[int], nodes: int = 1) -> Draft:
    """Rows that have only a root, padded to `nodes` nodes, on the host."""
    tokens = torch.full((len(pending), nodes), PADDING)
    tokens[:, 0] = torch.tensor(pending, dtype=torch.int64)
    return Draft(tokens, chain_parents(len(pending), nodes))
