"""Small GGUF files, written by the library gguf from transformers' models, with blocks of every type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny_models
from sametoken import embedded
from sametoken.files import json_object

# What llama.cpp calls families, where it is not their model_type.
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gpt_oss": "gpt-oss", "mixtral": "llama", "mistral": "llama",
    "olmo3": "olmo2", "gemma3_text": "gemma3", "qwen3_vl_text": "qwen3vl", "glm": "chatglm",
    "glm4_moe": "glm4moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "llama4_text": "llama4",
}  # fmt: skip
LLAMA4 = {
    "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": None, "moe_layers": None,
    "layer_types": None, "use_qk_norm": True,
}  # fmt: skip
# By tiny model: what files of its family cannot state, as llama.cpp takes it for granted.
UNSTATED: dict[str, dict[str, Any]] = {
    "gemma-2": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma-3": {"query_pre_attn_scalar": 32},
    "gemma-3-images": {"query_pre_attn_scalar": 16, "final_logit_softcapping": None},
    "deepseek-v3": {"rope_parameters": tiny_models.rope("yarn", mscale=0.7, mscale_all_dim=0.7, **tiny_models.YARN)},
    "deepseek-v3-plain": {"rope_interleave": True},
    "gpt-oss": {"swiglu_limit": 7.0},
    "llama-4": {**LLAMA4, "num_hidden_layers": 5},
    "llama-4-images": {**LLAMA4, "num_hidden_layers": 5, "num_experts_per_tok": 1},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen-2-moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "smollm-3": {"num_hidden_layers": 5, "no_rope_layers": None},
}
PAIRED = ("llama", "mistral", "mixtral", "granite", "smollm3")  # pairs of a rotation lie side by side in their files
# Types that the library cannot write, and where the steps (float16) lie in their blocks; offsets' steps come second.
STEPS = {
    Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.Q3_K: (108,), Type.Q2_K: (80, 82), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,), Type.IQ1_S: (0,), Type.IQ1_M: (), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,), Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,), Type.IQ3_S: (0,), Type.NVFP4: (),
}  # fmt: skip


def blocks(weight: np.ndarray, kind: Type, seed: int = 0) -> np.ndarray:
    """The bytes of a weight [out, in]; of types that the library cannot write, random ones of its size."""
    if kind not in STEPS:
        return gguf.quants.quantize(weight, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    random, shape = np.random.default_rng(seed), (weight.shape[0], weight.shape[1] // numbers)
    made = random.integers(0, 256, (*shape, size), dtype=np.uint8)
    steps = (random.uniform(0.5, 1, (*shape, 2)) * float(weight.std()) / 500).astype(np.float16)
    steps[..., 1] *= np.float16(8)  # offsets that centre the values
    if kind == Type.Q6_K:
        made[..., 192:208] = random.integers(-31, 31, (*shape, 16)).astype(np.int8).view(np.uint8)
    if kind == Type.NVFP4:
        made[..., :4] = random.integers(1, 24, (*shape, 4))
    if kind == Type.IQ1_M:  # the upper halves of four words are the step
        step = steps[..., :1].copy().view(np.uint16)
        words = made[..., 48:].copy().view(np.uint16) & 0xFFF
        words |= (step >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
        made[..., 48:] = words.view(np.uint8)
    for number, place in enumerate(STEPS[kind]):
        made[..., place : place + 2] = steps[..., number : number + 1].copy().view(np.uint8)
    return made.reshape(weight.shape[0], -1)


def meant(data: np.ndarray, kind: Type) -> torch.Tensor:
    """What the library says that blocks mean, float32."""
    return torch.from_numpy(gguf.quants.dequantize(data, kind).copy())


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], Type],
    *,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tokens: Sequence[str] | None = None,
) -> PreTrainedModel:
    """Writes `model` as llama.cpp's converter does, and leaves in it what the file means.

    Args:
        kind_of: type of a matrix by its name in the file.
        metadata: adds what else the file has.
        tokens: a SentencePiece-like vocabulary, one token a character by default.
    """
    config: Any = model.config.get_text_config()
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_rotation(writer, config)
    add_family(writer, config)
    if tokens is None:
        add_characters(writer, config.vocab_size)
    metadata(writer)
    for i, (name, stored, put) in enumerate(stored_tensors(model, architecture)):
        large = stored.dim() > 1 and "ffn_gate_inp" not in name and name.endswith(".weight")
        kind = kind_of(name) if large else Type.F32
        if stored.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Type.F16  # as llama-quantize falls back
        data = blocks(stored.numpy().reshape(-1, stored.shape[-1]), kind, i)
        writer.add_tensor(name, data.reshape(*stored.shape[:-1], -1), raw_dtype=kind)
        put(meant(data, kind).view(stored.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def stored_tensors(
    model: PreTrainedModel, architecture: str
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """Name and numbers of every tensor of the file, and what puts other numbers into the model in their place."""
    config: Any = model.config.get_text_config()
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        name = name.replace("language_model.", "")
        if "vision_tower" in name or "vision_model" in name or "visual" in name or "projector" in name:
            continue
        stating = config if config.model_type == "llama4_text" else model.config  # its outer part's word does not count
        if name == "lm_head.weight" and stating.tie_word_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        path = module.rpartition("self_attn.")[2]
        if kind == "e_score_correction_bias":
            yield f"blk.{module.split('.')[2]}.exp_probs_b.bias", parameter.float(), parameter.copy_
        elif path == "kv_b_proj":
            yield from latent_tensors(f"blk.{module.split('.')[2]}.attn", parameter, config)
        elif module.endswith((".mlp.experts", ".feed_forward.experts")):
            prefix = f"blk.{module.split('.')[2]}.ffn"
            yield from expert_tensors(prefix, kind, parameter, config.model_type)
        elif kind == "sinks":
            yield f"{known.get_name(name)}.weight", parameter.float(), parameter.copy_
        elif config.model_type in PAIRED and path in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if path == "q_proj" else config.num_key_value_heads
            pairs = parameter.view(heads, 2, -1, *parameter.shape[1:]).transpose(1, 2)
            yield (
                f"{known.get_name(module)}.{kind}",
                pairs.reshape(parameter.shape).float(),
                lambda found, at=pairs: at.copy_(found.view(at.shape)),
            )
        elif module.endswith("norm") and config.model_type.startswith("gemma"):
            yield (
                f"{known.get_name(module)}.{kind}",
                parameter.float() + 1,
                lambda found, at=parameter: at.copy_(found - 1),
            )
        else:
            yield f"{known.get_name(module)}.{kind}", parameter.float(), parameter.copy_


def latent_tensors(
    prefix: str, parameter: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """Keys by head with their inputs as outputs, and values by head."""
    heads, sizes = config.num_attention_heads, [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = parameter.view(heads, sum(sizes), -1).split(sizes, 1)
    for name, part in (("k_b", keys.transpose(1, 2)), ("v_b", values)):
        yield f"{prefix}_{name}.weight", part.contiguous().float(), part.copy_


def expert_tensors(
    prefix: str, kind: str, parameter: torch.Tensor, family: str
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """The experts' gates, ups and downs [experts, out, in], or biases [experts, out]."""
    ending = "bias" if kind.endswith("_bias") else "weight"
    alternating = family == "gpt_oss"
    outputs = parameter.transpose(1, 2) if family in ("gpt_oss", "llama4_text") and ending == "weight" else parameter
    if kind.startswith("down"):
        parts = {"down": outputs}
    elif alternating:
        parts = {"gate": outputs[:, ::2], "up": outputs[:, 1::2]}
    else:
        parts = dict(zip(("gate", "up"), outputs.chunk(2, 1), strict=True))
    for part, view in parts.items():
        yield f"{prefix}_{part}_exps.{ending}", view.contiguous().float(), view.copy_


