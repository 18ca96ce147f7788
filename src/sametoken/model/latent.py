"""Multi-head latent attention (MLA): the KV cache has one small vector per token and layer for all heads.

A head's key is W_k c and its value W_v c, for the latent c of a token. Then q (W_k c) = (W_k^T q) c, and a sum of
values is W_v times the same sum of latents: queries are multiplied by W_k^T before attention, its results by W_v after
it, and all heads attend to the same vectors, which are keys and values at once. Legend: T tokens, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.model.formats.base import WeightFormat
from sametoken.model.latent_config import LatentConfig
from sametoken.model.layers import RMSNorm
from sametoken.model.linear import Linear
from sametoken.model.rotary import apply_rope

if TYPE_CHECKING:
    from sametoken.model.config import ModelConfig

EPS = 1e-6  # epsilon of the norms here, independent of the model's
ROWS = 16  # rows of one product with every head's matrix: a row's bits may depend on their number


class HeadProducts(nn.Module):
    """Matrices W_k and W_v of every head in the layout of files, [H * (unrotated + value), rank]; never quantised."""

    dense = True

    def __init__(self, latent: LatentConfig, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.heads = [latent.unrotated, latent.value], heads
        rows = heads * sum(self.sizes)
        self.weight = nn.Parameter(torch.empty(rows, latent.rank, dtype=dtype), requires_grad=False)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Matrices W_k [H, unrotated, rank] and W_v [H, value, rank]."""
        keys, values = torch.split_with_sizes(self.weight.view(self.heads, sum(self.sizes), -1), self.sizes, 1)
        return keys, values


class LatentAttention(nn.Module):
    """Latent attention of a block, in place of `qkv`."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, dtype: torch.dtype, format: WeightFormat | None):
        super().__init__()
        hidden, query_rank = config.hidden_size, latent.query_rank
        self.latent, self.heads = latent, config.num_heads
        self.q_down = None if query_rank is None else Linear(hidden, query_rank, latent.bias, dtype, format)
        self.q_norm = None if query_rank is None else RMSNorm(query_rank, EPS, dtype)
        self.q = Linear(query_rank or hidden, config.q_size, False, dtype, format)
        self.kv_down = Linear(hidden, latent.rank + latent.rotated, latent.bias, dtype, format)
        self.kv_norm = RMSNorm(latent.rank, EPS, dtype)
        self.up = HeadProducts(latent, config.num_heads, dtype)

    def forward(
        self, read: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool, attend: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Results of the heads [T, H * value].

        Args:
            read: [T, hidden size].
            rope: cos and sin [T, 1, rotated].
            interleaved: true if pairs are adjacent.
            attend: from queries [T, H, D] and keys [T, 1, D], which are also the values, to [T, H * D].
        """
        latent = self.latent
        q = self.q(read if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(read)))
        q, kv = q.view(len(read), self.heads, -1), self.kv_down(read).unsqueeze(1)
        plain, turned = torch.split_with_sizes(q, [latent.unrotated, latent.rotated], -1)
        small, shared = torch.split_with_sizes(kv, [latent.rank, latent.rotated], -1)
        rotated = apply_rope(torch.cat([turned, shared], 1), *rope, interleaved=interleaved)
        w_k, w_v = self.up.matrices()
        queries = torch.cat([rotated[:, :-1], _by_head(plain, w_k)], -1)
        keys = torch.cat([rotated[:, -1:], self.kv_norm(small)], -1)
        sums = attend(queries, keys).view(len(read), self.heads, -1)[..., latent.rotated :]
        return _by_head(sums, w_v.transpose(1, 2)).flatten(1)


def _by_head(x: Tensor, weights: Tensor) -> Tensor:
    """Product [T, H, out] of x [T, H, in] and weights [H, in, out], in products of one shape."""
    count = len(x)
    rows = F.pad(x, (0, 0, 0, 0, 0, -count % ROWS)).transpose(0, 1)
    parts = [torch.bmm(part.contiguous(), weights) for part in torch.split(rows, ROWS, 1)]
    return torch.cat(parts, 1)[:, :count].transpose(0, 1)
