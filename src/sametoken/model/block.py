"""Block of a decoder or a head: attention, passed by the caller, and a gated MLP or experts, with residuals.

A block handles neither cache nor positions. Legend: T tokens of the whole batch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.model.config import ModelConfig
from sametoken.model.experts import Experts
from sametoken.model.formats.base import WeightFormat
from sametoken.model.latent import LatentAttention
from sametoken.model.layers import ACTIVATIONS, RMSNorm, gated
from sametoken.model.linear import Linear
from sametoken.model.rotary import apply_rope
from sametoken.runtime.ranks import Ranks

# From q [T, Hq, D] and k [T, Hk, D] after RoPE, v [T, Hk, D], layer and window to [T, Hq * D], over the caller's keys.
Attend = Callable[[Tensor, Tensor, Tensor, int, int | None], Tensor]
Rotation = tuple[Tensor, Tensor]  # cos and sin [T, 1, rotated size]


class Block(nn.Module):
    """Attention and gated MLP with residuals, with norms before, after or both.

    Args:
        reads: input width of attention, by default the hidden size.

    Attributes:
        rope: RoPE configuration of this layer, None for a layer without RoPE.
        rotated_eps: epsilon of a norm without weights over each head after RoPE, None for no such norm.
        sinks: [query heads] attention sinks, None for none; read by the maker of `attend`.
        latent: latent attention, in place of `qkv`; None for a block with `qkv`.
        experts: mixture of experts, in place of `gate_up` and `down`; None for a block with those.
        ranks: processes that compute the block together, each a part of the heads and of the MLP; None for one process.
    """

    ranks: Ranks | None = None

    qkv: Linear
    gate_up: Linear
    down: Linear

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, format: WeightFormat | None, reads: int | None = None
    ) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.layer, self.heads, self.kv_heads, self.size = layer, heads, kv_heads, size
        self.window, self.rope = config.sliding_windows[layer], config.ropes[layer]
        self.activation, self.scale = ACTIVATIONS[config.activation], config.residual_scale

        def norm(present: bool, size: int = hidden) -> RMSNorm | None:
            return RMSNorm(size, config.norm_eps, dtype, config.norm_shift) if present else None

        before, after = "before" in config.norms, "after" in config.norms
        self.attention_norm, self.attention_out_norm = norm(before), norm(after)
        self.latent = None if config.latent is None else LatentAttention(config, config.latent, dtype, format)
        if self.latent is None:
            self.qkv = Linear(reads or hidden, (heads + 2 * kv_heads) * size, config.qkv_bias, dtype, format)
        self.rotated_eps = config.norm_eps if config.rotated_norm and self.rope is not None else None
        self.q_norm = norm(config.qk_norm, config.q_size if config.whole_qk_norm else size)
        self.k_norm = norm(config.qk_norm, config.kv_size if config.whole_qk_norm else size)
        self.out = Linear(config.read_size, hidden, config.out_bias, dtype, format)
        self.mlp_norm, self.mlp_out_norm = norm(before), norm(after)
        self.sinks = nn.Parameter(torch.empty(heads, dtype=dtype), requires_grad=False) if config.sinks else None
        sparse = config.experts is not None and config.experts.layers[layer]
        self.experts = Experts(config, config.experts, dtype, format) if config.experts is not None and sparse else None
        if self.experts is not None:
            return
        self.gate_up = Linear(hidden, 2 * intermediate, config.mlp_bias, dtype, format)
        self.down = Linear(intermediate, hidden, config.mlp_bias, dtype, format)

    def forward(self, x: Tensor, rope: Rotation | None, attend: Attend) -> Tensor:  # [T, H] -> [T, H]
        """Hidden states after the block; `rope` is None if and only if the block's own is."""
        x = x + self.attention(x if self.attention_norm is None else self.attention_norm(x), rope, attend)
        return x + self.feed_forward(x)

    def attention(self, read: Tensor, rope: Rotation | None, attend: Attend) -> Tensor:  # [T, reads] -> [T, H]
        """Contribution of attention to the hidden state, from its normed input."""
        if self.latent is not None and rope is not None:
            interleaved = self.rope is not None and self.rope.interleaved
            sums = self.latent(read, rope, interleaved, lambda q, k: attend(q, k, k, self.layer, self.window))
            return self._added(self.out(sums), self.attention_out_norm)
        qkv = self.qkv(read).view(read.shape[0], -1, self.size)
        qk, v = torch.split_with_sizes(qkv, [self.heads + self.kv_heads, self.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split_with_sizes(qk, [self.heads, self.kv_heads], 1)
            qk = torch.cat([_normed(self.q_norm, q), _normed(self.k_norm, k)], dim=1)
        if rope is not None:
            qk = apply_rope(qk, *rope, interleaved=self.rope is not None and self.rope.interleaved)
        if self.rotated_eps is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, self.rotated_eps)
        q, k = torch.split_with_sizes(qk, [self.heads, self.kv_heads], 1)
        return self._added(self.out(attend(q, k, v, self.layer, self.window)), self.attention_out_norm)

    def feed_forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        """Contribution of the gated MLP or of the experts to the hidden state."""
        read = x if self.mlp_norm is None else self.mlp_norm(x)
        fed: Tensor
        fed = self.experts(read) if self.experts is not None else self.down(gated(self.activation, self.gate_up(read)))
        return self._added(fed, self.mlp_out_norm)

    def _added(self, result: Tensor, norm: RMSNorm | None) -> Tensor:  # [T, H] -> [T, H]
        """Sum a partial result over the ranks, then norm and scale it for the residual."""
        if self.ranks is not None:
            partial = result.to(torch.float32).contiguous()
            self.ranks.sum(partial)
            result = partial.to(result.dtype)
        if norm is not None:
            result = norm(result)
        return result if self.scale == 1 else result * self.scale


def _normed(norm: RMSNorm, heads: Tensor) -> Tensor:  # [T, heads, D] -> [T, heads, D]
    """Norm each head separately or all heads together, depending on the width of the norm."""
    normed: Tensor = norm(heads.reshape(len(heads), -1, norm.weight.shape[0]))
    return normed.view(heads.shape)
