"""The target's draw after every node by whatever computes it fastest: a Triton kernel on CUDA, torch elsewhere.

`speculation.sampling.sample` says what is drawn; nothing here changes a token.
"""

from __future__ import annotations

from torch import Tensor

from sametoken.kernels.devices import fused
from sametoken.speculation.draft import Draft, depth
from sametoken.speculation.rows import Sampling
from sametoken.speculation.sampling import confined_scores, sample


def draw(logits: Tensor, draft: Draft, ancestor_mask: Tensor, position: Tensor, sampling: Sampling) -> Tensor:
    """`sample`, with the same arguments and the same result."""
    if not fused(logits) or sampling.truncation is not None:
        return sample(logits, draft, ancestor_mask, position, sampling)
    from sametoken.kernels.triton import draw as kernel

    at = position.unsqueeze(1) + depth(ancestor_mask) + 1
    plain = not sampling.edited and sampling.grammars is None
    scores = logits if plain else confined_scores(logits, draft, ancestor_mask, at, sampling)
    return kernel.draw(scores, at, sampling.seed, sampling.temperature, sampling.noise_scale)
