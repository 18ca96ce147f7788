"""Random heads for tiny targets, engines that guess with them, and what an EAGLE head computes, in plain torch.

`Reference` knows no cache, no pages and none of the package's layers: it takes the weights by name and follows the
published architectures (SafeAILab/EAGLE `cnets1.py` and `cnets.py`, and the EAGLE 3.1 flags) in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import tiny_models
from engine_checks import make_llm
from sametoken import LLM
from sametoken.checkpoint.hub import read_config, resolve
from sametoken.engine import load as loading
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.modules import pack
from sametoken.heads.registry import head_kind
from sametoken.heads.serve import LoadedDraft
from sametoken.heads.write import write_head
from sametoken.model.config import ModelConfig
from sametoken.model.rope_config import RopeConfig

TAPS = (0, 1)
SPREAD = 0.2  # standard deviation of random weights: wide, so that a wrong detail shows


def shape_of(directory: str) -> ModelConfig:
    """The facts of a target on disk."""
    return ModelConfig.from_hf(read_config(resolve(directory)))


def eagle_config(target: ModelConfig, version: int = 3, **options: Any) -> EagleConfig:
    """A head of a shape unlike the target's; `layers`, `windows`, `kv_heads` and `bias` are its blocks' own."""
    layers, windows = options.pop("layers", 1), options.pop("windows", None)
    size = options.pop("size", target.hidden_size)
    own = replace(
        target,
        family="llama",
        hidden_size=size,
        intermediate_size=80,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=options.pop("kv_heads", 1),
        head_dim=16,
        latent=None,
        attention_scale=None,
        sliding_windows=windows or (None,) * layers,
        qkv_bias=options.pop("bias", False),
        qk_norm=options.pop("qk_norm", False),
        activation="silu",
        rope=RopeConfig("default", 500.0, 16, 128, 128),
    )
    old = {"last_norm": False, "own_head": False} if version == 1 else {}
    facts: dict[str, Any] = {
        "version": version,
        "taps": () if version == 1 else TAPS,
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": target.vocab_size,
        **old,
        **options,
    }
    return EagleConfig(layers=own, **facts)


def random_weights(head: EagleHead | MedusaHeads, seed: int = 1) -> None:
    """Fills every parameter so that none could be left out unnoticed, and chooses a draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        base = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.copy_(base + SPREAD * torch.randn(parameter.shape, generator=generator))
    if isinstance(head, EagleHead):
        reduced, whole = head.config.draft_vocab_size, head.config.layers.vocab_size
        ids = torch.randperm(whole, generator=generator)[:reduced].sort().values
        head.d2t.copy_(ids - torch.arange(reduced))


def make_eagle(
    target: str,
    version: int = 3,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "",
    **options: Any,
) -> EagleHead:
    """A packed random head for a target on disk."""
    head = EagleHead(eagle_config(shape_of(target), version, **options), dtype)
    random_weights(head, seed)
    head.to(device or tiny_models.DEVICE)  # before packing: what is packed stays where it is
    pack(head)
    return head


def make_medusa(
    target: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, device: str = "", **options: Any
) -> MedusaHeads:
    """Packed random heads for a target on disk, unsure enough to guess differently."""
    shape = shape_of(target)
    facts = {"num_heads": 4, "num_layers": 2, **options}
    heads = MedusaHeads(MedusaConfig(hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, **facts), dtype)
    random_weights(heads, seed)
    heads.to(device or tiny_models.DEVICE)
    pack(heads)
    return heads


# A target and heads whose layers have whole groups of 128 inputs, as formats of four bits need.
WIDE = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 128}  # fmt: skip
WIDE_HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1},
    "eagle3": {"layers": 2, "bias": True, "draft_vocab_size": 60, "norm_before_fc": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "medusa": {},
}


def wide_head(name: str, target: ModelConfig) -> EagleHead | MedusaHeads:
    """A random plain head of WIDE_HEADS in float32."""
    head: EagleHead | MedusaHeads
    if name == "medusa":
        head = MedusaHeads(MedusaConfig(2, 1, target.hidden_size, target.vocab_size), torch.float32)
    else:
        config = eagle_config(target, **WIDE_HEADS[name])
        own = replace(config.layers, intermediate_size=128, num_kv_heads=2, head_dim=32)
        own = replace(own, rope=RopeConfig("default", 500.0, 32, 128, 128))
        head = EagleHead(replace(config, layers=own), torch.float32)
    random_weights(head)
    return head


@contextmanager
def given(head: EagleHead | MedusaHeads) -> Iterator[None]:
    """Engines made inside guess with a head that lies in no file."""
    load = loading.load_models

    def loaded(*arguments: Any) -> loading.Loaded:
        return load(*arguments)._replace(draft=LoadedDraft(head_kind(head.config), head))

    with patch("sametoken.engine.llm.load_models", loaded):
        yield


