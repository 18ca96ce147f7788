"""Architectures of llama.cpp as data: the differences between their files and a checkpoint.

Sources: llama.cpp's conversion scripts (written keys) and src/models (meanings of absent keys).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from sametoken.errors import CheckpointError, UnsupportedModelError, shown
from sametoken.model.keys import MOST_LAYERS
from sametoken.model.window_config import FULL, SLIDING

Stated = Mapping[str, Any]  # values of a file by their keys, without the architecture's name before them
WINDOW_KEY = "attention.sliding_window"
EACH = "*"  # in a name: the tensor holds the weights of all experts


def _nothing(stated: Stated, config: Stated) -> dict[str, Any]:
    return {}


class GgufFamily(NamedTuple):
    """Architecture of llama.cpp.

    Attributes:
        name: name of transformers' class.
        model_type: value in config.json.
        paired: true if the rows of q and k are stored as interleaved RoPE pairs.
        partial: true if RoPE may cover only a part of each head.
        norm_shift: number added to the checkpoint's weights of norms in the file.
        facts: entries of config.json that the files do not state.
        sizes: keys of the file in addition to `SIZES` -> keys of config.json.
        more: further keys of the file, which `differs` reads or which have no effect on text.
        biases: keys of config.json -> the tensor whose presence is the value.
        names: names of a block's tensors in addition to `INSIDE`.
        differs: function of the file's keys and of config.json so far that returns further keys of config.json.
    """

    name: str
    model_type: str
    paired: bool = False
    partial: bool = False
    norm_shift: float = 0.0
    facts: Mapping[str, Any] = {}
    sizes: Mapping[str, str] = {}
    more: Collection[str] = ()
    biases: Mapping[str, str] = {}
    names: Mapping[str, str] = {}
    differs: Callable[[Stated, Stated], dict[str, Any]] = _nothing


def _typed_layers(stated: Stated, config: Stated, step: int) -> dict[str, Any]:
    """Type of each layer: windows as stated, else in all but every `step`-th layer; none without a window size."""
    count, pattern = config.get("num_hidden_layers"), stated.get(f"{WINDOW_KEY}_pattern", step)
    if not isinstance(count, int) or not 0 < count <= MOST_LAYERS:
        return {}  # refused when config.json is read
    if isinstance(pattern, list) and len(pattern) == count:
        windowed = [bool(each) for each in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        windowed = [i % pattern < pattern - 1 for i in range(count)]
    else:
        raise CheckpointError(f"{WINDOW_KEY}_pattern is {shown(pattern)}, expected a number of layers or {count} flags")
    return {"layer_types": [SLIDING if each and stated.get(WINDOW_KEY) else FULL for each in windowed]}


def _query_scale(config: Stated, largest: int) -> dict[str, Any]:
    """Scale of Gemma's queries, which files do not state: the size of a head, except in the largest model."""
    shared = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": shared if config.get("num_hidden_layers") == largest else config["head_dim"]}


