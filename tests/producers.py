"""What other trainers write beside a head's weights: their config.json and their spelling of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from head_files import DRAFT_VOCAB, HIDDEN, TARGET, VOCAB
from sametoken.heads.eagle.names import eagle_tensors
from sametoken.heads.read import LoadedHead, read_head
from sametoken.model.config import ModelConfig

IDS = "eagle_aux_hidden_state_layer_ids"
# What a small Llama-like config.json says; everyone writes at least this.
BASE = {
    "hidden_size": HIDDEN, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 48,
    "hidden_act": "silu", "torch_dtype": "float32", "tie_word_embeddings": False, "model_type": "llama",
}  # fmt: skip
SAFEAILAB = {**BASE, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
SPECFORGE = {**SAFEAILAB, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 4]}}
MODELOPT = {
    **SPECFORGE, "rope_theta": 10000.0, "rope_scaling": None, "pretraining_tp": None, "attention_bias": False,
    "eagle_config": {
        IDS: [1, 3, 4], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    },
}  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB,
    "speculators_config": {"algorithm": "eagle3"}, "norm_before_residual": True, "norm_before_fc": False,
    "fc_norm": False, "norm_output": False, "target_hidden_size": None, IDS: [2, 4, 5], "dtype": "float32",
    "transformer_layer_config": {**BASE, "rope_theta": 10000.0},
}  # fmt: skip


def tensors_of(head: Any) -> dict[str, Tensor]:
    """Plain names, with both maps of the vocabulary where it is reduced."""
    found = dict(eagle_tensors(head, head.config))
    if head.config.draft_vocab_size < VOCAB:
        found |= {"d2t": head.d2t, "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, head.draft_ids, True)}
    return found


def midlayer(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in found.items()}


def read(directory: Path, target: ModelConfig = TARGET) -> LoadedHead:
    return read_head(directory, target, torch.float32, "cpu", pack=False)


def without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}