def llm_with(target: str, head: EagleHead | MedusaHeads, **options: Any) -> LLM:
    """A small engine whose draft is a head."""
    with given(head):
        return make_llm(target, **{"method": None, **options})


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Reference:
    """An EAGLE head over a whole sequence at once.

    Args:
        head: for its facts.
        weights: its parameters before they were packed.
        embed, output: the target's token vectors and output layer [V, H].
    """

    def __init__(self, head: EagleHead, weights: dict[str, Tensor], embed: Tensor, output: Tensor) -> None:
        self.config, self.weights = head.config, weights
        self.embed, self.output = weights.get("embed.weight", embed), weights.get("head.weight", output)
        self.ids = head.draft_ids

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.weights[f"{name}.weight"], self.config.layers.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        config = self.config
        if config.version == 1:
            return features
        if config.norm_before_fc:
            features = self._norm("input_norm", features)
        if config.fc_norm:
            parts = features.split(config.target_hidden_size, dim=1)
            features = torch.cat([self._norm(f"fc_norms.{i}", part) for i, part in enumerate(parts)], dim=1)
        return self._linear("fc", features)

    def run(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Outputs [S, H] of slots 0 .. S - 1 that read the tokens after them and hidden states [S, H]."""
        config, embedded = self.config, self.embed[torch.tensor(tokens)]
        if config.version == 1:
            x = self._linear("fc", torch.cat([embedded, hidden], dim=1))
            read = self._norm("blocks.0.attention_norm", x) if config.input_norm else x
        else:
            normed = self._norm("blocks.0.hidden_norm", hidden)
            x = normed if config.norm_before_residual else hidden
            read = torch.cat([self._norm("blocks.0.embed_norm", embedded), normed], dim=1)
        for i in range(config.layers.num_layers):
            if i:
                read = self._norm(f"blocks.{i}.attention_norm", x)
            x = x + self._attention(i, read)
            gate, up = self._linear(f"blocks.{i}.gate_up", self._norm(f"blocks.{i}.mlp_norm", x)).chunk(2, dim=1)
            x = x + self._linear(f"blocks.{i}.down", F.silu(gate) * up)
        return x

    def _attention(self, i: int, read: Tensor) -> Tensor:
        layers, count = self.config.layers, len(read)
        sizes = [layers.q_size, layers.kv_size, layers.kv_size]
        q, k, v = (
            part.view(count, -1, layers.head_dim).transpose(0, 1)
            for part in self._linear(f"blocks.{i}.qkv", read).split(sizes, dim=1)
        )
        if layers.qk_norm:
            q, k = self._norm(f"blocks.{i}.q_norm", q), self._norm(f"blocks.{i}.k_norm", k)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (x.repeat_interleave(layers.num_heads // layers.num_kv_heads, dim=0) for x in (k, v))
        distance = torch.arange(count).unsqueeze(1) - torch.arange(count)
        window = layers.sliding_windows[i]
        unseen = (distance < 0) | (distance >= (window or count))
        scores = (q @ k.transpose(1, 2) / layers.head_dim**0.5).masked_fill(unseen, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        return self._linear(f"blocks.{i}.out", mixed)

    def _rotated(self, x: Tensor) -> Tensor:  # [heads, S, D]
        dim = x.shape[-1]
        rates = self.config.layers.rope.theta ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(x.shape[1]).unsqueeze(1) * rates
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1) * sin

    def after(self, text: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        """[draft vocabulary] log-probabilities after a certain text (its last token pending) and a guessed path.

        Args:
            features: [len(text) - 1, W] of the text without the pending token.
        """
        tokens, hidden = list(text[1:]), self.fuse(features)
        for token in path:
            output = self.run(tokens, hidden)[-1:]
            # EAGLE-1 predicts features, which are what the output layer reads.
            normed = self.config.norm_output or self.config.version == 1
            recycled = self.last(output) if normed else output
            tokens.append(token)
            hidden = torch.cat([hidden, recycled])
        return F.linear(self.last(self.run(tokens, hidden)[-1:]), self.output)[0].log_softmax(-1)

    def last(self, output: Tensor) -> Tensor:
        return self._norm("norm", output) if self.config.last_norm else output


def weights_of(head: EagleHead) -> dict[str, Tensor]:
    """A copy of the parameters, to be taken before they are packed."""
    return {name: parameter.detach().clone() for name, parameter in head.named_parameters()}


def write_wide_heads(target: str, root: Path) -> dict[str, Path]:
    """Plain heads for a target of this shape, by name."""
    shape = shape_of(target)
    for name in WIDE_HEADS:
        write_head(wide_head(name, shape), root / name, shape, target_name=target)
    return {name: root / name for name in WIDE_HEADS}
