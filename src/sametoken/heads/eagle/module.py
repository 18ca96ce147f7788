"""EAGLE heads: one module for training and serving.

Only the source of attention's keys, which the caller passes (`Attend`), and the packing of linears differ. Legend:
T tokens, H hidden size of the head, Ht of the target, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.kind import Head
from sametoken.model.block import Attend, Block
from sametoken.model.formats.base import WeightFormat
from sametoken.model.layers import RMSNorm
from sametoken.model.linear import Embedding, Linear
from sametoken.model.rotary import rope_at, rope_tables


class FirstBlock(Block):
    """First block of EAGLE-3: attention reads the normed token embedding and hidden state, concatenated to 2 H."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype, format: WeightFormat | None) -> None:
        layers = config.layers
        super().__init__(layers, 0, dtype, format, reads=2 * layers.hidden_size)
        self.attention_norm = None
        self.embed_norm = RMSNorm(layers.hidden_size, layers.norm_eps, dtype)
        self.hidden_norm = RMSNorm(layers.hidden_size, layers.norm_eps, dtype)
        self.norm_before_residual = config.norm_before_residual

    def join(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Output [T, H] from token embeddings and hidden states [T, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.attention(torch.cat([self.embed_norm(embedded), normed], dim=-1), rope, attend)
        return x + self.feed_forward(x)


class EagleHead(Head):
    """Autoregressive head on the target's features and its own last output.

    Slot i, with the position i in RoPE, reads the feature of position i and the token after it, and guesses the next
    token. Architecture: SafeAILab/EAGLE `cnets1.py` (1, 2) and `cnets.py` (3).

    Args:
        dtype: dtype of weights and activations.
        format: format to which linears are quantised when packed, None for no quantisation.
    """

    config: EagleConfig
    d2t: Tensor

    def __init__(self, config: EagleConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        layers, hidden, eps = config.layers, config.layers.hidden_size, config.layers.norm_eps
        width, taps = config.target_hidden_size, len(config.taps)
        self.embed = Embedding(layers.vocab_size, hidden, dtype, tied=False) if config.own_embed else None
        self.fc = Linear(config.fused_size, hidden, config.fc_bias, dtype, format)
        self.input_norm = RMSNorm(taps * width, eps, dtype) if config.norm_before_fc else None
        self.fc_norms = nn.ModuleList(RMSNorm(width, eps, dtype) for _ in range(taps)) if config.fc_norm else None
        self.embed_norm = RMSNorm(hidden, eps, dtype) if config.joined_norms else None
        self.hidden_norm = RMSNorm(hidden, eps, dtype) if config.joined_norms else None
        blocks = [Block(layers, i, dtype, format) for i in range(1, layers.num_layers)]
        self.blocks = nn.ModuleList([self._first(dtype, format), *blocks])
        self.norm = RMSNorm(hidden, eps, dtype) if config.last_norm else None
        self.head = Linear(hidden, config.draft_vocab_size, False, dtype, format) if config.own_head else None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64, device="cpu"))
        self._rope: tuple[Tensor, Tensor] | None = None

    def _first(self, dtype: torch.dtype, format: WeightFormat | None) -> Block:
        if self.config.version == 3:
            return FirstBlock(self.config, dtype, format)
        block = Block(self.config.layers, 0, dtype, format)
        if not self.config.input_norm:
            block.attention_norm = None
        return block

    @property
    def draft_ids(self) -> Tensor:
        """Target's id [Vd] of every token that the head can guess."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, features: Tensor) -> Tensor:
        """First hidden states [T, H] from features [T, taps * Ht]; a last state is returned unchanged."""
        if self.config.reads_last_state:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norms is not None:
            parts = torch.split(features, self.config.target_hidden_size, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:  # [T, H], [T, H] -> [T, 2 H]
        """Input of the fusion of a head without a `FirstBlock`."""
        if self.embed_norm is not None and self.hidden_norm is not None:
            embedded, hidden = self.embed_norm(embedded), self.hidden_norm(hidden)
        return torch.cat([hidden, embedded] if self.config.hidden_first else [embedded, hidden], dim=-1)

    def forward(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Run one step for T slots.

        Args:
            embedded: [T, H] embeddings of the tokens after the slots' positions.
            hidden: [T, H] fused features, or the recycled output of the previous step.
            rope: cos and sin at the slots' positions, from `rotation`.
            attend: attention, which stores the new keys and finds the visible ones.

        Returns:
            [T, H] output of the last block, for `logits` and `recycle`.
        """
        first, *rest = self.blocks
        if isinstance(first, FirstBlock):
            x = first.join(embedded, hidden, rope, attend)
        else:
            x = first(self.fc(self.join(embedded, hidden)), rope, attend)
        for block in rest:
            x = block(x, rope, attend)
        return x

    def recycle(self, output: Tensor) -> Tensor:  # [T, H] -> [T, H]
        """Hidden input of the next step, in place of a feature."""
        return self.normed(output) if self.recycles_normed else output

    @property
    def recycles_normed(self) -> bool:
        """True if the next step reads the input of the output head."""
        return self.config.recycles_normed

    def normed(self, output: Tensor) -> Tensor:  # [T, H] -> [T, H]
        """Input of the output head."""
        return output if self.norm is None else self.norm(output)

    def logits(self, output: Tensor) -> Tensor:  # [T, H] -> [T, Vd]
        """Logits of the head's own output layer."""
        assert self.head is not None, "a head without an output layer uses the target's"
        scores: Tensor = self.head(self.normed(output))
        return scores

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE values cos and sin [T, 1, rotated size] at `positions` [T]."""
        return rope_at(self.rope_tables(positions.device), positions)

    def rope_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """RoPE tables cos and sin [positions, 1, rotated size]."""
        if self._rope is None or self._rope[0].device != device:  # not in __init__, which may run on the meta device
            cos, sin = rope_tables(self.config.layers.rope, self.config.layers.max_position, device, self.dtype)
            self._rope = cos.unsqueeze(1), sin.unsqueeze(1)
        return self._rope
