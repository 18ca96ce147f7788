"""New heads for a target: their architecture from settings, a file or the target's own, and their first weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sametoken.checkpoint.places import draft_directory
from sametoken.errors import ConfigError, unknown_name
from sametoken.heads.anyhead import HeadConfig
from sametoken.heads.eagle.config import EagleConfig, default_taps
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.modules import initialise
from sametoken.heads.read import read_head
from sametoken.model.config import ModelConfig, RopeConfig
from sametoken.train.dataset.extraction import parse_taps
from sametoken.train.settings import HeadSettings, read_keys

THETA = 10000.0  # a draft's rotation is its own; this is what the published heads were trained with

# Keys of a head's config.json, as ModelOpt, SpecForge and transformers name them, and ours.
BLOCK_KEYS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "hidden_act": "activation",
    "max_position_embeddings": "max_position",
    "attention_bias": "qkv_bias",
    "mlp_bias": "mlp_bias",
}
HEAD_KEYS = {
    "use_input_layernorm_in_first_layer": "input_norm",
    "use_last_layernorm": "last_norm",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
    "bias": "fc_bias",
}
OTHER_KEYS = ("eagle_aux_hidden_state_layer_ids", "rope_theta", "sliding_window")
# Follow from the target, the mode or the draft vocabulary; a file may repeat them but not change them.
FIXED_KEYS = ("hidden_size", "vocab_size", "draft_vocab_size", "use_aux_hidden_state", "torch_dtype", "dtype")


def head_config(
    settings: HeadSettings, target: ModelConfig, draft_vocab_size: int, architecture: Mapping[str, Any] | None = None
) -> HeadConfig:
    """The architecture that the settings describe.

    Args:
        architecture: what a file named by `eagle_config` would say, which then is not read.

    Raises:
        ConfigError: a key of `eagle_config` is unknown or contradicts the target, or the target has no such blocks.
    """
    if not settings.eagle:
        return MedusaConfig(
            settings.medusa_num_heads, settings.medusa_num_layers, target.hidden_size, target.vocab_size,
            settings.medusa_own_heads,
        )  # fmt: skip
    version = 3 if settings.method == "eagle3" else 1
    given = read_keys("--eagle-config", settings.eagle_config) if architecture is None else architecture
    fixed = {
        "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab_size,
        "use_aux_hidden_state": version == 3, "torch_dtype": target.dtype, "dtype": target.dtype,
    }  # fmt: skip
    if version == 3:
        fixed["use_input_layernorm_in_first_layer"] = True  # its token vectors are always normed
    _check_keys(given, fixed, settings.eagle_config)
    taps = _taps(settings, target, given)
    blocks = _blocks(settings, target, given)
    flags: dict[str, Any] = {"last_norm": version == 3}
    if version == 3:
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        flags |= {name: bool(getattr(settings, name)) for name in names}
    else:
        flags |= {"fc_bias": settings.fc_bias, "own_head": False}
    flags |= {ours: given[key] for key, ours in HEAD_KEYS.items() if key in given}
    if version == 3:
        flags.pop("input_norm", None)  # a norm of version 1
    return EagleConfig(blocks, version, taps, target.hidden_size, draft_vocab_size, **flags)


def _taps(settings: HeadSettings, target: ModelConfig, given: Mapping[str, Any]) -> tuple[int, ...]:
    if settings.method != "eagle3":
        return default_taps(1, target.num_layers)
    listed = given.get("eagle_aux_hidden_state_layer_ids")
    return parse_taps(",".join(map(str, listed)) if listed else settings.taps or "eagle3", target.num_layers)


def _blocks(settings: HeadSettings, target: ModelConfig, given: Mapping[str, Any]) -> ModelConfig:
    """The draft's own blocks: those of a Llama as wide as the target, unless said otherwise."""
    values = {ours: given[key] for key, ours in BLOCK_KEYS.items() if key in given}
    layers = values.pop("num_layers", settings.eagle_num_layers)
    biased = values.get("qkv_bias", False)  # a Llama's `attention_bias` is of all its projections
    window = given.get("sliding_window", settings.draft_window)
    head_dim, positions = values.get("head_dim", target.head_dim), values.get("max_position", target.max_position)
    rope = RopeConfig("default", float(given.get("rope_theta", THETA)), head_dim, positions, positions)
    return replace(
        target, architecture="LlamaForCausalLM", family="llama", tie_word_embeddings=False, qk_norm=False,
        num_layers=layers, sliding_windows=(window,) * layers, rope=rope, dtype="bfloat16",
        **{"qkv_bias": biased, "out_bias": biased, "mlp_bias": False, **values},
    )  # fmt: skip


