"""Draws of the target after every node, by the fastest implementation: compiled kernels, Triton on CUDA, or torch.

`speculation.sampling.sample` is the reference; all implementations draw the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.kernels.cpu.structures import Draw, address, struct_of
from sametoken.kernels.cpu.variant import library
from sametoken.kernels.devices import fused
from sametoken.speculation.draft import Draft, depth
from sametoken.speculation.rows import Sampling
from sametoken.speculation.sampling import confined_scores, sample


def draw(logits: Tensor, draft: Draft, ancestor_mask: Tensor, position: Tensor, sampling: Sampling) -> Tensor:
    """Draw as `speculation.sampling.sample` does, with the same arguments and result."""
    kernels = library() if logits.device.type == "cpu" else None
    if sampling.shape is not None:
        return sample(logits, draft, ancestor_mask, position, sampling)
    if kernels is None and (not fused(logits) or sampling.truncation is not None):
        return sample(logits, draft, ancestor_mask, position, sampling)
    # Greedy draws need no position, whose computation takes as long as the draws on a CPU.
    at = position if kernels and sampling.greedy else position.unsqueeze(1) + depth(ancestor_mask) + 1
    plain = not sampling.edited and sampling.grammars is None
    scores = logits if plain else confined_scores(logits, draft, ancestor_mask, at, sampling)
    if kernels is None:
        from sametoken.kernels.triton import draw as kernel

        return kernel.draw(scores, at, sampling.seed, sampling.temperature, sampling.noise_scale)
    drawn = kernels.sample(draw_of(sampling, address(at)), scores.to(torch.float32))
    return drawn if drawn.min() >= 0 else sample(logits, draft, ancestor_mask, position, sampling)


def draw_of(sampling: Sampling, positions: int | None) -> Draw:
    """C structure of the sampling of a batch, for a call of the compiled kernels.

    Args:
        positions: address of the positions of the draws.
    """
    truncation = {} if sampling.truncation is None else sampling.truncation._asdict()
    found: Draw = struct_of(
        Draw, seeds=sampling.seed, positions=positions, temperature=sampling.temperature,
        noise_scale=sampling.noise_scale, **truncation,
    )  # fmt: skip
    return found
