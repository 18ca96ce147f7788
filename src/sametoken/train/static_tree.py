"""A static tree for Medusa heads from how often each rank of each head is right, the nodes that gain most first.

Heads guess without knowing of each other, so a path is taken to be right as often as the product of its ranks' rates,
as FasterDecoding/Medusa builds its trees.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sametoken.checkpoint.places import target_directory
from sametoken.engine.llm import LLM
from sametoken.errors import ConfigError
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.read import read_head
from sametoken.heads.write import write_head
from sametoken.learning.target import OuterLayers
from sametoken.options.sampling import SamplingParams
from sametoken.train.evaluate import Question
from sametoken.train.targets import read_outer, run

RANKS = 10  # guesses of a head that a tree may hold
ANSWER = 64  # tokens that are generated to measure on


def rank_rates(heads: MedusaHeads, outer: OuterLayers, texts: Iterable[tuple[Tensor, Tensor, int]]) -> Tensor:
    """[K, RANKS] how often each rank of each head is the token that the target says.

    Args:
        texts: of each text its tokens [S], the target's last normed states [S, H], and where its answer begins.
    """
    hits = torch.zeros(heads.config.num_heads, min(RANKS, heads.config.vocab_size), dtype=torch.float64)
    tried = torch.zeros(heads.config.num_heads, 1, dtype=torch.float64)
    with torch.no_grad():
        for tokens, last, start in texts:
            for i, (head, states) in enumerate(zip(heads.each(), heads.states(last), strict=True)):
                first = max(start - 1, 0)  # the feature of the last prompt token is the first that a draft is made from
                wanted = tokens[first + 2 + i :].unsqueeze(1)
                read = states[first : first + len(wanted)]
                scores = read @ outer.head.to(read.dtype).T if head.head is None else head.head(read)
                hits[i] += (scores.topk(hits.shape[1]).indices == wanted).sum(0).cpu()
                tried[i] += len(wanted)
    return hits / tried.clamp(min=1)


def best_tree(rates: Tensor, nodes: int) -> tuple[tuple[int, ...], ...]:
    """The paths of the `nodes` nodes that are right most often, parents before children.

    Args:
        rates: [K, R] from `rank_rates`.
    """
    table: Sequence[Sequence[float]] = rates.tolist()
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rate, (rank,)) for rank, rate in enumerate(table[0])]
    heapq.heapify(waiting)
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < nodes:
        value, path = heapq.heappop(waiting)
        if value == 0:
            break  # what was never right is no guess
        found.append(path)
        if len(path) < len(table):
            for rank, rate in enumerate(table[len(path)]):
                heapq.heappush(waiting, (value * rate, (*path, rank)))
    return tuple(found)


def write_tree(
    directory: Path, target: str, llm: LLM, questions: Sequence[Question], nodes: int
) -> tuple[tuple[int, ...], ...]:
    """Measures Medusa heads on the target's own answers and writes their best tree into their directory.

    Raises:
        ConfigError: they are no Medusa heads, or none of their guesses was ever right.
    """
    place = target_directory(target)
    device = llm.engine.table.table.device
    outer = read_outer(place, getattr(torch, llm.config.dtype), device)
    heads = read_head(directory, outer.config, outer.head.dtype, device, pack=False).module
    if not isinstance(heads, MedusaHeads):
        raise ConfigError(f"--write-tree is for Medusa heads, {directory} holds an EAGLE head; leave it out")
    answers = llm.generate([question.ids for question in questions], SamplingParams(max_tokens=ANSWER, temperature=0))
    texts = [(len(each.prompt_token_ids), [*each.prompt_token_ids, *each.token_ids]) for each in answers]
    source = run(place, (), max(len(tokens) for _, tokens in texts), outer.head.dtype, device)
    tokens = [torch.tensor(each, device=device) for _, each in texts]
    states = [source(i, each).last for i, each in enumerate(tokens)]
    starts = [start for start, _ in texts]
    paths = best_tree(rank_rates(heads, outer, zip(tokens, states, starts, strict=True)), nodes)
    if not paths:
        raise ConfigError(f"{directory}: not one guess was right in {len(texts)} answers; train the heads first")
    stored = read_head(directory, outer.config, getattr(torch, heads.config.dtype), "cpu", pack=False).module
    assert isinstance(stored, MedusaHeads)
    stored.config = replace(stored.config, choices=paths)
    write_head(stored, directory, outer.config, target_name=target)
    return paths
