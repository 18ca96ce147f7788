"""Conversion of a GGUF file's metadata to the keys of a config.json, and of its tensors' names.

Sources: llama.cpp's llama-arch.cpp (names) and convert_hf_to_gguf.py (reordered rows of q and k); `families`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sametoken.checkpoint.gguf.blocks import UNQUANTISED_TYPES, read_tensor
from sametoken.checkpoint.gguf.container import AGAIN, Container
from sametoken.checkpoint.gguf.families import (
    EACH,
    FAMILIES,
    FURTHER,
    QWEN,
    SHARED,
    WINDOW_KEY,
    GgufFamily,
    special_case,
)
from sametoken.errors import CheckpointError, SametokenError, UnsupportedModelError, shown
from sametoken.model.formats.coded import Coded

# Names in the file -> names in a checkpoint; within blk.N. and layers.N. for the second table.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_sinks": "self_attn", "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj", "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SCALE = re.compile(r"\.(input_)?scale$")  # scales of NVFP4: of a weight, read in `restored`, and of activations
BEHIND = re.compile(r"blk\.(\d+)\.nextn\.(\w+)\.weight")  # parts of prediction blocks (MTP) that other blocks lack
PREDICTION = {
    "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "embed_tokens": "embed_tokens",
    "shared_head_norm": "shared_head.norm", "shared_head_head": "shared_head.head",
}  # fmt: skip
BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Keys of an architecture -> keys of config.json. READ adds keys that are read elsewhere, or without effect.
SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}  # fmt: skip
READ = {
    *SIZES, *QWEN, *SHARED, "vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "attention.sliding_window", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear", "tensor_data_layout",
}  # fmt: skip


def config_of(container: Container) -> dict[str, Any]:
    """Content of config.json for a file's model.

    Raises:
        UnsupportedModelError: the architecture, or a value that affects the computation, is not implemented.
        CheckpointError: a value is missing.
    """
    architecture, family = str(container.metadata.get("general.architecture")), _family(container)
    stated = {
        key.removeprefix(f"{architecture}."): value
        for key, value in container.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    read = READ.union(family.sizes, family.more)
    if unknown := sorted(key for key, value in stated.items() if key not in read and value):
        words = f"{architecture}.{unknown[0]} is {shown(stated[unknown[0]])}"
        raise UnsupportedModelError(f"{container.file}: {words}, which is not supported; use another version")
    if "token_embd.weight" not in container.entries:
        raise CheckpointError(f"{container.file} has no token_embd.weight, expected a whole model with its weights")
    sizes = {**SIZES, **family.sizes}
    config = {ours: stated[key] for key, ours in sizes.items() if key in stated and (key != WINDOW_KEY or stated[key])}
    config |= {
        **family.facts,
        "architectures": [family.name],
        "model_type": family.model_type,
        "vocab_size": container.entries["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in container.entries,
        "dtype": "float32" if {entry.type.name for entry in container.entries.values()} == {"F32"} else "bfloat16",
        **_head(container, stated, config, family),
        **_rope(container, stated),
    }
    config |= {key: tensor in container.entries for key, tensor in family.biases.items()}
    try:
        config |= family.differs(stated, config)
    except SametokenError as error:
        raise type(error)(f"{container.file}: {error}") from error
    quantised = sorted({entry.type.name for entry in container.entries.values()} - UNQUANTISED_TYPES.keys())
    if quantised:
        config["quantization_config"] = {"quant_method": "gguf", "types": quantised}
    return config


# Part of a tensor's name -> computation that it needs and this decoder lacks.
LACKING = {
    "v.blk": "a reader of images",
    "cross_attn": "an encoder with cross-attention", "enc.": "an encoder", "token_types": "an encoder",
    "ssm_": "layers with a recurrent state (Mamba or linear attention)",
    "time_mix": "layers with a recurrent state (RWKV)", "shortconv": "short convolutions",
    "altup": "alternating updates of several hidden states", "indexer": "attention to tokens that an indexer selects",
    "position_embd": "learned position embeddings", "attn_norm_2": "attention and MLP side by side",
}  # fmt: skip


def _lacking(container: Container) -> str:
    """Computation that an unknown architecture needs, by the names of its tensors; "" if none is known."""
    found = (words for part, words in LACKING.items() if any(part in name for name in container.entries))
    return next((f"; it needs {words}, which this decoder does not compute" for words in found), "")


def _family(container: Container) -> GgufFamily:
    """Family of a file's model."""
    name = container.metadata.get("general.architecture")
    found = FAMILIES.get(special_case(str(name), container.metadata))
    if found is None:
        raise UnsupportedModelError(
            f"{container.file}: the architecture {shown(name)} is not supported in GGUF files"
            f"{_lacking(container)}; supported: {', '.join(FAMILIES)}"
        )
    return found


