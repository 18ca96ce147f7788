"""What other engines do with a head's files, restated from their loaders: renames, flags, ids, the weights they have.

Sources: vLLM 0.33 `llama_eagle3.py`, `llama_eagle.py`; SGLang 0.5.23 `llama_eagle3.py`, `llama_eagle.py`; TensorRT-LLM
`modeling_speculative.py`; speculators 0.9 `models/eagle3`. Each reader returns what its network would compute with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Read(NamedTuple):
    """A head as an engine sees it.

    Attributes:
        weights: by the plain names `fc`, `layers.N.*`, `norm`, `lm_head`, `embed_tokens`, `input_norm`, `fc_norm.N`.
        taps: blocks whose outputs are read; () where the last hidden state is.
        flags: what changes the computation without a weight.
        draft_ids: the target's ids of its tokens; None where it takes them for the whole vocabulary.
    """

    weights: dict[str, Tensor]
    taps: tuple[int, ...]
    flags: dict[str, bool]
    draft_ids: Tensor | None


class EngineError(Exception):
    """The engine would refuse, or compute with weights that were never loaded."""


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BLOCK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
BLOCK += ("mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
IDS = "eagle_aux_hidden_state_layer_ids"


def default_taps(layers: int) -> tuple[int, ...]:
    return 1, layers // 2 - 1, layers - 4


def modules(
    config: dict[str, Any], flags: dict[str, bool], version: int, first: tuple[str, ...], taps: int = 3
) -> set[str]:
    """Names of the weights of the network that an engine builds from config.json."""
    names = {"fc.weight", "lm_head.weight", "embed_tokens.weight"}
    names |= {"norm.weight"} if version == 3 else set()
    for i in range(config["num_hidden_layers"]):
        names |= {f"layers.{i}.{part}.weight" for part in BLOCK}
        names |= {f"layers.{i}.{part}.weight" for part in (first if i == 0 else ("input_layernorm",))}
        if config.get("attention_bias"):
            names.add(f"layers.{i}.self_attn.o_proj.bias")
        if config.get("qkv_bias", config.get("attention_bias")):
            names |= {f"layers.{i}.self_attn.{p}_proj.bias" for p in "qkv"}
        if config.get("mlp_bias"):
            names |= {f"layers.{i}.mlp.{p}_proj.bias" for p in ("gate", "up", "down")}
        if config["model_type"] == "qwen3":
            names |= {f"layers.{i}.self_attn.{p}_norm.weight" for p in "qk"}
    if flags.get("norm_before_fc"):
        names.add("input_norm.weight")
    if flags.get("fc_norm"):
        names |= {f"fc_norm.{i}.weight" for i in range(taps)}
    return names


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A configuration as an engine sees it that never reads some keys."""
    return {key: value for key, value in config.items() if key not in keys}


def one_norm(flags: dict[str, bool]) -> dict[str, bool]:
    """Norms for each tap come instead of the one over all of them."""
    return {**flags, "norm_before_fc": flags["norm_before_fc"] and not flags["fc_norm"]}


def check(weights: dict[str, Tensor], names: set[str], strict: bool, shared: set[str]) -> dict[str, Tensor]:
    """Weights of the network; a foreign one is an error or passed over, a missing one may only be the target's."""
    if strict and (foreign := weights.keys() - names):
        raise EngineError(f"no such weights: {sorted(foreign)}")
    if missing := names - weights.keys() - shared:
        raise EngineError(f"weights stay random: {sorted(missing)}")
    return {name: tensor for name, tensor in weights.items() if name in names}


def renamed(tensors: dict[str, Tensor], rules: list[tuple[str, str]]) -> dict[str, Tensor]:
    for pattern, ours in rules:
        tensors = {re.sub(pattern, ours, name): tensor for name, tensor in tensors.items()}
    return tensors


def fused(config: dict[str, Any], taps: tuple[int, ...]) -> int:
    """How many taps vLLM and SGLang make `fc` for: as many as `eagle_config` names, else three."""
    count = config.get("num_aux_hidden_states") or len(config.get("eagle_config", {}).get(IDS) or default_taps(9))
    if count != len(taps) or count == 1:
        raise EngineError(f"fc for {count} taps, {len(taps)} are captured")
    return int(count)


def mapped(tensors: dict[str, Tensor]) -> Tensor | None:
    d2t = tensors.pop("d2t", None)
    return None if d2t is None else d2t + torch.arange(len(d2t))


