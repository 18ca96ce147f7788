"""Report of `sametoken doctor` about EAGLE heads: configuration in words, and warnings about lost acceptance."""

from __future__ import annotations

from collections.abc import Iterator

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.model.config import ModelConfig
from sametoken.model.rope_config import RopeConfig

PARTS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "fc_bias",
    "input_norm",
    "joined_norms",
    "hidden_first",
    "last_norm",
)


def facts_of(config: EagleConfig, target: ModelConfig, reads: str) -> dict[str, str]:
    """Names and values of the configuration, as text.

    Args:
        reads: hidden states of the target that the head reads, as text.
    """
    layers = config.layers
    whole = config.draft_vocab_size == target.vocab_size
    return {
        "reads": reads,
        "blocks": f"{layers.num_layers} of {layers.hidden_size}, {layers.num_heads} heads, "
        f"{layers.num_kv_heads} of keys" + (", q_norm and k_norm" if layers.qk_norm else ""),
        "norms and biases": ", ".join(part for part in PARTS if getattr(config, part)) or "none",
        "token vectors": "its own" if config.own_embed else "the target's",
        "output layer": "its own" if config.own_head else "the target's",
        "vocabulary": f"{config.draft_vocab_size} of {target.vocab_size} tokens" + (" (all)" if whole else ""),
        "rotation": _rope_words(layers.rope),
        "the target's": _rope_words(target.rope),
    }


def warnings(head: EagleHead, target: ModelConfig) -> Iterator[str]:
    """Yield warnings about properties of the files that may cost acceptance."""
    context = head.config.layers.rope.max_position
    if context < target.rope.max_position:
        yield (
            f"made for {context} positions, the target for {target.rope.max_position}: guesses beyond may be worse, "
            "and engines that keep the draft's limit may refuse longer prompts"
        )
    ids = set(head.draft_ids.tolist())
    if silent := [token for token in target.eos_token_ids if token not in ids]:
        tokens = ", ".join(map(str, silent))
        yield f"it cannot guess the target's end token {tokens}: every answer ends with a refused guess"


def _rope_words(rope: RopeConfig) -> str:
    stretch = "" if rope.kind == "default" else f", {rope.kind}" + (f" x {rope.factor:g}" if rope.factor != 1 else "")
    return f"theta {rope.theta:g}{stretch}, {rope.max_position} positions"
