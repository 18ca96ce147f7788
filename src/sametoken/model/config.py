"""Architecture facts: what a `config.json` says of a decoder, in our words, with one small function per family.

Defaults are those of transformers' config classes: a file that leaves a key out means the same here as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError, shown
from sametoken.model.expert_config import ExpertConfig, read_experts, sparse_layers
from sametoken.model.keys import MOST_HEADS, MOST_LAYERS, MOST_WINDOW, Keys
from sametoken.model.rope_config import Defaults, RopeConfig, read_rope
from sametoken.model.unsupported import refused_architecture, refused_format

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
LOCAL_EXPERTS = ("num_local_experts", "num_experts")
DTYPES = ("float32", "float16", "bfloat16")
# Of gpt-oss, where a file states no rotation.
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
NO_WINDOW = (
    "config.json has 'sliding_attention' in 'layer_types' but no window ('use_sliding_window' is false, or "
    "'sliding_window' is null), expected both or neither: is this file complete?"
)


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know of an architecture.

    Attributes:
        architecture: name in `config.json`, for example "LlamaForCausalLM".
        family: the `model_type` of transformers, for example "llama" or "qwen3_moe".
        sinks: a learned score per query head takes part in the softmax of attention, without a key (gpt-oss).
        experts: of blocks that have them in place of one MLP, None where all blocks are dense.
        qkv_bias, out_bias, mlp_bias: which linears carry a bias.
        qk_norm: an RMS norm over each query and key head before rotation (Qwen 3).
        sliding_windows: per layer, how many tokens a query sees, itself included; None is full attention.
        max_position: positions the decoder has rotations for: the model's own limit, or the engine's where it has one.
        dtype: torch name of the dtype that the weights were saved in.
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    experts: ExpertConfig | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Numbers in the weights."""
        hidden, width, norms = self.hidden_size, self.intermediate_size, 2 * self.head_dim if self.qk_norm else 0
        attention = hidden * (2 * self.q_size + 2 * self.kv_size) + 2 * hidden + norms
        attention += self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.out_bias * hidden
        attention += self.sinks * self.num_heads
        dense = 3 * hidden * width + self.mlp_bias * (2 * width + hidden)
        ends = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2) + hidden
        found = self.num_layers * attention + ends
        if self.experts is None:
            return found + self.num_layers * dense
        sparse = sum(self.experts.layers)
        return found + sparse * self.experts.parameters(hidden) + (self.num_layers - sparse) * dense

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_seq_len: int | None = None) -> ModelConfig:
        """Read a Hugging Face `config.json`, in transformers 4's or 5's spelling.

        Args:
            config: the file's content.
            max_seq_len: the engine's context limit in tokens, by default the model's own; longrope chooses by it.

        Raises:
            UnsupportedModelError: the architecture, rotary kind, activation, dtype or quantisation is not implemented.
            CheckpointError: a key is missing or its value is not of the kind it must be.
            ConfigError: `max_seq_len` is below 1.
        """
        if max_seq_len is not None and max_seq_len < 1:
            raise ConfigError(f"max_seq_len is {max_seq_len}, expected at least 1")
        keys = Keys(config)
        architecture = keys.architecture()
        if reason := refused_architecture(config, FAMILIES) or refused_format(config):
            raise UnsupportedModelError(reason)
        model = FAMILIES[architecture](keys)
        return model if max_seq_len is None else replace(model, max_position=max_seq_len)


