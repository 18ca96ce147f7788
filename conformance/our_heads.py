"""Random EAGLE-3 heads of every variant for a small target: what is exported to the peers."""

from __future__ import annotations

from dataclasses import replace

import torch

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.taps import default_taps
from sametoken.model.config import ModelConfig

REDUCED = 200  # draft vocabulary


def variants(target: ModelConfig) -> dict[str, EagleConfig]:
    """Configurations by name, for a Llama target."""
    layers = replace(
        target, num_layers=1, sliding_windows=(None,), tie_word_embeddings=False, norm_eps=1e-5,
        rope=replace(target.rope, theta=50000.0),
    )  # fmt: skip
    plain = EagleConfig(layers, 3, default_taps(target.num_layers), target.hidden_size, target.vocab_size)
    reduced = replace(plain, draft_vocab_size=REDUCED)
    qwen = replace(layers, family="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True)
    return {
        "full vocabulary": plain,
        "reduced vocabulary": reduced,
        "other taps": replace(reduced, taps=(0, 2, 5)),
        "norm_before_residual": replace(reduced, norm_before_residual=True),
        "norm_before_fc": replace(reduced, norm_before_fc=True),
        "EAGLE 3.1": replace(reduced, fc_norm=True, norm_output=True),
        "own embedding": replace(reduced, own_embed=True),
        "two layers": replace(reduced, layers=replace(layers, num_layers=2, sliding_windows=(None, None))),
        "sliding window": replace(reduced, layers=replace(layers, sliding_windows=(8,))),
        "Qwen 3 layers": replace(reduced, layers=qwen),
    }


def random_head(config: EagleConfig, seed: int) -> EagleHead:
    """A head whose norms and weights are all random, and whose draft vocabulary is too."""
    head = EagleHead(config, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.1 * noise)
    size, vocabulary = config.draft_vocab_size, config.layers.vocab_size
    if size < vocabulary:
        ids = torch.randperm(vocabulary, generator=generator)[:size].sort().values
        head.d2t.copy_(ids - torch.arange(size))
    return head