def vllm_eagle_3(config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> Read:
    assert None not in config.values(), "null fails strict validation of the configuration"
    if config["architectures"][0] not in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"):
        raise EngineError("no such architecture")
    eagle = config.get("eagle_config", {})
    flags = one_norm({name: bool(config.get(name, eagle.get(name, False))) for name in FLAGS})
    taps = tuple(i - 1 for i in config[IDS]) if IDS in config else default_taps(layers)
    tensors = renamed(dict(tensors), [(r"^midlayer\.", "layers.0.")])
    tensors.pop("t2d", None)
    ids = mapped(tensors)
    if ids is None and config.get("draft_vocab_size", config["vocab_size"]) < config["vocab_size"]:
        ids = torch.arange(config["draft_vocab_size"])
    shared = {"embed_tokens.weight", "lm_head.weight"}
    names = modules(without(config, "qkv_bias"), flags, 3, ("hidden_norm", "input_layernorm"), fused(config, taps))
    return Read(check(tensors, names, True, shared), taps, flags, ids)


def sglang_eagle_3(config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> Read:
    if config["architectures"] != ["LlamaForCausalLMEagle3"]:
        raise EngineError("no such architecture")
    if "draft_vocab_size" not in config:
        raise EngineError("AttributeError: draft_vocab_size")
    eagle = config.get("eagle_config", {})
    flags = {name: bool(config.get(name, eagle.get(name, False))) for name in FLAGS}
    flags = one_norm(flags | {"norm_before_residual": False})
    taps = tuple(eagle[IDS]) if IDS in eagle else default_taps(layers)
    rules = [(r"^layers\.0\.", "midlayer."), (r"^midlayer\.", "layers.0.")]
    tensors = renamed(dict(tensors), rules)
    tensors.pop("t2d", None)
    ids = mapped(tensors)
    if config["num_hidden_layers"] > 1:
        raise EngineError("further blocks have another residual")
    shared = {"embed_tokens.weight"} | ({"lm_head.weight"} if config["draft_vocab_size"] is None else set())
    seen = {**without(config, "qkv_bias", "attention_bias", "mlp_bias"), "model_type": "llama"}
    names = modules(seen, flags, 3, ("hidden_norm", "input_layernorm"), fused(config, taps))
    weights = check(tensors, names, False, shared)
    weights.pop("embed_tokens.weight", None)  # replaced by the target's
    return Read(weights, taps, flags, ids)


def trtllm_eagle_3(config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> Read:
    if "draft_vocab_size" not in config or "Eagle3" not in config["architectures"][0]:
        raise EngineError("not recognised as EAGLE-3")
    config["attention_bias"]  # an attribute that it reads without a default
    eagle = config.get("eagle_config", {})
    flags = {
        "norm_before_residual": False,
        "norm_before_fc": bool(eagle.get("norm_before_fc", False)),
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False) or eagle.get("return_hidden_post_norm", False)),
    }
    taps = tuple(eagle[IDS]) if IDS in eagle else default_taps(layers)
    count = config["num_hidden_layers"]
    rule = (r"^layers\.0\.", "midlayer.") if count == 1 else (r"^layers\.(\d+)\.", r"midlayer.\1.")
    tensors = renamed(dict(tensors), [rule])
    ids = mapped(tensors)
    back = [(r"^midlayer\.(?=\d)", "layers."), (r"^midlayer\.", "layers.0.")]
    further = [
        (r"^(layers\.[1-9]\d*)\.input_layernorm", r"\1.unknown"),
        (r"^(layers\.[1-9]\d*)\.hidden_norm", r"\1.input_layernorm"),
    ]
    tensors = renamed(tensors, back + further)
    shared = {"lm_head.weight"}
    if config.get("target_hidden_size", config["hidden_size"]) == config["hidden_size"]:
        shared.add("embed_tokens.weight")
        if "embed_tokens.weight" in tensors:
            raise EngineError("no such weights: embed_tokens")
    flags = one_norm(flags)
    seen = {**without(config, "qkv_bias"), "model_type": "llama"}
    names = modules(seen, flags, 3, ("hidden_norm", "input_layernorm"), len(taps))
    return Read(check(tensors, names, True, shared), taps, flags, ids)


def speculators_eagle_3(config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> Read:
    if config["speculators_model_type"] != "eagle3":
        raise EngineError("not registered")
    inner = config["transformer_layer_config"]
    flags = {name: config[name] for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise EngineError("mutually exclusive")
    proposals = [p["proposal_type"] for p in config["speculators_config"]["proposal_methods"]]
    assert config["speculators_config"]["default_proposal_method"] in proposals
    tensors = dict(tensors)
    ids = mapped(tensors)
    tensors.pop("t2d", None)
    names = modules(without(inner, "qkv_bias"), flags, 3, ("hidden_norm", "input_layernorm"))
    if flags["fc_norm"]:
        names |= {f"fc_norm.{i}.weight" for i in range(len(config[IDS]))}
    return Read(check(tensors, names, True, {"embed_tokens.weight"}), tuple(i - 1 for i in config[IDS]), flags, ids)


def vllm_eagle_1(config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> Read:
    assert None not in config.values()
    if config["architectures"][0] not in ("LlamaForCausalLM", "EagleLlamaForCausalLM"):
        raise EngineError("no such architecture")
    names = modules(config, {}, 1, ())
    return Read(check(dict(tensors), names, True, {"embed_tokens.weight", "lm_head.weight"}), (), {}, None)


def sglang_eagle_1(config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> Read:
    if config["architectures"] != ["LlamaForCausalLMEagle"]:
        raise EngineError("no such architecture")
    names = modules(without(config, "qkv_bias"), {}, 1, ()) | {"fc.bias"}
    weights = check(dict(tensors), names, False, {"embed_tokens.weight", "lm_head.weight"})
    for target_s in ("embed_tokens.weight", "lm_head.weight"):
        weights.pop(target_s, None)
    return Read(weights, (), {}, None)


Reader = Callable[[dict[str, Any], dict[str, Tensor], int], Read]
READERS: dict[tuple[str, int], Reader] = {
    ("vllm", 3): vllm_eagle_3,
    ("sglang", 3): sglang_eagle_3,
    ("trtllm", 3): trtllm_eagle_3,
    ("speculators", 3): speculators_eagle_3,
    ("vllm", 1): vllm_eagle_1,
    ("sglang", 1): sglang_eagle_1,
}
