"""Settings of EAGLE heads from ModelOpt's configuration names.

Sources: `EagleConfig` and the default architectures of NVIDIA's Model-Optimizer, 0.33 to 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sametoken.errors import ConfigError, unknown_name
from sametoken.heads.eagle.architecture import THETA
from sametoken.heads.modelopt import FROZEN, ModelOptNames, ModelOptSettings
from sametoken.learning.training import Training
from sametoken.model.config import ACTIVATIONS, DTYPES, ModelConfig

VOCABULARY = "draft_vocab_cache"
WANTED = (
    f"; name the vocabulary by {VOCABULARY}: a directory of `sametoken prepare --draft-vocab-size`, or a file d2t.pt"
)
NESTED = "eagle_architecture_config"
LORA = "eagle_base_lora"

# Names of the loss and of reports, other than those of `LossSettings`.
LOSS = {"eagle_ttt_steps": "ttt_steps", "eagle_loss_decay_factor": "loss_decay"}
SWITCHES = ("eagle_self_logit_distillation", "eagle_hidden_state_distillation", "eagle_report_acc")

# Names of the architecture, with checks of their values. Older scripts have them at the top level.
ARCHITECTURE: dict[str, tuple[type, ...]] = {
    "num_hidden_layers": (int,), "hidden_size": (int,), "vocab_size": (int,), "draft_vocab_size": (int,),
    "intermediate_size": (int,), "num_attention_heads": (int,), "num_key_value_heads": (int,), "head_dim": (int,),
    "max_position_embeddings": (int,), "rms_norm_eps": (float, int), "rope_theta": (float, int),
    "initializer_range": (float, int), "attention_dropout": (float, int), "hidden_act": (str,), "torch_dtype": (str,),
    "rope_scaling": (Mapping,), "eagle_aux_hidden_state_layer_ids": (list, tuple), "sliding_window": (int,),
    "attention_bias": (bool,), "mlp_bias": (bool,), "bias": (bool,), "has_lm_head": (bool,), "model_type": (str,),
    "use_input_layernorm_in_first_layer": (bool,), "use_last_layernorm": (bool,), "use_aux_hidden_state": (bool,),
    "use_mtp_layernorm": (bool,), "parallel_draft_step": (int,), "parallel_draft_heads_num_layers": (int,),
    "norm_before_residual": (bool,), "norm_before_fc": (bool,), "fc_norm": (bool,), "norm_output": (bool,),
}  # fmt: skip
# Names that this module reads; `configure` of the objective reads the others.
OWN = ("rope_scaling", "initializer_range", "torch_dtype", "has_lm_head")

# Names with one supported value, and the reason.
ONLY: dict[str, tuple[Any, str]] = {
    "eagle_offline": (False, "hidden states on disk are for `sametoken prepare` and `sametoken train`"),
    "eagle_freeze_base_model": FROZEN,
    "eagle_reuse_base_decoder": (False, "a head has blocks of its own"),
    "eagle_decoder_type": ("llama", "a head has blocks as Llama has them"),
    "eagle_mix_hidden_states": (False, "every step is unrolled for every position"),
    "eagle_use_torch_compile": (False, "nothing is compiled; compile the model yourself"),
    "eagle_enable_nvtx": (False, "profile with torch.profiler"),
    "eagle_export_rope_scaling": ({}, "it would be served with another rotation than it was trained with; use "
                                      "rope_scaling in eagle_architecture_config"),
    LORA: (False, "drafts never change the target"),
    "use_mtp_layernorm": (False, "it belongs to multi-token prediction"),
    "parallel_draft_step": (1, "guesses are made one after the other"),
    "parallel_draft_heads_num_layers": (1, "guesses are made one after the other"),
    "attention_dropout": (0, "heads are trained without dropout"),
    "model_type": ("llama", "a head has blocks as Llama has them"),
}  # fmt: skip


class EagleModelOptNames(ModelOptNames):
    """ModelOpt's names for a kind of EAGLE head.

    Args:
        taps: true if the head reads several blocks of the target, false if it reads the last state.
    """

    def __init__(self, taps: bool) -> None:
        super().__init__(ONLY)
        self._taps = taps

    def read(self, mode: str, training: Training, config: Mapping[str, Any]) -> ModelOptSettings:
        given = _flat(config)
        fields = [name for name in training.head.model_fields if name not in ("eagle_config", "init_from")]
        losses = tuple(training.loss.model_fields)
        known = (*fields, *losses, *LOSS, *SWITCHES, *ARCHITECTURE, *ONLY, NESTED, VOCABULARY)
        lora = {name for name in given if name.startswith(LORA) and name != LORA}
        self.refuse(mode, {name: value for name, value in given.items() if name not in lora}, known)
        for name, value in given.items():
            _check(name, value)
        loss = {LOSS.get(name, name): value for name, value in given.items() if LOSS.get(name, name) in losses}
        architecture = {name: value for name, value in given.items() if name in ARCHITECTURE}
        head = {name: value for name, value in given.items() if name in fields and name not in architecture}
        self._check_version(architecture)
        if not given.get("eagle_self_logit_distillation", True):
            loss.setdefault("loss", "hard")
        if (matched := given.get("eagle_hidden_state_distillation")) is not None:
            loss |= self._matched(matched)
        report = given.get("eagle_report_acc", True)
        return ModelOptSettings(
            training.head(**head), training.loss(**loss), architecture, given.get(VOCABULARY), report
        )

    def _check_version(self, architecture: Mapping[str, Any]) -> None:
        """Raise ConfigError for settings that belong to another version of EAGLE."""
        if architecture.get("use_aux_hidden_state", self._taps) != self._taps:
            raise ConfigError(
                f"use_aux_hidden_state is {not self._taps}, but mode eagle3 reads several layers and eagle1 one"
            )
        if self._taps and not architecture.get("use_input_layernorm_in_first_layer", True):
            raise ConfigError("use_input_layernorm_in_first_layer is False, but EAGLE-3 always norms its token vectors")
        if not self._taps and architecture.get("eagle_aux_hidden_state_layer_ids"):
            raise ConfigError("eagle_aux_hidden_state_layer_ids is for mode eagle3; eagle1 reads the last layer")
        heads, kv_heads = architecture.get("num_attention_heads"), architecture.get("num_key_value_heads")
        if heads and kv_heads and heads % kv_heads:
            raise ConfigError(f"num_attention_heads is {heads}, expected a multiple of num_key_value_heads {kv_heads}")

    def _matched(self, matched: bool) -> dict[str, float]:
        """Loss options of EAGLE-1 for learning the target's hidden states too, which is the default."""
        if not self._taps:
            return {} if matched else {"feature_weight": 0.0, "guess_weight": 1.0}
        if matched:
            raise ConfigError(
                "eagle_hidden_state_distillation is True, but what an EAGLE-3 head hands on is no hidden state of the "
                "target; leave it out, or use mode eagle1"
            )
        return {}

    def configure(self, objective: Any, chosen: ModelOptSettings, target: ModelConfig, draft_ids: Tensor | None) -> Any:
        given = chosen.architecture
        size = target.vocab_size if draft_ids is None else len(draft_ids)
        if given.get("draft_vocab_size", size) != size:
            raise ConfigError(
                f"draft_vocab_size is {given['draft_vocab_size']}, expected {size}"
                + (WANTED if draft_ids is None else ", which the vocabulary has")
            )
        for name, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if given.get(name, expected) != expected:
                raise ConfigError(f"{name} is {given[name]}, expected the model's {expected}, or leave it out")
        known = {name: value for name, value in given.items() if name not in (*OWN, *ONLY)}
        config = objective.configure(chosen.head, target, size, known)
        layers = replace(
            config.layers, rope=_rope(given, config.layers) if "rope_scaling" in given else config.layers.rope,
            dtype=given.get("torch_dtype", target.dtype),
        )  # fmt: skip
        if layers.num_heads % layers.num_kv_heads:
            raise ConfigError(
                f"{layers.num_heads} attention heads, expected a multiple of {layers.num_kv_heads} key heads"
            )
        return replace(config, layers=layers, own_head=given.get("has_lm_head", config.own_head))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration with the nested architecture merged into the top level; names with the value None are dropped."""
    nested = config.get(NESTED) or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{NESTED} is {nested!r}, expected a mapping of names to values")
    if unknown := [name for name in nested if name not in ARCHITECTURE]:
        raise ConfigError(f"{NESTED}: {unknown_name('key', unknown[0], ARCHITECTURE)}")
    flat = {name: value for name, value in config.items() if name != NESTED and value is not None}
    for name, value in nested.items():
        if value is not None and flat.setdefault(name, value) != value:
            raise ConfigError(f"{name} is {flat[name]!r} and, in {NESTED}, {value!r}; leave one of them out")
    layers = {name: flat[name] for name in ("eagle_num_layers", "num_hidden_layers") if name in flat}
    if len(set(layers.values())) > 1:
        said = " and ".join(f"{name} {value!r}" for name, value in layers.items())
        raise ConfigError(f"got {said} for the head's blocks; name it once")
    return flat


def _check(name: str, value: Any) -> None:
    """Raise if the value is not allowed for its name."""
    if name.startswith(LORA) and name != LORA:
        raise ConfigError(f"{name}: {ONLY[LORA][1]}, so there is no adapter to train; leave it out")
    if name in ONLY:
        return
    kinds: tuple[type, ...] = (bool,) if name in SWITCHES else ARCHITECTURE.get(name, ())
    if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        raise ConfigError(f"{name} is {value!r}, expected {' or '.join(kind.__name__.lower() for kind in kinds)}")
    if kinds and not isinstance(value, bool | str | Mapping | list | tuple) and value <= 0:
        raise ConfigError(f"{name} is {value!r}, expected more than 0")
    choices = {"hidden_act": ACTIVATIONS, "torch_dtype": DTYPES}.get(name)
    if choices is not None and value not in choices:
        raise ConfigError(unknown_name(name, value, choices))


def _rope(given: Mapping[str, Any], layers: ModelConfig) -> Any:
    """RoPE configuration of `rope_scaling`, as transformers reads the config.json of a Llama."""
    described = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": layers.vocab_size, "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size, "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads, "num_hidden_layers": 1, "head_dim": layers.head_dim,
        "max_position_embeddings": layers.max_position, "rope_theta": given.get("rope_theta", THETA),
        "rope_scaling": dict(given["rope_scaling"]),
    }  # fmt: skip
    return ModelConfig.from_hf(described).rope
