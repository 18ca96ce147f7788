"""Tensors of one step: the batch laid out, the target run, its draws compared with the draft, the path committed.

Knows rows, lengths and tokens; nothing of requests, drafters or text. Legend: B sampled rows, N nodes, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, Span
from sametoken.runtime.draw import draw
from sametoken.speculation.draft import PADDING, Draft, ancestors, chain_parents, chain_reach
from sametoken.speculation.sampling import Sampling
from sametoken.speculation.verify import Verdict, verify


class Prompt(NamedTuple):
    """A piece of a prompt: `tokens` of `row` from position `start`; when `last`, the next token is drawn."""

    row: int
    start: int
    tokens: Sequence[int]
    last: bool


class Batch(NamedTuple):
    """One step: `draft` [B_d, N] for the decoding `rows` whose committed lengths are `starts`, and prompt pieces."""

    rows: Sequence[int]
    starts: Sequence[int]
    draft: Draft
    prompts: Sequence[Prompt]


class Outcome(NamedTuple):
    """What a step found out.

    Attributes:
        verdict: over the sampled rows: the decoding rows, then the prompts that were `last`.
        logits: [B, N, V] of the sampled rows.
        features: [T, taps * H] hidden states in the order of the batch, or None without taps.
        prompt_hidden: [tokens, H] last hidden states of each prompt piece.
    """

    verdict: Verdict | None
    logits: Tensor | None
    features: Tensor | None
    prompt_hidden: list[Tensor]


def merge(pending: Sequence[int], drafts: Sequence[tuple[Sequence[int], Draft]]) -> Draft:
    """One rectangular draft of B rows from several drafters'; rows that nobody drafted are plain.

    Args:
        pending: [B] root tokens.
        drafts: which of the B rows a draft covers, and the draft.
    """
    if len(drafts) == 1 and len(drafts[0][0]) == len(pending):
        return drafts[0][1]
    nodes = max([1, *(draft.tokens.shape[1] for _, draft in drafts)])
    plain = _roots(pending, nodes)
    tokens, parents = plain.tokens, plain.parents.clone()
    for places, draft in drafts:
        at, width = torch.tensor(places), draft.tokens.shape[1]
        tokens[at, :width] = draft.tokens.to(tokens.device)
        parents[at, :width] = draft.parents.to(tokens.device)
    return Draft(tokens, parents)


class Runner:
    """Runs the target over its cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, taps: tuple[int, ...]) -> None:
        self.decoder, self.cache, self.taps = decoder, cache, taps
        self.device = decoder.embed.weight.device

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def run(self, batch: Batch, sampling: Sampling | None) -> Outcome:
        """Forward, draw, verify and commit one step; `sampling` covers the sampled rows in order."""
        sampled = len(batch.rows) + sum(prompt.last for prompt in batch.prompts)
        # A lone row may need a padding node beside it.
        nodes = max(batch.draft.tokens.shape[1], self.decoder.least_rows if sampled == 1 else 1)
        draft = _on(self.device, _widen(batch.draft, nodes))
        reach = ancestors(draft.parents)
        starts, rows = self._ints(batch.starts), self._ints(batch.rows)

        spans = [Span(rows, batch.rows, starts, reach, nodes, max(batch.starts) + nodes)] if batch.rows else []
        spans += [self._prompt_span(prompt) for prompt in batch.prompts]
        tokens = [draft.tokens.flatten()] if batch.rows else []
        least = self.decoder.least_rows
        tokens += [self._ints([*p.tokens, *[PADDING] * (least - len(p.tokens))]) for p in batch.prompts]
        hidden = self.decoder(torch.cat(tokens), self.cache, self.cache.view(spans), self.taps)
        features = torch.cat(hidden.taps, dim=1) if self.taps else None
        places, prompt_hidden = self._prompt_places(batch, hidden.last, nodes)
        if sampling is None:
            return Outcome(None, None, features, prompt_hidden)

        index = torch.arange(len(batch.rows) * nodes, device=self.device).view(-1, nodes)
        lasts = [p for p in batch.prompts if p.last]
        if lasts:
            ends = self._ints([place for place, p in zip(places, batch.prompts, strict=True) if p.last])
            index = torch.cat([index, ends.unsqueeze(1).expand(-1, nodes)])
            roots = _on(self.device, _roots([p.tokens[-1] for p in lasts], nodes))
            draft = Draft(torch.cat([draft.tokens, roots.tokens]), torch.cat([draft.parents, roots.parents]))
            reach = ancestors(draft.parents)
            starts = torch.cat([starts, self._ints([p.start + len(p.tokens) - 1 for p in lasts])])
        logits = self.decoder.logits(hidden.last[index.flatten()]).view(sampled, nodes, -1)
        verdict = verify(draft, reach, draw(logits, draft, reach, starts, sampling))
        if batch.rows:
            self.cache.commit(rows, starts[: len(rows)], verdict.path[: len(rows)])
        return Outcome(verdict, logits, features, prompt_hidden)

    def _prompt_span(self, prompt: Prompt) -> Span:
        width = max(self.decoder.least_rows, len(prompt.tokens))
        reach = chain_reach(1, width, self.device)
        row, start = self._ints([prompt.row]), self._ints([prompt.start])
        return Span(row, [prompt.row], start, reach, width, prompt.start + width)

    def _prompt_places(self, batch: Batch, last: Tensor, nodes: int) -> tuple[list[int], list[Tensor]]:
        """Where each prompt piece's last token lies among the T tokens, and each piece's hidden states."""
        begin, places, pieces = len(batch.rows) * nodes, [], []
        for prompt in batch.prompts:
            places.append(begin + len(prompt.tokens) - 1)
            pieces.append(last[begin : begin + len(prompt.tokens)])
            begin += max(self.decoder.least_rows, len(prompt.tokens))
        return places, pieces


def _on(device: torch.device, draft: Draft) -> Draft:
    """The draft on `device`, where drafters on the host do not put it."""
    return Draft(draft.tokens.to(device), draft.parents.to(device))


def _widen(draft: Draft, nodes: int) -> Draft:
    """Pads a draft to `nodes` nodes."""
    rows, width = draft.tokens.shape
    if width >= nodes:
        return draft
    tokens = torch.cat([draft.tokens, draft.tokens.new_full((rows, nodes - width), PADDING)], dim=1)
    return Draft(tokens, torch.cat([draft.parents, chain_parents(rows, nodes)[:, width:]], dim=1))


def _roots(pending: Sequence[int], nodes: int) -> Draft:
    """Rows that have only a root, padded to `nodes` nodes."""
    tokens = torch.full((len(pending), nodes), PADDING)
    tokens[:, 0] = torch.tensor(pending, dtype=torch.int64)
    return Draft(tokens, chain_parents(len(pending), nodes))
