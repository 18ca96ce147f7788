"""Answers that a draft in training writes itself, in place of the last answers of the data.

Documents keep everything before their last answer. The draft writes as many tokens as the old answer had, or fewer if
it ends earlier. A draw depends on its document's seed and its place, not on other documents. Legend: B documents that
are rewritten, N tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.learning.batch import Batch
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import chain_mask
from sametoken.speculation.noise import noise, uniform

PAGE = 32


def rewrite(decoder: Decoder, batch: Batch, share: float, stops: Sequence[int]) -> Batch:
    """A batch with the last answers of some documents in the draft's words.

    Args:
        decoder: the draft, its linears not packed.
        share: of the documents, by chance.
        stops: ids that end an answer; they are part of it.
    """
    assert batch.seeds is not None
    seeds = batch.seeds.to(batch.tokens.device)
    documents = list(zip(*(torch.split(x, list(batch.lengths)) for x in (batch.tokens, batch.mask)), strict=True))
    before = torch.full_like(seeds, -1)  # no token's place
    drawn = uniform(seeds, before, seeds.new_zeros(1)).squeeze(1) < share
    starts = {i: _answer(documents[i][1]) for i, chosen in enumerate(drawn.tolist()) if chosen}
    starts = {i: place for i, place in starts.items() if place[0] > 0}
    if not starts:
        return batch
    prompts = [documents[i][0][:first] for i, (first, _) in starts.items()]
    answers = sample(decoder, prompts, [end - first for first, end in starts.values()], stops, seeds[list(starts)])
    for (i, (first, _)), prompt, answer in zip(starts.items(), prompts, answers, strict=True):
        mask = torch.cat([documents[i][1][:first], torch.ones_like(answer, dtype=torch.bool)])
        documents[i] = (torch.cat([prompt, answer]), mask)
    return Batch.of(documents, batch.tokens.device, batch.seeds)


def _answer(mask: Tensor) -> tuple[int, int]:
    """Begin and end of the last masked stretch; (0, 0) if there is none."""
    places = mask.nonzero().squeeze(1)
    if not len(places):
        return 0, 0
    end = int(places[-1]) + 1
    gaps = (~mask[:end]).nonzero().squeeze(1)
    return (int(gaps[-1]) + 1 if len(gaps) else 0), end


@torch.no_grad()
def sample(
    decoder: Decoder, prompts: Sequence[Tensor], counts: Sequence[int], stops: Sequence[int], seeds: Tensor
) -> list[Tensor]:
    """Continuations of prompts, drawn from the model's own distributions.

    Args:
        counts: tokens of each, at most and at least one.
        seeds: int64 of each.
    """
    device = decoder.embed.device
    cache = _cache(decoder, len(prompts), max(len(p) + n for p, n in zip(prompts, counts, strict=True)), device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows, host_rows = torch.arange(len(prompts), device=device), tuple(range(len(prompts)))
    spans = [
        Span(rows[i : i + 1], (i,), torch.zeros(1, dtype=torch.int64, device=device), chain_mask(1, n, device), n, n)
        for i, n in enumerate(lengths.tolist())
    ]
    hidden = decoder(torch.cat(list(prompts)), cache, cache.view(spans)).last
    last = hidden[lengths.cumsum(0) - 1]
    written: list[Tensor] = []
    alone = chain_mask(len(prompts), 1, device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    wanted = torch.tensor(counts, device=device)
    end_ids = torch.tensor(list(stops), dtype=torch.int64, device=device)
    ids = torch.arange(decoder.config.vocab_size, device=device)
    for step in range(max(counts)):
        chances = torch.softmax(decoder.logits(last).float(), -1)
        token = (chances / noise(seeds, lengths + step, ids)).argmax(-1)  # as the engine draws
        written.append(torch.where(ended, -1, token))
        ended |= torch.isin(token, end_ids) | (step + 1 >= wanted)
        if bool(ended.all()):
            break
        span = Span(rows, host_rows, lengths + step, alone, 1, int(lengths.max()) + step + 1)
        last = decoder(token, cache, cache.view([span])).last
    return [row[row >= 0] for row in torch.stack(written, dim=1)]


def _cache(decoder: Decoder, rows: int, longest: int, device: torch.device) -> KVCache:
    """A cache in which each row has pages for as many tokens as the longest."""
    each = -(-longest // PAGE)
    table = PageTable(rows, rows * each + 1, each, PAGE, device)
    for row in range(rows):
        table.extend(row, range(1 + row * each, 1 + (row + 1) * each))
    return KVCache.of(decoder.config, table, decoder.dtype, device)