def _check_keys(given: Mapping[str, Any], fixed: Mapping[str, Any], file: str | None) -> None:
    known = (*BLOCK_KEYS, *HEAD_KEYS, *OTHER_KEYS, *FIXED_KEYS)
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"--eagle-config {file}: {unknown_name('key', key, known)}")
        if key in fixed and value != fixed[key]:
            raise ConfigError(f"--eagle-config {file}: {key} is {value!r}, expected {fixed[key]!r}, or leave it out")


def new_head(
    settings: HeadSettings, target: ModelConfig, target_head: Tensor, draft_ids: Tensor | None, seed: int
) -> EagleHead | MedusaHeads:
    """A head to train, in float32: with fresh weights, or those of `init_from`.

    Args:
        target_head: [V, H] the target's output layer, from which the head's starts.
        draft_ids: int64 [Vd] ids that an EAGLE-3 head can guess, None for all.

    Raises:
        ConfigError: the settings contradict each other or the target.
        CheckpointError: the head of `init_from` cannot be read.
        DraftMismatchError: it belongs to another target.
    """
    if settings.method != "eagle3" and draft_ids is not None:
        raise ConfigError(f"a draft vocabulary is for eagle3 heads; leave --draft-vocab-size out for {settings.mode}")
    device = target_head.device
    if settings.init_from is not None:
        return _warm(settings, target, draft_ids, device)
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    config = head_config(settings, target, size)
    with torch.device(device):
        head = empty_head(config)
    if isinstance(head, EagleHead) and draft_ids is not None:
        head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    generator = torch.Generator(device).manual_seed(seed)
    initialise(head, target_head, generator)
    return head


def empty_head(config: HeadConfig) -> EagleHead | MedusaHeads:
    """A head of this architecture in float32, its weights not set."""
    return EagleHead(config, torch.float32) if isinstance(config, EagleConfig) else MedusaHeads(config, torch.float32)


def _warm(
    settings: HeadSettings, target: ModelConfig, draft_ids: Tensor | None, device: torch.device
) -> EagleHead | MedusaHeads:
    loaded = read_head(draft_directory(str(settings.init_from)), target, torch.float32, device, pack=False)
    config = loaded.config
    head: EagleHead | MedusaHeads = loaded.module
    found = "medusa" if isinstance(config, MedusaConfig) else f"eagle{config.version}"
    if found != settings.method:
        raise ConfigError(f"--init-from {settings.init_from} is of kind {found}, but --mode is {settings.mode}")
    facts: tuple[str, Any, Any]
    if isinstance(config, MedusaConfig):
        facts = ("--medusa-num-heads", config.num_heads, settings.medusa_num_heads)
    else:
        facts = ("--taps", config.taps, config.taps if settings.taps is None else _taps(settings, target, {}))
    option, own, asked = facts
    if asked != own:
        raise ConfigError(f"--init-from {settings.init_from} has {option} {own}, got {asked}; its architecture is kept")
    if isinstance(head, EagleHead) and draft_ids is not None and not torch.equal(head.draft_ids.cpu(), draft_ids):
        raise ConfigError(
            f"--init-from {settings.init_from} guesses among {len(head.d2t)} tokens, the data's draft vocabulary has "
            f"{len(draft_ids)}, and they differ; prepare the data without --draft-vocab-size to keep the head's"
        )
    return head
