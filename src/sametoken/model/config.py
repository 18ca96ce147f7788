"""Architecture facts: what a `config.json` says of a decoder, in our words, with one small function per family.

Defaults are those of transformers' config classes: a file that leaves a key out means the same here as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError, shown
from sametoken.model.keys import MOST_HEADS, MOST_LAYERS, MOST_POSITIONS, MOST_WINDOW, Keys
from sametoken.model.unsupported import refused_architecture, refused_format

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
DTYPES = ("float32", "float16", "bfloat16")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding facts; `rotary.py` turns them into tables. Fields that a kind does not use keep their defaults.

    Attributes:
        kind: one of ROPE_KINDS.
        theta: base of the frequencies.
        dim: rotated dimensions of a head, `head_dim * partial_rotary_factor`.
        max_position: positions that the whole model was made for.
        original_max_position: positions of pre-training, before scaling (llama3, yarn, longrope).
        factor: context stretch; for yarn and longrope, `max_position / original_max_position` where none is given.
        attention_factor: multiplies cos and sin (yarn, longrope); None means the kind's own formula.
        short_factor, long_factor: [dim / 2] divisors of the frequencies (longrope).
    """

    kind: str
    theta: float
    dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know of an architecture.

    Attributes:
        architecture: name in `config.json`, for example "LlamaForCausalLM".
        family: "llama", "mistral", "phi3", "qwen2" or "qwen3".
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
        projections = hidden * (2 * self.q_size + 2 * self.kv_size + 3 * width) + 2 * hidden + norms
        biases = self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.out_bias * hidden
        biases += self.mlp_bias * (2 * width + hidden)
        ends = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2) + hidden
        return self.num_layers * (projections + biases) + ends

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


@dataclass(frozen=True)
class _Defaults:
    """What a family's transformers code has where files leave a choice.

    Most are the values of absent keys, where None means "as many as query heads" and so on. `rope_names` are the rotary
    kinds by their names in files; `partial_rotation` says whether the code reads `partial_rotary_factor`.
    """

    family: str
    max_position: int
    original_max_position: int | None = None
    norm_eps: float = 1e-6
    num_kv_heads: int | None = None
    head_dim: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_ids: tuple[int, ...] = ()
    rope_names: Mapping[str, str] = field(default_factory=lambda: {kind: kind for kind in ROPE_KINDS})
    partial_rotation: bool = False


def _rope(keys: Keys, head_dim: int, defaults: _Defaults) -> RopeConfig:
    # transformers 5 writes `rope_parameters` and lets a `rope_scaling` that is also present win.
    name = "rope_scaling" if keys.mapping("rope_scaling") else "rope_parameters"
    values = keys.mapping(name)
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedModelError(
            f"{name!r} of config.json differs per layer type; supported: one rotary embedding for all layers"
        )
    rope = Keys(values, f"{name!r} of config.json")
    named = values.get("rope_type", values.get("type", "default"))
    if not isinstance(named, str) or named not in defaults.rope_names:
        raise UnsupportedModelError(
            f"rotary kind {shown(named)} is not supported for {defaults.family}; "
            f"supported: {', '.join(defaults.rope_names)}"
        )
    kind = defaults.rope_names[named]
    dim = _rotated(keys, rope, head_dim, kind, defaults)
    max_position = keys.integer("max_position_embeddings", defaults.max_position, MOST_POSITIONS)
    stretched = "original_max_position_embeddings"
    inner = rope.integer(stretched, max_position, MOST_POSITIONS)
    original = keys.integer(stretched, defaults.original_max_position or inner, MOST_POSITIONS)
    plain = RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", keys.number("rope_theta", 10000.0)),
        dim=dim,
        max_position=max_position,
        original_max_position=original,
    )
    return _scaled(plain, rope)


