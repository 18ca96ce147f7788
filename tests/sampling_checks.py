"""Rows, single draws and an independent float64 reference of the processed distribution, shared by sampling tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from sametoken.options.sampling import SamplingParams
from sametoken.speculation.draft import Draft, ancestors, chain_parents
from sametoken.speculation.sampling import RowSampling, Sampling, rank, sample

V = 12
EVERYTHING: dict[str, Any] = {
    "top_k": 9,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {1: 2.0, 5: -1.5},
    "min_tokens": 6,
}
BAD_WORDS = [[3], [2, 4], [0, 1, 2]]
END = [7, 8]


def row(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    vocab: int = V,
    ends: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
) -> RowSampling:
    state = RowSampling(params, seed, prompt, vocab, ends, words)
    state.extend(list(output))
    return state


def draw_after(rows: Sequence[RowSampling], logits: Tensor, position: Sequence[int]) -> Tensor:
    """[B] draws of one-node trees from logits [B, V]."""
    parents = chain_parents(len(rows), 1)
    draft = Draft(torch.zeros_like(parents), parents)
    at = torch.tensor(position)
    return sample(logits.unsqueeze(1), draft, ancestors(parents), at, Sampling.of(rows)).squeeze(1)


def reference(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    ends: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """[V] probabilities in float64, one definition after the other."""
    z = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    context = [*prompt, *output]
    for word in words:
        if len(word) == 1 or context[-len(word) + 1 :] == list(word[:-1]):
            z[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        z[list(ends)] = -np.inf
    for token in set(context):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if params.temperature == 0:
        return np.eye(len(z))[order[0]]
    p = np.exp((z - z.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = 0.0
    for token in order:
        if before >= params.top_p:
            p[token] = 0
        before += p[token]
    return p / p.sum()


def kept(logits: Tensor, params: SamplingParams, vocab: int = V, **state: Any) -> set[int]:
    """Tokens that a row can draw: those which `rank` scores above minus infinity."""
    tokens, scores = rank(
        logits.unsqueeze(0), torch.tensor([50]), Sampling.of([row(params, vocab=vocab, **state)]), vocab
    )
    return set(tokens[scores > -math.inf].tolist())


numbers = st.floats(0.05, 1.0)


@st.composite
def params_of(draw: st.DrawFn, temperature: float | None = None) -> SamplingParams:
    """Any mixture of processors, each off about half of the time."""

    def maybe(neutral: Any, strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(neutral), strategy))

    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.3])) if temperature is None else temperature,
        top_k=maybe(0, st.integers(1, 14)),
        top_p=maybe(1.0, numbers),
        min_p=maybe(0.0, st.floats(0.001, 0.9)),
        repetition_penalty=maybe(1.0, st.floats(0.6, 2.0)),
        presence_penalty=maybe(0.0, st.floats(-1, 1)),
        frequency_penalty=maybe(0.0, st.floats(-1, 1)),
        logit_bias=maybe(None, st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=3)),
        min_tokens=maybe(0, st.integers(1, 8)),
    )


tokens_of = st.lists(st.integers(0, V - 1), max_size=7)