def _two_ropes(stated: Stated, config: Stated, local: float) -> dict[str, Any]:
    """RoPE bases of layers with a window (`local`) and without one."""
    base = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    kinds = {FULL: {"rope_type": "default", **base}, SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": kinds}


def _gemma2(stated: Stated, config: Stated) -> dict[str, Any]:
    return {**_typed_layers(stated, config, 2), **_query_scale(config, 46)}


def _gemma3(stated: Stated, config: Stated) -> dict[str, Any]:
    local = stated.get(f"{ROPE}_swa", 10000.0)
    return {
        **_typed_layers(stated, config, 6), **_query_scale(config, 62), **_two_ropes(stated, config, local)
    }  # fmt: skip


def _olmo3(stated: Stated, config: Stated) -> dict[str, Any]:
    local = stated.get(f"{ROPE}_swa", config.get("rope_theta", 10000.0))
    return {**_typed_layers(stated, config, 4), **_two_ropes(stated, config, local)}


def _granite(stated: Stated, config: Stated) -> dict[str, Any]:
    if stated.get("rope.scaling.finetuned", True) is False:
        raise UnsupportedModelError("Granite without RoPE (rope.scaling.finetuned is false) is not supported")
    return {"attention_multiplier": stated.get("attention.scale") or config["head_dim"] ** -0.5}


def _without_further(stated: Stated, config: Stated) -> dict[str, Any]:
    """Number of layers, without the last ones, which predict further tokens."""
    further, layers = stated.get(FURTHER, 0), config.get("num_hidden_layers")
    if not isinstance(further, int) or not isinstance(layers, int) or not 0 <= further < max(layers, 1):
        raise CheckpointError(f"{FURTHER} is {shown(further)} of {shown(layers)} layers, expected fewer than there are")
    return {"num_hidden_layers": layers - further, "num_nextn_predict_layers": further}


def _glm4_moe(stated: Stated, config: Stated) -> dict[str, Any]:
    if stated.get(GATING, SIGMOID) != SIGMOID:
        raise UnsupportedModelError(f"{GATING} is {shown(stated[GATING])}, which is not supported; expected {SIGMOID}")
    return {**_without_further(stated, config), "norm_topk_prob": bool(stated.get(NORMALISED, False))}


def _deepseek(stated: Stated, config: Stated) -> dict[str, Any]:
    """Keys of DeepSeek V2 and V3, which have latent attention; V3 chooses experts by sigmoids."""
    rotated, key = stated.get("rope.dimension_count"), stated.get(f"{KEY}_mla", stated.get(KEY))
    value = stated.get(f"{VALUE}_mla", stated.get(VALUE))
    if not all(isinstance(each, int) and each > 0 for each in (rotated, key, value)) or key <= rotated:
        words = f"{KEY} of {shown(key)} with {shown(rotated)} rotated dimensions, and {VALUE} of {shown(value)}"
        raise CheckpointError(f"{words}; expected sizes, and some dimensions that are not rotated")
    found = {
        **_without_further(stated, config), "norm_topk_prob": bool(stated.get(NORMALISED, False)),
        "num_key_value_heads": config["num_attention_heads"], "q_lora_rank": stated.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": value,
    }  # fmt: skip
    if stated.get(GATING) == SIGMOID:
        found |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        found |= {"n_group": stated.get(GROUPS, 1), "topk_group": stated.get(GROUPS_USED, 1)}
    elif stated.get(GROUPS, 1) != 1:
        found |= {"n_group": stated[GROUPS], "topk_group": stated.get(GROUPS_USED)}
        found["topk_method"] = "group_limited_greedy"
    if stated.get(STRETCH) and "rope_scaling" in config:  # the file states a tenth of it, for both keys
        share = round(10 * stated[STRETCH], 6)
        found["rope_scaling"] = {**config["rope_scaling"], "mscale": share, "mscale_all_dim": share}
    return found


def _llama4(stated: Stated, config: Stated) -> dict[str, Any]:
    """Keys of the published Llama 4 models; the largest one has no norms of queries and keys."""
    if stated.get(WINDOW_KEY, CHUNK) != CHUNK:
        raise UnsupportedModelError(f"Llama 4 with {WINDOW_KEY} {shown(stated[WINDOW_KEY])} is not supported")
    norms = config.get("num_local_experts") != WITHOUT_NORMS
    return {"attention_chunk_size": CHUNK, "use_qk_norm": norms}


CHUNK, WITHOUT_NORMS = 8192, 128  # tokens of a chunk, and experts of the largest model
KEY, VALUE, STRETCH = "attention.key_length", "attention.value_length", "rope.scaling.yarn_log_multiplier"
FURTHER, GATING, NORMALISED = "nextn_predict_layers", "expert_gating_func", "expert_weights_norm"
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
SIGMOID = 2  # number of sigmoid scores of experts
ROPE = "rope.freq_base"
CHOSEN = {"expert_used_count": "num_experts_per_tok"}
QWEN = {**CHOSEN, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
LOCAL = {**CHOSEN, "expert_count": "num_local_experts"}
WINDOWED = {WINDOW_KEY: "sliding_window"}
BEHIND_DENSE = {
    **CHOSEN, "expert_count": "n_routed_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
}  # fmt: skip
SHARED_NAMES = {
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
CAPPED = {"final_logit_softcapping": "final_logit_softcapping"}
ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
BIASES = {**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}
GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
GLM4_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
PATTERN = (f"{WINDOW_KEY}_pattern",)
LAYERS = (*PATTERN, f"{ROPE}_swa")

LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.kv_b_proj",
}  # fmt: skip

# Families by architecture; `special_case` appends words to an architecture with several families.
FAMILIES = {
    "chatglm": GgufFamily("GlmForCausalLM", "glm", partial=True, biases=ATTENTION_BIAS),
    "deepseek2": GgufFamily(
        "DeepseekV2ForCausalLM", "deepseek_v2", differs=_deepseek, names={**SHARED_NAMES, **LATENT_NAMES},
        sizes={**BEHIND_DENSE, "attention.kv_lora_rank": "kv_lora_rank"},
        biases={"attention_bias": "blk.0.attn_kv_a_mqa.bias"},
        more=(
            "attention.q_lora_rank", f"{KEY}_mla", f"{VALUE}_mla", STRETCH, FURTHER, GATING, NORMALISED, GROUPS,
            GROUPS_USED,
        ),
    ),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM", "gemma2", norm_shift=1.0, biases=ATTENTION_BIAS, names=GEMMA_NORMS, more=PATTERN,
        sizes={**WINDOWED, **CAPPED, "attn_logit_softcapping": "attn_logit_softcapping"}, differs=_gemma2,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM", "gemma3_text", norm_shift=1.0, biases=ATTENTION_BIAS, names=GEMMA_NORMS, more=LAYERS,
        sizes={**WINDOWED, **CAPPED}, differs=_gemma3,
    ),
    "glm4": GgufFamily(
        "Glm4ForCausalLM", "glm4", partial=True, biases=ATTENTION_BIAS, names=GLM4_NORMS
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM", "glm4_moe", partial=True, names=SHARED_NAMES, differs=_glm4_moe,
        biases={**ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"}, more=(FURTHER, GATING, NORMALISED),
        sizes={**BEHIND_DENSE, GROUPS: "n_group", GROUPS_USED: "topk_group"},
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM", "gpt_oss", facts={"attention_bias": True},
        sizes={**LOCAL, **WINDOWED, "expert_feed_forward_length": "intermediate_size"},
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM", "granite", paired=True, biases=BIASES, more=("attention.scale",), differs=_granite,
        sizes={
            "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "llama": GgufFamily("LlamaForCausalLM", "llama", paired=True, biases=BIASES),
    "llama with experts": GgufFamily("MixtralForCausalLM", "mixtral", paired=True, sizes=LOCAL),
    "llama4": GgufFamily(
        "Llama4ForCausalLM", "llama4_text", biases=ATTENTION_BIAS, differs=_llama4, more=(WINDOW_KEY,),
        sizes={
            **LOCAL, "expert_feed_forward_length": "intermediate_size", "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", biases=ATTENTION_BIAS),
    "olmo2 with windows": GgufFamily(
        "Olmo3ForCausalLM", "olmo3", biases=ATTENTION_BIAS, sizes=WINDOWED, more=LAYERS, differs=_olmo3
    ),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3", partial=True, sizes=WINDOWED),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", facts={"norm_topk_prob": False}, sizes=QWEN | SHARED),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", biases=ATTENTION_BIAS),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", facts={"norm_topk_prob": True}, sizes=QWEN),
    # The part that reads images is a separate file; for text, the sections of RoPE make plain RoPE.
    "qwen3vl": GgufFamily(
        "Qwen3ForCausalLM", "qwen3", biases=ATTENTION_BIAS, more=("n_deepstack_layers", "rope.dimension_sections")
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", paired=True, biases=BIASES),
}  # fmt: skip


def special_case(architecture: str, metadata: Stated) -> str:
    """Key in `FAMILIES` of an architecture: Llama's name is also Mixtral's, OLMo 2's is also OLMo 3's."""
    for name, key in ((f"{architecture} with experts", "expert_count"), (f"{architecture} with windows", WINDOW_KEY)):
        if name in FAMILIES and metadata.get(f"{architecture}.{key}"):
            return name
    return architecture