def _rotated(keys: Keys, rope: Keys, head_dim: int, kind: str, defaults: _Defaults) -> int:
    """How many dimensions of a head are rotated.

    Only Phi-3's code reads `partial_rotary_factor`. The other families' plain rotation ignores it, and with a scaled
    one transformers itself cannot run such a file.
    """
    partial = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if not defaults.partial_rotation:
        if kind != "default" and partial != 1:
            raise UnsupportedModelError(
                f"config.json has 'partial_rotary_factor' {partial} with rotary kind {kind!r}, which models of family "
                f"{defaults.family} cannot have; expected 1, or no such key"
            )
        partial = 1.0
    dim = int(head_dim * partial)
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(
            f"{dim} of the {head_dim} dimensions of a head are rotated ('partial_rotary_factor' {partial}), "
            "expected an even number up to the head's own: is config.json complete?"
        )
    return dim


def _scaled(plain: RopeConfig, rope: Keys) -> RopeConfig:
    """`plain` with the fields that its kind reads."""
    stretch = plain.max_position / plain.original_max_position
    match plain.kind:
        case "linear" | "dynamic":
            return replace(plain, factor=rope.number("factor"))
        case "llama3":
            return replace(
                plain,
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        case "yarn":
            return replace(
                plain,
                factor=rope.number("factor", stretch),
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                attention_factor=rope.optional_number("attention_factor"),
                mscale=rope.optional_number("mscale"),
                mscale_all_dim=rope.optional_number("mscale_all_dim"),
                truncate=rope.flag("truncate", True),
            )
        case "longrope":
            return replace(
                plain,
                factor=rope.number("factor", stretch),
                attention_factor=rope.optional_number("attention_factor"),
                short_factor=rope.numbers("short_factor", plain.dim // 2),
                long_factor=rope.numbers("long_factor", plain.dim // 2),
            )
    return plain


def _plain(keys: Keys, defaults: _Defaults) -> ModelConfig:
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
    rope = _rope(keys, head_dim, defaults)
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


def _chosen_layers(plain: ModelConfig, keys: Keys) -> tuple[int | None, ...]:
    """Qwen: `layer_types` where written, else the layers from `max_window_layers` on, if windows are used at all."""
    used = keys.flag("use_sliding_window", False) and keys.values.get("sliding_window", 4096) is not None
    window = keys.integer("sliding_window", 4096, MOST_WINDOW) if used else None
    first = keys.values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise CheckpointError(f"config.json has {shown(first)} for 'max_window_layers', expected an integer")
    by_depth = ["sliding_attention" if used and i >= first else "full_attention" for i in range(plain.num_layers)]
    types = keys.values.get("layer_types") or by_depth
    check_layer_types(types, plain.num_layers, "config.json")
    if not used and "sliding_attention" in types:
        raise CheckpointError(
            "config.json has 'sliding_attention' in 'layer_types' but no window ('use_sliding_window' is false, or "
            "'sliding_window' is null), expected both or neither: is this file complete?"
        )
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
    plain = _plain(keys, _Defaults("llama", max_position=2048, eos_token_ids=(2,), bos_token_ids=(1,)))
    bias = keys.flag("attention_bias", False)
    return replace(plain, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias", False))


def _mistral(keys: Keys) -> ModelConfig:
    defaults = _Defaults("mistral", max_position=131072, num_kv_heads=8, eos_token_ids=(2,), bos_token_ids=(1,))
    plain = _plain(keys, defaults)
    return replace(plain, sliding_windows=_every_layer(plain, keys, absent=4096))


def _phi3(keys: Keys) -> ModelConfig:
    defaults = _Defaults(
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
    plain = _plain(keys, _Defaults("qwen2", max_position=32768, num_kv_heads=32))
    return replace(plain, qkv_bias=True, sliding_windows=_chosen_layers(plain, keys))


def _qwen3(keys: Keys) -> ModelConfig:
    plain = _plain(keys, _Defaults("qwen3", max_position=32768, num_kv_heads=32, head_dim=128))
    bias = keys.flag("attention_bias", False)
    return replace(plain, qkv_bias=bias, out_bias=bias, qk_norm=True, sliding_windows=_chosen_layers(plain, keys))


FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
