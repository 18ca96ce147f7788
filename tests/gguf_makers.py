"""Small GGUF files, written by the library gguf from transformers' models, with blocks of every type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, PreTrainedModel

from sametoken import embedded
from sametoken.files import json_object

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gpt_oss": "gpt-oss", "mixtral": "llama"}
K_TYPES = (Type.Q4_K, Type.Q5_K, Type.Q6_K)


def blocks(weight: np.ndarray, kind: Type, seed: int = 0) -> np.ndarray:
    """The bytes of a weight [out, in]; of the K types, which the library cannot write, random ones of its size."""
    if kind not in K_TYPES:
        return gguf.quants.quantize(weight, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    random, shape = np.random.default_rng(seed), (weight.shape[0], weight.shape[1] // numbers)
    made = random.integers(0, 256, (*shape, size), dtype=np.uint8)
    steps = (random.uniform(0.5, 1, (*shape, 2)) * float(weight.std()) / 500).astype(np.float16).view(np.uint8)
    if kind == Type.Q6_K:
        made[..., 192:208] = random.integers(-31, 31, (*shape, 16)).astype(np.int8).view(np.uint8)
        made[..., 208:] = steps[..., :2]
    else:
        steps.view(np.float16)[..., 1] *= np.float16(8)  # offsets that centre the values
        made[..., :4] = steps
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
    config: Any = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if tokens is None:
        add_characters(writer, config.vocab_size)
    if config.model_type in ARCHITECTURES:
        add_experts(writer, config)
    metadata(writer)
    for i, (name, stored, put) in enumerate(stored_tensors(model)):
        large = stored.dim() > 1 and "ffn_gate_inp" not in name and name.endswith(".weight")
        kind = kind_of(name) if large else Type.F32
        data = blocks(stored.numpy().reshape(-1, stored.shape[-1]), kind, i)
        writer.add_tensor(name, data.reshape(*stored.shape[:-1], -1), raw_dtype=kind)
        put(meant(data, kind).view(stored.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """Name and numbers of every tensor of the file, and what puts other numbers into the model in their place."""
    config: Any = model.config
    for name, parameter in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if module in outside:
            yield f"{outside[module]}.{kind}", parameter.float(), parameter.copy_
            continue
        layer, path = module.split(".", 3)[2:]
        if path == "mlp.experts":
            yield from expert_tensors(f"blk.{layer}.ffn", kind, parameter, config.model_type == "gpt_oss")
        elif kind == "sinks":
            yield f"blk.{layer}.attn_sinks.weight", parameter.float(), parameter.copy_
        elif config.model_type in ("llama", "mixtral") and path in ("self_attn.q_proj", "self_attn.k_proj"):
            size, rest = config.head_dim, parameter.shape[1:]  # pairs of a rotation lie side by side
            pairs = parameter.view(-1, 2, size // 2, *rest).transpose(1, 2)
            yield (
                f"blk.{layer}.{NAMES[path]}.{kind}",
                pairs.reshape(parameter.shape).float(),
                lambda found, at=pairs: at.copy_(found.view(at.shape)),
            )
        else:
            after = config.model_type == "gpt_oss" and path == "post_attention_layernorm"
            stored = "post_attention_norm" if after else NAMES[path]
            yield f"blk.{layer}.{stored}.{kind}", parameter.float(), parameter.copy_


def expert_tensors(
    prefix: str, kind: str, parameter: torch.Tensor, alternating: bool
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """The experts' gates, ups and downs [experts, out, in], or biases [experts, out]."""
    ending = "bias" if kind.endswith("_bias") else "weight"
    outputs = parameter.transpose(1, 2) if alternating and ending == "weight" else parameter
    if kind.startswith("down"):
        parts = {"down": outputs}
    elif alternating:
        parts = {"gate": outputs[:, ::2], "up": outputs[:, 1::2]}
    else:
        parts = dict(zip(("gate", "up"), outputs.chunk(2, 1), strict=True))
    for part, view in parts.items():
        yield f"{prefix}_{part}_exps.{ending}", view.contiguous().float(), view.copy_


def add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys of a mixture of experts."""
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


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


def embedded_gguf(folder: Path, name: str, kind: Type) -> tuple[Path, Path]:
    """An embedded model as a GGUF file, and the directory that it was made from."""
    source = Path(embedded.target(name) if name == "embedded" else embedded.draft(name))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = Path(embedded.target("embedded"))
    content, template = json_object(tokenizer / "tokenizer.json"), (tokenizer / "chat_template.jinja").read_text()
    file = folder / f"{name}.gguf"
    write_gguf(file, model, lambda name: kind, metadata=lambda writer: add_pieces(writer, content, template), tokens=())
    return file, tokenizer