def add_rotation(writer: gguf.GGUFWriter, config: Any) -> None:
    """Sizes of a head, and the rotation of layers with full attention."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):
        size = config.qk_rope_head_dim
        writer.add_key_length(config.kv_lora_rank + size)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + size)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        if (stretch := config.rope_parameters.get("mscale_all_dim")) is not None:
            writer.add_rope_scaling_yarn_log_mul(0.1 * stretch)
    else:
        writer.add_key_length(size)
        writer.add_value_length(size)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    dim = int(size * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
    if (original := rope.get("original_max_position_embeddings")) is not None and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    if rope["rope_type"] == "llama3":
        plain = 1 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        stretched = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double().numpy()
        writer.add_tensor("rope_freqs.weight", (plain / stretched).astype(np.float32))
    if (local := config.rope_parameters.get("sliding_attention")) is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])


def add_family(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys that only some families have."""
    kind = config.model_type
    if kind.startswith("gemma") or kind in ("olmo3", "gpt_oss", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if kind in ("olmo3", "gemma3_text"):
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if kind.startswith("gemma") and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "qwen3_vl_text":
        writer.add_num_deepstack_layers(1)
    if (routed := getattr(config, "n_routed_experts", None)) is not None:
        writer.add_expert_count(routed)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
        if kind != "deepseek_v2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if kind != "deepseek_v2" or config.topk_method != "greedy":
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    elif (count := getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)) is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if kind != "mixtral":
            writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_characters(writer: gguf.GGUFWriter, size: int) -> None:
    """A vocabulary of unknown, BOS, EOS and printable characters, without merges."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", *(chr(33 + i) for i in range(size - 4))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, *[1] * (size - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def add_pieces(writer: gguf.GGUFWriter, content: dict[str, Any], template: str) -> None:
    """The vocabulary of a tokenizer.json with SentencePiece's BPE: the earlier a merge, the higher the score."""
    model = content["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks = {"".join(pair): -float(i) for i, pair in reversed(list(enumerate(model["merges"])))}
    special = {token["content"]: 2 if token["content"] == "<unk>" else 3 for token in content["added_tokens"]}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
    writer.add_token_types([special.get(token, 6 if token.startswith("<0x") else 1) for token in tokens])
    for add, token in ((writer.add_bos_token_id, "<s>"), (writer.add_eos_token_id, "</s>"),
                       (writer.add_unk_token_id, "<unk>")):  # fmt: skip
        add(model["vocab"][token])
    writer.add_chat_template(template)


def embedded_gguf(folder: Path, name: str, kind: Type, **ids: int) -> tuple[Path, Path]:
    """An embedded model as a GGUF file, and the directory that it was made from.

    Args:
        ids: further keys of the tokenizer, for example `fim_pre_token_id`.
    """
    source = Path(embedded.target(name) if name == "embedded" else embedded.draft(name))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = Path(embedded.target("embedded"))
    content, template = json_object(tokenizer / "tokenizer.json"), (tokenizer / "chat_template.jinja").read_text()
    file = folder / f"{name}.gguf"

    def metadata(writer: gguf.GGUFWriter) -> None:
        add_pieces(writer, content, template)
        for key, token in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{key}", token)

    write_gguf(file, model, lambda name: kind, metadata=metadata, tokens=())
    return file, tokenizer
