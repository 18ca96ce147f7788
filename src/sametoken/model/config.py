"""Configuration of a decoder, read from a `config.json`; `families.py` has the differences between families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from sametoken.model.expert_config import ExpertConfig
from sametoken.model.families import FAMILIES
from sametoken.model.family import Family
from sametoken.model.keys import MOST_HEADS, MOST_LAYERS, Keys
from sametoken.model.latent_config import LatentConfig
from sametoken.model.rope_config import Defaults, RopeConfig, overridden, read_rope, stretched_positions
from sametoken.model.unsupported import refused_architecture, refused_format
from sametoken.runtime.ranks import Columns

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
MOST_PLAIN_KEYS = 8  # key heads of a plain block for a model with latent attention
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder.

    Attributes:
        architecture: name in `config.json`, for example "LlamaForCausalLM".
        family: the `model_type` of transformers, for example "llama" or "qwen3_moe".
        sinks: true for attention sinks: learned scores per query head in the softmax, without keys (gpt-oss).
        experts: configuration of mixture-of-experts blocks, None if all blocks are dense.
        qkv_bias, out_bias, mlp_bias: true if these linears have a bias.
        qk_norm: true for an RMS norm over each query and key head before RoPE (Qwen 3), or over all heads together if
            `whole_qk_norm` (OLMo 2).
        norms: positions of a block's norms: "before" attention and MLP, "after" them, or both.
        norm_shift: number added to the weights of norms (Gemma's files store them minus 1).
        embed_scale, residual_scale, logits_scale: factors of token embeddings, of the results of attention and MLP, and
            of the output layer's products.
        attention_scale: factor of the products of queries and keys, None for 1 / sqrt(head_dim).
        attention_cap, logits_cap: scores become cap tanh(score / cap), before the softmax and at the end; None for no
            cap.
        sliding_windows: per layer, the number of tokens that a query sees, itself included; None for full attention.
        chunked: windows are adjacent chunks, and a query sees its own chunk up to itself (Llama 4).
        rotated_norm: true for a norm without weights over queries and keys after RoPE.
        query_scale: (floor, gain) of layers without RoPE, whose queries are scaled by position, see
            `rotary.query_scales`; None if they do not.
        rope: RoPE of the layers with full attention.
        layer_ropes: RoPE of each layer if they differ, None for a layer without RoPE; () if all have `rope`.
        max_position: number of positions of the RoPE tables: the model's own limit, or the engine's if it has one.
        further_layers: blocks after the last one that files may contain, which predict more tokens (MTP) and are no
            part of the decoder.
        latent: configuration of multi-head latent attention (MLA of DeepSeek), None for ordinary attention.
        dtype: torch name of the dtype that the weights were saved in.
        columns: logits that a rank computes, None for one process.
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
    whole_qk_norm: bool = False
    norms: tuple[str, ...] = ("before",)
    norm_shift: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    sinks: bool = False
    experts: ExpertConfig | None = None
    further_layers: int = 0
    latent: LatentConfig | None = None
    chunked: bool = False
    rotated_norm: bool = False
    query_scale: tuple[float, float] | None = None
    columns: Columns | None = None

    @property
    def head_outputs(self) -> int:
        """Number of logits of this process's output head."""
        columns = self.columns
        return self.vocab_size if columns is None or columns.whole_head else len(columns.own)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def usual_attention(self) -> bool:
        """True if attention is plain softmax attention, with or without windows."""
        return not (self.sinks or self.attention_cap or self.chunked or self.query_scale)

    @property
    def refused_on_cuda(self) -> str | None:
        """Error message about a feature of this model that the CUDA kernels lack, None if there is none."""
        lacking = {
            "attention with sinks (gpt-oss)": self.sinks,
            "latent attention (DeepSeek)": self.latent is not None,
            "attention in chunks (Llama 4)": self.chunked,
        }
        found = next((what for what, present in lacking.items() if present), None)
        return found and f"{found} is not supported on CUDA; use --device cpu"

    @property
    def cached_heads(self) -> int:
        """Number of key vectors that a layer caches for a token."""
        return self.num_kv_heads if self.latent is None else 1

    @property
    def cached_parts(self) -> tuple[int, ...]:
        """Sizes of the parts of a cached key, each of which has its own scale in a quantised cache."""
        return (self.head_dim,) if self.latent is None else (self.latent.rotated, self.latent.rank)

    @property
    def plain_heads(self) -> dict[str, int]:
        """Number of query and key heads and their size, for a block with ordinary attention on top of this model.

        These are the model's own; for latent attention, the head size is that of values, with at most 8 key heads.
        """
        if self.latent is None:
            return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        size = self.latent.value + self.latent.value % 2  # RoPE rotates pairs of numbers
        heads = max(1, self.hidden_size // size)
        return {"num_heads": heads, "num_kv_heads": math.gcd(heads, MOST_PLAIN_KEYS), "head_dim": size}

    @property
    def shared_values(self) -> bool:
        """True if the cached keys are also the values."""
        return self.latent is not None

    @property
    def read_size(self) -> int:
        """Width of the input of attention's output layer."""
        return self.q_size if self.latent is None else self.num_heads * self.latent.value

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """RoPE of each layer, None for a layer without RoPE."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def parameters(self) -> int:
        """Number of parameters of the weights."""
        hidden, width = self.hidden_size, self.intermediate_size
        norms = self.qk_norm * (self.q_size + self.kv_size if self.whole_qk_norm else 2 * self.head_dim)
        attention = hidden * (self.q_size + 2 * self.kv_size)
        if self.latent is not None:
            attention = self.latent.parameters(hidden, self.num_heads)
        attention += hidden * self.read_size + 2 * len(self.norms) * hidden + norms
        attention += self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.out_bias * hidden
        attention += self.sinks * self.num_heads
        dense = 3 * hidden * width + self.mlp_bias * (2 * width + hidden)
        outside = (self.vocab_size + (0 if self.tie_word_embeddings else self.head_outputs) + 1) * hidden
        found = self.num_layers * attention + outside
        if self.experts is None:
            return found + self.num_layers * dense
        sparse = sum(self.experts.layers)
        return found + sparse * self.experts.parameters(hidden) + (self.num_layers - sparse) * dense

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        max_seq_len: int | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Read a Hugging Face `config.json`, in transformers 4's or 5's spelling.

        Args:
            config: the file's content.
            max_seq_len: the engine's context limit in tokens, by default the model's own; it decides the factors of
                longrope.
            rope_scaling: keys of `options.rope.RopeScaling` in place of the file's RoPE, None for the file's own.

        Raises:
            UnsupportedModelError: the architecture, rotary kind, activation, dtype or quantisation is not implemented.
            CheckpointError: a key is missing or its value is of the wrong type.
            ConfigError: `max_seq_len` is below 1, or the model cannot have this RoPE.
        """
        if max_seq_len is not None and max_seq_len < 1:
            raise ConfigError(f"max_seq_len is {max_seq_len}, expected at least 1")
        architecture = Keys(config).architecture()
        if reason := refused_architecture(config, FAMILIES) or refused_format(config):
            raise UnsupportedModelError(reason)
        family = FAMILIES[architecture]
        keys = Keys(config) if family.inner is None else _inner(Keys(config), family)
        if rope_scaling:
            keys = overridden(keys, rope_scaling, family.defaults)
        plain = _plain(keys, family.defaults)
        model = replace(plain, **family.differs(keys, plain))
        if rope_scaling:
            model = replace(model, max_position=stretched_positions(model.rope, rope_scaling))
        return model if max_seq_len is None else replace(model, max_position=max_seq_len)


def _inner(outer: Keys, family: Family) -> Keys:
    """Keys of the decoder inside a model that also reads images; keys that both levels state come from the outer
    one.
    """
    names = "architectures", "eos_token_id", "bos_token_id", "dtype", "torch_dtype"
    whole = {key: outer.values.get(key) for key in names if outer.values.get(key) is not None}
    if not family.inner_tie:
        whole["tie_word_embeddings"] = outer.values.get("tie_word_embeddings")
    return Keys(outer.mapping("text_config")).over(whole, family.inner)


def _plain(keys: Keys, defaults: Defaults) -> ModelConfig:
    """Configuration with full attention and without biases, to which the family's function adds its differences."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads", most=MOST_HEADS)
    layers = keys.integer("num_hidden_layers", most=MOST_LAYERS)
    absent_kv = defaults.num_kv_heads if "num_key_value_heads" not in keys.values else None
    kv_heads = keys.integer("num_key_value_heads", absent_kv or heads, MOST_HEADS)
    head_dim = keys.integer(defaults.head_key, defaults.head_dim or hidden // heads, MOST_HEADS)
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
        activation=keys.choice(*defaults.activation, ACTIVATIONS),
        tie_word_embeddings=keys.flag("tie_word_embeddings", defaults.tied),
        sliding_windows=(None,) * layers,
        rope=rope,
        max_position=rope.max_position,
        eos_token_ids=keys.token_ids("eos_token_id", defaults.eos_token_ids),
        bos_token_id=next(iter(keys.token_ids("bos_token_id", defaults.bos_token_ids)), None),
        dtype=Keys({"dtype": str(saved).removeprefix("torch.")}).choice("dtype", "float32", DTYPES),
    )
