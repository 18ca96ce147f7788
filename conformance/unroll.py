"""Our heads over given hidden states: the logits of every step of every chain at once, by plain attention.

It is the oracle's side of a comparison, so it is written for clarity: no cache, no kernels, keys kept step by step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.heads.eagle.module import EagleHead


class Chains:
    """Attention of T chains that begin at neighbouring positions: what `EagleHead.forward` takes as `attend`.

    Chain i sees the first keys of chains 0 .. i and its own later ones, which stand at positions i + 1, i + 2, ...

    Args:
        moving_window: a sliding window ends at the token that reads, as in serving; otherwise at the chain's first one.
    """

    def __init__(self, moving_window: bool = True) -> None:
        self.stored: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.moving_window = moving_window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        """q [T, Hq, D], k and v [T, Hk, D] of one step; returns [T, Hq * D]."""
        steps = self.stored.setdefault(layer, [])
        groups = q.shape[1] // k.shape[1]
        steps.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        step, chains = len(steps) - 1, len(q)
        first_k, first_v = (kept[:chains] for kept in steps[0])
        own_k, own_v = (torch.stack([kept[i][:chains] for kept in steps[1:]], 1) if step else None for i in (0, 1))
        rows = torch.arange(chains)
        ages = rows[:, None] - rows
        beyond = ages + (step if self.moving_window else 0) >= window if window is not None else False
        hidden = (ages < 0) | beyond
        scores = torch.einsum("thd,shd->ths", q, first_k).masked_fill(hidden[:, None], -torch.inf)
        if own_k is not None:
            scores = torch.cat([scores, torch.einsum("thd,tshd->ths", q, own_k)], -1)
        weights = F.softmax(scores / q.shape[-1] ** 0.5, -1)
        mixed = torch.einsum("ths,shd->thd", weights[..., :chains], first_v)
        if own_v is not None:
            mixed = mixed + torch.einsum("ths,tshd->thd", weights[..., chains:], own_v)
        return mixed.reshape(chains, -1)


class Tables(NamedTuple):
    """A target's token vectors and output layer, [V, H] each."""

    embed: Tensor
    head: Tensor


def unrolled(
    head: EagleHead, features: Tensor, tokens: Tensor, tables: Tables, steps: int, chains: Chains | None = None
) -> list[Tensor]:
    """Logits of steps k = 0 ..: row i read tokens i + 1 .. i + 1 + k and guesses token i + 2 + k.

    Args:
        features: [P, taps * Ht] what the head reads of the target at positions 0 .. P - 1.
        tokens: [T] ids, T > P or as many; later steps read them too, not the head's own guesses.
        tables: the target's, for a head that shares them.
        chains: where their keys are kept, by default with moving windows.

    Returns:
        Per step [rows, Vd]: as many rows as have a feature and all the tokens that they read.
    """
    chains, found = chains or Chains(), []
    embed = tables.embed if head.embed is None else head.embed.weight
    hidden = head.fuse(features)
    for step in range(steps):
        rows = min(len(features), len(tokens) - 1 - step)
        positions = torch.arange(step, step + rows)
        output = head(embed[tokens[step + 1 : step + 1 + rows]], hidden[:rows], head.rotation(positions), chains.attend)
        found.append(head.normed(output) @ tables.head.T if head.head is None else head.logits(output))
        hidden = head.recycle(output)
    return found


def chain(head: EagleHead, features: Tensor, tokens: Tensor, tables: Tables, length: int) -> list[int]:
    """The target's ids of a greedy chain after `tokens` [P + 1], of which the last has no feature yet."""
    guesses: list[int] = []
    for step in range(length):
        read = torch.cat([tokens, torch.tensor(guesses, dtype=tokens.dtype)])
        logits = unrolled(head, features, read, tables, step + 1)[step]
        guesses.append(int(head.draft_ids[logits[-1].argmax()]))
    return guesses