def _head(
    container: Container, stated: Mapping[str, Any], config: Mapping[str, Any], family: GgufFamily
) -> dict[str, Any]:
    """Size of a head, and the fraction of it that RoPE covers."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise CheckpointError(
            f"{container.file}: embedding_length is {shown(hidden)} and attention.head_count {shown(heads)}, expected "
            "positive integers, the same for all layers"
        )
    if "kv_lora_rank" in family.sizes.values():
        return {}  # sizes of latent attention, read in `differs`
    size = stated.get("attention.key_length", hidden // heads)
    if stated.get("attention.value_length", size) != size:
        raise UnsupportedModelError(f"{container.file}: keys and values of different sizes are not supported")
    rotated = stated.get("rope.dimension_count", size)
    if rotated == size:
        return {"head_dim": size}
    if not family.partial or not isinstance(rotated, int) or not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(
            f"{container.file}: RoPE of {shown(rotated)} of {shown(size)} dimensions is not supported"
        )
    return {"head_dim": size, "partial_rotary_factor": rotated / size}


def _rope(container: Container, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Scaling of RoPE; the divisors of the frequencies that Llama 3 files store as a tensor are exact."""
    kind = stated.get("rope.scaling.type", "none")
    original = stated.get("rope.scaling.original_context_length")
    stretched = {} if original is None else {"original_max_position_embeddings": original}
    shared, *by_length = (_divisors(container, name) for name in FREQUENCIES)
    attention = stated.get("rope.scaling.attn_factor")
    if shared is not None:
        factors = {"short_factor": shared, "long_factor": shared, "factor": 1.0, "attention_factor": 1.0}
        return {"rope_scaling": {"rope_type": "longrope", **factors}}
    if all(each is not None for each in by_length):
        factors = {"long_factor": by_length[0], "short_factor": by_length[1], "attention_factor": attention}
        return {"rope_scaling": {"rope_type": "longrope", **factors, **stretched}, **stretched}
    linear = stated.get("rope.scale_linear")
    factor = stated.get("rope.scaling.factor", linear)
    if kind == "none" and not linear:
        return {}
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{container.file}: rope.scaling.type {shown(kind)} without its factors is not supported, expected none, "
            "linear or yarn"
        )
    scaling = {"rope_type": "linear" if kind == "none" else kind, "factor": factor, **stretched}
    for key in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{key}" in stated:
            scaling[key] = stated[f"rope.scaling.yarn_{key}"]
    if kind == "yarn" and "rope.scaling.yarn_attn_factor" in stated:
        scaling["attention_factor"] = stated["rope.scaling.yarn_attn_factor"]
    if _family(container).model_type == "gpt_oss":
        scaling["truncate"] = False  # as published; the files do not state it
    return {"rope_scaling": scaling}


def _divisors(container: Container, name: str) -> list[float] | None:
    if name not in container.entries:
        return None
    found = read_tensor(container, name)
    if isinstance(found, Coded):
        raise UnsupportedModelError(f"{container.file}: {name} is quantised, expected F32")
    return [float(x) for x in found.flatten().tolist()]


