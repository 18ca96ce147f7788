"""Directories of large models as published, without weights: config.json and an index, with the sizes of the real ones.

Names, shapes and bytes are written down here from the published files' layouts, apart from the code under test.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Stored = tuple[str, tuple[int, ...], str]  # name, shape, dtype as safetensors has it
WIDTHS = {"BF16": 2, "F8_E4M3": 1, "U8": 1, "F32": 4, "I64": 8}

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "rms_norm_eps": 1e-05,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "head_dim": 128,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128,
    "num_key_value_heads": 4, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
    "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": YARN, "rms_norm_eps": 1e-05,
    "hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


class Big(NamedTuple):
    """A published model: its config.json, and whether its linears are stored in NVFP4 by Model-Optimizer."""

    config: dict[str, Any]
    nvfp4: bool = False


MODELS = {
    "nvidia/Llama-3.3-70B-Instruct-FP4": Big(
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        nvfp4=True,
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP4": Big(
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        nvfp4=True,
    ),
    "openai/gpt-oss-120b": Big(
        {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}
    ),
    "nvidia/Qwen3-235B-A22B-FP4": Big(
        {**QWEN, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
         "num_hidden_layers": 94, "num_attention_heads": 64},
        nvfp4=True,
    ),
    "Qwen/Qwen3-30B-A3B": Big(
        {**QWEN, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
         "num_hidden_layers": 48, "num_attention_heads": 32},
    ),
}  # fmt: skip
# EAGLE-3 heads of one Llama block of the target's width, with their own output head of 32000 tokens.
HEADS = {
    "nvidia/gpt-oss-120b-Eagle3-long-context": "openai/gpt-oss-120b",
    "nvidia/Qwen3-235B-A22B-Eagle3": "nvidia/Qwen3-235B-A22B-FP4",
}
DRAFT_VOCABULARY = 32000


def linear(name: str, outputs: int, inputs: int, nvfp4: bool) -> Iterator[Stored]:
    if not nvfp4:
        yield f"{name}.weight", (outputs, inputs), "BF16"
        return
    yield f"{name}.weight", (outputs, inputs // 2), "U8"
    yield f"{name}.weight_scale", (outputs, inputs // 16), "F8_E4M3"
    yield f"{name}.weight_scale_2", (1,), "F32"
    yield f"{name}.input_scale", (1,), "F32"


def tensors(big: Big) -> Iterator[Stored]:
    """All tensors of a model."""
    c = big.config
    hidden, heads, kv, size = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
    )
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), "BF16"
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        rows = {"q_proj": (heads * size, hidden), "k_proj": (kv * size, hidden), "v_proj": (kv * size, hidden),
                "o_proj": (hidden, heads * size)}  # fmt: skip
        for part, shape in rows.items():
            yield from linear(f"{layer}.self_attn.{part}", *shape, big.nvfp4)
            if c.get("attention_bias"):
                yield f"{layer}.self_attn.{part}.bias", shape[:1], "BF16"
        if c["model_type"] == "qwen3_moe":
            yield f"{layer}.self_attn.q_norm.weight", (size,), "BF16"
            yield f"{layer}.self_attn.k_norm.weight", (size,), "BF16"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (hidden,), "BF16"
        yield from _mlp(layer, big)
    yield "model.norm.weight", (hidden,), "BF16"
    yield "lm_head.weight", (c["vocab_size"], hidden), "BF16"


def _mlp(layer: str, big: Big) -> Iterator[Stored]:
    c, hidden = big.config, big.config["hidden_size"]
    if c["model_type"] == "gpt_oss":
        count, width = c["num_local_experts"], c["intermediate_size"]
        yield f"{layer}.self_attn.sinks", (c["num_attention_heads"],), "BF16"
        yield f"{layer}.mlp.router.weight", (count, hidden), "BF16"
        yield f"{layer}.mlp.router.bias", (count,), "BF16"
        for part, rows in (("gate_up_proj", 2 * width), ("down_proj", hidden)):
            yield f"{layer}.mlp.experts.{part}_blocks", (count, rows, 90, 16), "U8"
            yield f"{layer}.mlp.experts.{part}_scales", (count, rows, 90), "U8"
            yield f"{layer}.mlp.experts.{part}_bias", (count, rows), "BF16"
        return
    names, width = [f"{layer}.mlp"], c["intermediate_size"]
    if "num_experts" in c:
        yield f"{layer}.mlp.gate.weight", (c["num_experts"], hidden), "BF16"
        names, width = [f"{layer}.mlp.experts.{i}" for i in range(c["num_experts"])], c["moe_intermediate_size"]
    for name in names:
        yield from linear(f"{name}.gate_proj", width, hidden, big.nvfp4)
        yield from linear(f"{name}.up_proj", width, hidden, big.nvfp4)
        yield from linear(f"{name}.down_proj", hidden, width, big.nvfp4)


def nbytes(stored: Stored) -> int:
    size = WIDTHS[stored[2]]
    for n in stored[1]:
        size *= n
    return size


def write_model(name: str, place: Path) -> Path:
    """config.json, an index and no weights, in `place / name`."""
    big, directory = MODELS[name], place / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(big.config))
    if big.nvfp4:
        stated = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    stored = list(tensors(big))
    index = {
        "metadata": {"total_size": sum(map(nbytes, stored))},
        "weight_map": {each[0]: "model-00001-of-00002.safetensors" for each in stored},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_head(name: str, place: Path) -> Path:
    """config.json and a weight file that ends after its header, of an EAGLE-3 head in `place / name`."""
    target = MODELS[HEADS[name]].config
    keys = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
            "max_position_embeddings", "rope_theta")  # fmt: skip
    hidden, layers = target["hidden_size"], target["num_hidden_layers"]
    config = {
        **{key: target[key] for key in keys}, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "intermediate_size": 3 * hidden, "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCABULARY,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, layers // 2 - 1, layers - 4],
                         "use_aux_hidden_state": True},
    }  # fmt: skip
    query, key = (target[each] * target["head_dim"] for each in ("num_attention_heads", "num_key_value_heads"))
    width = config["intermediate_size"]
    matrices = {
        "fc": (hidden, 3 * hidden), "lm_head": (DRAFT_VOCABULARY, hidden), "norm": (hidden,),
        "midlayer.self_attn.q_proj": (query, 2 * hidden), "midlayer.self_attn.k_proj": (key, 2 * hidden),
        "midlayer.self_attn.v_proj": (key, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, query),
        "midlayer.mlp.gate_proj": (width, hidden), "midlayer.mlp.up_proj": (width, hidden),
        "midlayer.mlp.down_proj": (hidden, width), "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,), "midlayer.post_attention_layernorm": (hidden,),
    }  # fmt: skip
    stored = [(f"{part}.weight", shape, "BF16") for part, shape in matrices.items()]
    header, end = {}, 0
    for each in [*stored, ("d2t", (DRAFT_VOCABULARY,), "I64")]:
        header[each[0]] = {"dtype": each[2], "shape": each[1], "data_offsets": [end, end + nbytes(each)]}
        end += nbytes(each)
    text, directory = json.dumps(header).encode(), place / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return directory


def write_all(place: Path) -> None:
    """Every model and head."""
    for name in MODELS:
        write_model(name, place)
    for name in HEADS:
        write_head(name, place)
