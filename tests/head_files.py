"""Random heads of every shape and their files, for tests of formats; weights differ in every number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.model.config import ModelConfig

HIDDEN, VOCAB, LAYERS, DRAFT_VOCAB = 16, 40, 8, 12
FACTS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 20, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
TARGET = ModelConfig.from_hf({**FACTS, "num_hidden_layers": LAYERS, "rope_theta": 500000.0})


def layers(count: int = 1, **changes: Any) -> ModelConfig:
    """A draft's own blocks: a rotation that is not the target's, a context that is shorter."""
    plain = ModelConfig.from_hf({**FACTS, "num_hidden_layers": count, "max_position_embeddings": 48})
    return replace(plain, max_position=TARGET.max_position, **changes)


def eagle_3(**changes: Any) -> EagleConfig:
    made = {"layers": layers(), "version": 3, "taps": (1, 3, 4), "draft_vocab_size": DRAFT_VOCAB} | changes
    return EagleConfig(target_hidden_size=HIDDEN, **made)


def eagle_1(**changes: Any) -> EagleConfig:
    made = {"layers": layers(), "fc_bias": True, "last_norm": False, "own_head": False} | changes
    return EagleConfig(
        version=1, taps=(), target_hidden_size=HIDDEN, draft_vocab_size=VOCAB, **made
    )  # fmt: skip


def medusa(**changes: Any) -> MedusaConfig:
    made = {"num_heads": 3, "num_layers": 1, "dtype": "float32"} | changes
    return MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, **made)


def random_head(config: EagleConfig | MedusaConfig, seed: int = 0) -> Any:
    """A head whose every number is its own; its draft vocabulary is an arbitrary set of tokens."""
    generator = torch.Generator().manual_seed(seed)
    kind = EagleHead if isinstance(config, EagleConfig) else MedusaHeads
    head = kind(config, torch.float32)
    for parameter in head.parameters():
        parameter.data.normal_(0.5, 0.3, generator=generator)
    if isinstance(config, EagleConfig) and config.draft_vocab_size < VOCAB:
        ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
        head.d2t = ids - torch.arange(len(ids))
    return head


def read_files(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors as they are on disk."""
    (weights,) = directory.glob("*.safetensors")
    return json.loads((directory / "config.json").read_text()), load_file(weights)


def write_files(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> Path:
    """A directory as somebody else would have written it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory


def causal(q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
    """Attention over the slots of one sequence without a cache."""
    count, groups = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    ahead = torch.arange(count)[:, None] - torch.arange(count)[None]
    hidden = (ahead < 0) | (ahead >= (window or count))
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return mixed.reshape(count, -1)


def outputs(head: Any, seed: int = 0) -> Tensor:
    """What a head computes from random features, its two first steps side by side."""
    generator = torch.Generator().manual_seed(seed)
    config = head.config
    if isinstance(config, MedusaConfig):
        x = torch.randn(5, HIDDEN, generator=generator)
        return torch.cat(head.logits(x) if config.own_heads else head.states(x), dim=-1)
    width = HIDDEN * (len(config.taps) if config.version == 3 else 1)
    embedded = torch.randn(7, config.layers.hidden_size, generator=generator)
    hidden = head.fuse(torch.randn(7, width, generator=generator))
    # Positions beyond the draft's own context, where it has none of the target's tables.
    rope = head.rotation(torch.arange(40, 47))
    first = head(embedded, hidden, rope, causal)
    second = head(embedded, head.recycle(first), rope, causal)
    both = torch.cat([first, second])
    return head.logits(both) if config.own_head else head.normed(both)