def _plain(keys: Keys, defaults: Defaults) -> ModelConfig:
    """A decoder with full attention and without biases; the family's function replaces what differs."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads", most=MOST_HEADS)
    layers = keys.integer("num_hidden_layers", most=MOST_LAYERS)
    absent_kv = defaults.num_kv_heads if "num_key_value_heads" not in keys.values else None
    kv_heads = keys.integer("num_key_value_heads", absent_kv or heads, MOST_HEADS)
    head_dim = keys.integer("head_dim", defaults.head_dim or hidden // heads, MOST_HEADS)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json has {heads} 'num_attention_heads' and {kv_heads} 'num_key_value_heads', "
            "expected a multiple: is this file complete?"
        )
    rope = read_rope(keys, head_dim, defaults)
    saved = keys.values.get("dtype") or keys.values.get("torch_dtype") or "float32"
    return ModelConfig(
        architecture=keys.architecture(),
        family=defaults.family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", defaults.norm_eps),
        activation=keys.choice("hidden_act", "silu", ACTIVATIONS),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        sliding_windows=(None,) * layers,
        rope=rope,
        max_position=rope.max_position,
        eos_token_ids=keys.token_ids("eos_token_id", defaults.eos_token_ids),
        bos_token_id=next(iter(keys.token_ids("bos_token_id", defaults.bos_token_ids)), None),
        dtype=Keys({"dtype": str(saved).removeprefix("torch.")}).choice("dtype", "float32", DTYPES),
    )


def _every_layer(plain: ModelConfig, keys: Keys, absent: int | None) -> tuple[int | None, ...]:
    """One `sliding_window` for all layers; `null` is full attention and an absent key means `absent`."""
    window = keys.values.get("sliding_window", absent)
    return (None if window is None else keys.integer("sliding_window", absent, MOST_WINDOW),) * plain.num_layers


def _chosen_layers(plain: ModelConfig, keys: Keys, alternating: bool = False) -> tuple[int | None, ...]:
    """Qwen: `layer_types` where written, else the layers from `max_window_layers` on, if windows are used at all.

    `alternating`: without `layer_types`, it is every other layer before `max_window_layers`.
    """
    used = keys.flag("use_sliding_window", False) and keys.values.get("sliding_window", 4096) is not None
    window = keys.integer("sliding_window", 4096, MOST_WINDOW) if used else None
    first = keys.values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise CheckpointError(f"config.json has {shown(first)} for 'max_window_layers', expected an integer")
    windowed = [i % 2 == 0 and i < first if alternating else i >= first for i in range(plain.num_layers)]
    by_depth = ["sliding_attention" if used and each else "full_attention" for each in windowed]
    types = keys.values.get("layer_types") or by_depth
    check_layer_types(types, plain.num_layers, "config.json")
    if not used and "sliding_attention" in types:
        raise CheckpointError(NO_WINDOW)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def check_layer_types(types: Any, layers: int, where: str) -> None:
    """Refuses `layer_types` that are not one known kind of attention per layer.

    Raises:
        CheckpointError: they are not a list of so many names.
        UnsupportedModelError: a name is not known.
    """
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(f"{where} has {shown(types)} for 'layer_types', expected one name per layer")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(
            f"'layer_types' of {where} names {sorted(unknown)}; supported: sliding_attention, full_attention"
        )


def _llama(keys: Keys) -> ModelConfig:
    plain = _plain(keys, Defaults("llama", max_position=2048, eos_token_ids=(2,), bos_token_ids=(1,)))
    bias = keys.flag("attention_bias", False)
    return replace(plain, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias", False))


def _mistral(keys: Keys) -> ModelConfig:
    defaults = Defaults("mistral", max_position=131072, num_kv_heads=8, eos_token_ids=(2,), bos_token_ids=(1,))
    plain = _plain(keys, defaults)
    return replace(plain, sliding_windows=_every_layer(plain, keys, absent=4096))


def _phi3(keys: Keys) -> ModelConfig:
    defaults = Defaults(
        "phi3",
        max_position=4096,
        original_max_position=4096,
        norm_eps=1e-5,
        partial_rotation=True,
        eos_token_ids=(32000,),
        bos_token_ids=(1,),
        # "su" and "yarn" are what early Phi-3 files called longrope.
        rope_names={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    )
    plain = _plain(keys, defaults)
    return replace(plain, sliding_windows=_every_layer(plain, keys, absent=None))


def _qwen2(keys: Keys) -> ModelConfig:
    plain = _plain(keys, Defaults("qwen2", max_position=32768, num_kv_heads=32))
    return replace(plain, qkv_bias=True, sliding_windows=_chosen_layers(plain, keys))


def _qwen3(keys: Keys) -> ModelConfig:
    plain = _plain(keys, Defaults("qwen3", max_position=32768, num_kv_heads=32, head_dim=128))
    bias = keys.flag("attention_bias", False)
    return replace(plain, qkv_bias=bias, out_bias=bias, qk_norm=True, sliding_windows=_chosen_layers(plain, keys))


def _mixtral(keys: Keys) -> ModelConfig:
    defaults = Defaults(
        "mixtral", max_position=131072, norm_eps=1e-5, num_kv_heads=8, eos_token_ids=(2,), bos_token_ids=(1,), theta=1e6
    )
    plain = _plain(keys, defaults)
    experts = read_experts(
        keys, LOCAL_EXPERTS, 8, chosen=2, width=plain.intermediate_size, normalised=True,
        layers=(True,) * plain.num_layers,
    )  # fmt: skip
    return replace(plain, sliding_windows=_every_layer(plain, keys, absent=None), experts=experts)


def _qwen2_moe(keys: Keys) -> ModelConfig:
    plain = _plain(keys, Defaults("qwen2_moe", max_position=32768, num_kv_heads=16))
    experts = read_experts(
        keys, ("num_experts",), 60, chosen=4, layers=sparse_layers(keys),
        width=keys.integer("moe_intermediate_size", 1408), normalised=keys.flag("norm_topk_prob", False),
        shared=keys.integer("shared_expert_intermediate_size", 5632),
    )  # fmt: skip
    windows = _chosen_layers(plain, keys, alternating=True)
    return replace(plain, qkv_bias=keys.flag("qkv_bias", True), sliding_windows=windows, experts=experts)


def _qwen3_moe(keys: Keys) -> ModelConfig:
    plain = _plain(keys, Defaults("qwen3_moe", max_position=32768, num_kv_heads=4))
    bias = keys.flag("attention_bias", False)
    used = keys.flag("use_sliding_window", False)
    windows = _every_layer(plain, keys, absent=4096) if used else plain.sliding_windows
    types = keys.values.get("layer_types")
    if types is not None:
        check_layer_types(types, plain.num_layers, "config.json")
        if "sliding_attention" in types and not used:
            raise CheckpointError(NO_WINDOW)
    experts = read_experts(
        keys, LOCAL_EXPERTS, 128, chosen=8, layers=sparse_layers(keys),
        width=keys.integer("moe_intermediate_size", 768), normalised=keys.flag("norm_topk_prob", False),
    )  # fmt: skip
    return replace(plain, qkv_bias=bias, out_bias=bias, qk_norm=True, sliding_windows=windows, experts=experts)


def _gpt_oss(keys: Keys) -> ModelConfig:
    if not keys.mapping("rope_scaling") and not keys.mapping("rope_parameters"):
        keys = Keys({**keys.values, "rope_parameters": GPT_OSS_ROPE})
    defaults = Defaults("gpt_oss", max_position=131072, norm_eps=1e-5, num_kv_heads=8, head_dim=64, theta=150000.0)
    plain = _plain(keys, defaults)
    types = keys.values.get("layer_types")
    if types is None:
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(plain.num_layers)]
    check_layer_types(types, plain.num_layers, "config.json")
    windows = _every_layer(plain, keys, absent=128)
    if "sliding_attention" in types and None in windows:
        raise CheckpointError(NO_WINDOW)
    bias = keys.flag("attention_bias", True)
    experts = read_experts(
        keys, LOCAL_EXPERTS, 128, chosen=4, width=plain.intermediate_size, normalised=True,
        layers=(True,) * plain.num_layers,
    )  # fmt: skip
    clamp = keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)
    return replace(
        plain,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        experts=replace(experts, bias=True, clamp=clamp),
        sliding_windows=tuple(
            window if kind == "sliding_attention" else None for kind, window in zip(types, windows, strict=True)
        ),
    )


FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "GptOssForCausalLM": _gpt_oss,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
