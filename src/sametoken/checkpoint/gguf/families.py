"""The architectures of llama.cpp as data: what their files state, leave out, and call otherwise than a checkpoint does.

Sources: llama.cpp's conversion scripts (what is written) and src/models (what an absent key means).
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
    """An architecture of llama.cpp.

    Attributes:
        name: of transformers' class.
        model_type: of config.json.
        paired: whether the rows of q and k lie as pairs that are rotated together.
        partial: whether a part of each head may be rotated alone.
        norm_shift: what the file's weights of norms have more than the checkpoint's.
        facts: keys of config.json that the files do not state.
        sizes: keys of the file beyond `SIZES`, and what config.json calls them.
        more: further keys, which `differs` reads or which do not change what is computed from text.
        biases: keys of config.json that say whether a tensor is there, and that tensor.
        names: tensors of a block that are called otherwise than in `INSIDE`.
        differs: further keys of config.json, from those of the file and the config.json so far.
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
    """Which layers have a window: as stated, else all but every `step`-th one; none where there is no window."""
    count, pattern = config.get("num_hidden_layers"), stated.get(f"{WINDOW_KEY}_pattern", step)
    if not isinstance(count, int) or not 0 < count <= MOST_LAYERS:
        return {}  # which is refused where config.json is read
    if isinstance(pattern, list) and len(pattern) == count:
        windowed = [bool(each) for each in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        windowed = [i % pattern < pattern - 1 for i in range(count)]
    else:
        raise CheckpointError(f"{WINDOW_KEY}_pattern is {shown(pattern)}, expected a number of layers or {count} flags")
    return {"layer_types": [SLIDING if each and stated.get(WINDOW_KEY) else FULL for each in windowed]}


def _query_scale(config: Stated, largest: int) -> dict[str, Any]:
    """The number that Gemma divides attention's scores by; files do not state it, only the largest model's differs."""
    shared = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": shared if config.get("num_hidden_layers") == largest else config["head_dim"]}


def _two_rotations(stated: Stated, config: Stated, local: float) -> dict[str, Any]:
    """The bases of layers with and without a window; `local` is that of the former in a file without it."""
    base = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    kinds = {FULL: {"rope_type": "default", **base}, SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": kinds}


def _gemma2(stated: Stated, config: Stated) -> dict[str, Any]:
    return {**_typed_layers(stated, config, 2), **_query_scale(config, 46)}


def _gemma3(stated: Stated, config: Stated) -> dict[str, Any]:
    local = stated.get(f"{ROPE}_swa", 10000.0)
    return {
        **_typed_layers(stated, config, 6), **_query_scale(config, 62), **_two_rotations(stated, config, local)
    }  # fmt: skip


def _olmo3(stated: Stated, config: Stated) -> dict[str, Any]:
    local = stated.get(f"{ROPE}_swa", config.get("rope_theta", 10000.0))
    return {**_typed_layers(stated, config, 4), **_two_rotations(stated, config, local)}


def _granite(stated: Stated, config: Stated) -> dict[str, Any]:
    if stated.get("rope.scaling.finetuned", True) is False:
        raise UnsupportedModelError("Granite without rotation (rope.scaling.finetuned is false) is not supported")
    return {"attention_multiplier": stated.get("attention.scale") or config["head_dim"] ** -0.5}


ROPE = "rope.freq_base"
CHOSEN = {"expert_used_count": "num_experts_per_tok"}
QWEN = {**CHOSEN, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
LOCAL = {**CHOSEN, "expert_count": "num_local_experts"}
WINDOWED = {WINDOW_KEY: "sliding_window"}
CAPPED = {"final_logit_softcapping": "final_logit_softcapping"}
ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
BIASES = {**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}
GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
GLM4_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
PATTERN = (f"{WINDOW_KEY}_pattern",)
LAYERS = (*PATTERN, f"{ROPE}_swa")

# By the architecture's name; one that stands for several families has the words of `special_case` behind it.
FAMILIES = {
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
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", biases=ATTENTION_BIAS),
    "olmo2 with windows": GgufFamily(
        "Olmo3ForCausalLM", "olmo3", biases=ATTENTION_BIAS, sizes=WINDOWED, more=LAYERS, differs=_olmo3
    ),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3", partial=True, sizes=WINDOWED),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", facts={"norm_topk_prob": False}, sizes=QWEN | SHARED),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", biases=ATTENTION_BIAS),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", facts={"norm_topk_prob": True}, sizes=QWEN),
    # The part that reads images is a file of its own; a text's sections of a rotation are one rotation.
    "qwen3vl": GgufFamily(
        "Qwen3ForCausalLM", "qwen3", biases=ATTENTION_BIAS, more=("n_deepstack_layers", "rope.dimension_sections")
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", paired=True, biases=BIASES),
}  # fmt: skip


def special_case(architecture: str, metadata: Stated) -> str:
    """The name in `FAMILIES` of an architecture: Llama's is also Mixtral's, OLMo 2's is also OLMo 3's."""
    for name, key in ((f"{architecture} with experts", "expert_count"), (f"{architecture} with windows", WINDOW_KEY)):
        if name in FAMILIES and metadata.get(f"{architecture}.{key}"):
            return name
    return architecture
