"""Small GGUF files, written by the library gguf from transformers' models, with blocks of every type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
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
    architecture = config.model_type
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
    metadata(writer)
    for i, (name, parameter) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours, heads = stored_name(name), 0
        if architecture == "llama" and ours.split(".")[-2] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if "attn_q" in ours else config.num_key_value_heads
        weight = parameter.float().numpy()
        if heads:  # pairs of a rotation side by side
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        kind = kind_of(ours) if weight.ndim == 2 else Type.F32
        data = blocks(weight, kind, i)
        writer.add_tensor(ours, data, raw_dtype=kind)
        real = meant(data, kind)
        if heads:
            real = real.view(heads, -1, 2, *real.shape[1:]).transpose(1, 2).reshape(parameter.shape)
        parameter.copy_(real)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def stored_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in outside:
        return f"{outside[module]}.{kind}"
    _, _, layer, path = module.split(".", 3)
    return f"blk.{layer}.{NAMES[path]}.{kind}"


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