def tensor_name(container: Container, name: str) -> str | None:
    """Name of a tensor in a Hugging Face checkpoint; unchanged if it has none, None if the tensor is not loaded.

    The name of a tensor with the weights of all experts has `EACH` in place of the number of the expert.
    """
    if name in FREQUENCIES or SCALE.search(name):
        return None
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    found = BLOCK.fullmatch(name)
    family = _family(container)
    if (behind := BEHIND.fullmatch(name)) is not None:
        stated = container.metadata.get(f"{container.metadata['general.architecture']}.{FURTHER}")
        return (
            f"model.layers.{behind[1]}.{PREDICTION[behind[2]]}.weight" if stated and behind[2] in PREDICTION else None
        )
    if found is not None and found[2] == "attn_v_b":
        return None  # a part that `restored` reads with attn_k_b
    path = None if found is None else family.names.get(found[2], INSIDE.get(found[2]))
    if found is None or path is None:
        return name
    if path.endswith("_bias"):
        return f"model.layers.{found[1]}.{path}"
    if found[2] == "attn_sinks":
        return f"model.layers.{found[1]}.{path}.sinks"
    if found[2] == "ffn_up" and f"blk.{found[1]}.ffn_gate.weight" not in container.entries:
        path = "mlp.gate_up_proj"
    return f"model.layers.{found[1]}.{path}.{found[3]}"


def single_weights(
    container: Container, name: str, ours: str, tensor: Tensor | Coded
) -> Iterator[tuple[str, Tensor | Coded]]:
    """Yield a tensor under its name in a checkpoint, split if it has the weights of all experts."""
    shape = container.entries[name].shape
    if EACH not in ours:
        flat = ours.endswith("shared_expert_gate.weight") and len(shape) == 1
        yield ours, tensor.view(1, -1) if flat and isinstance(tensor, Tensor) else tensor
        return
    for expert in range(shape[0]):
        rows = torch.arange(expert * shape[1], (expert + 1) * shape[1])
        yield ours.replace(EACH, str(expert)), tensor.outputs(rows) if isinstance(tensor, Coded) else tensor[expert]


def restored(container: Container, name: str, tensor: Tensor | Coded) -> Tensor | Coded:
    """Tensor as in the checkpoint, before llama.cpp reordered rows of q and k, shifted norms or split a weight."""
    architecture, family = container.metadata["general.architecture"], _family(container)
    if isinstance(tensor, Coded) and (scale := f"{name.removesuffix('weight')}scale") in container.entries:
        tensor = replace(tensor, factor=_factor(container, scale, tensor.shape[0]))
    if family.norm_shift and name.endswith("_norm.weight") and isinstance(tensor, Tensor):
        return tensor - family.norm_shift
    if name.endswith(".attn_k_b.weight"):
        return _keys_and_values(container, name)
    part = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(name.split(".")[-2])
    if part is None or not family.paired:
        return tensor
    heads = container.metadata.get(f"{architecture}.{part}", container.metadata[f"{architecture}.attention.head_count"])
    if not isinstance(heads, int) or heads < 1 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(f"{container.file}: {name} has {tensor.shape[0]} rows for {shown(heads)} heads")
    rows = torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
    return tensor.outputs(rows) if isinstance(tensor, Coded) else tensor[rows]


def _factor(container: Container, name: str, outputs: int) -> Tensor:
    """Factor of an NVFP4 weight, or of each expert of a layer, float32 [outputs]."""
    found = read_tensor(container, name)
    if isinstance(found, Coded) or outputs % found.numel():
        raise CheckpointError(f"{container.file}: {name} has no number for a share of {outputs} rows; {AGAIN}")
    return found.to(torch.float32).flatten().repeat_interleave(outputs // found.numel())


def _keys_and_values(container: Container, name: str) -> Tensor:
    """Weight [heads * (key + value), rank] of latent attention, which files store as keys and values by head.

    Keys are stored with inputs and outputs exchanged, so that their blocks cannot be kept: both are dequantised.
    """
    other = name.replace("attn_k_b", "attn_v_b")
    shapes = [container.entries[each].shape if each in container.entries else () for each in (name, other)]
    if [len(shape) for shape in shapes] != [3, 3] or shapes[0][:2] != (shapes[1][0], shapes[1][2]):
        words = f"{name} has shape {list(shapes[0])} and {other} {list(shapes[1])}, expected [heads, rank, key] and"
        raise CheckpointError(f"{container.file}: {words} [heads, value, rank]; {AGAIN}")
    found = [read_tensor(container, each) for each in (name, other)]
    numbers = [each.dequantize() if isinstance(each, Coded) else each.to(torch.float32) for each in found]
    keys, values = (each.view(shape) for each, shape in zip(numbers, shapes, strict=True))
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
