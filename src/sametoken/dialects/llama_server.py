"""Options of llama.cpp's `llama-server` as data, except those that differ from ours in the name alone.

Source: `common/arg.cpp` and `tools/server/README.md` of 2025 and 2026, older spellings included. Options that differ
in the name alone are in the declarations of our options. Short names have one dash, even those of several letters.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from sametoken import kinds
from sametoken.dialects.rules import Sets
from sametoken.dialects.trtllm import ALWAYS, KERNELS, NO_PART
from sametoken.options.speculation import AUTO, NO_DRAFT

# Our method for each --spec-type that both servers have.
SPEC_TYPES = {NO_DRAFT: NO_DRAFT, **{name: ours for name, (ours, *_) in kinds.aliases("llama-server").items()}}
REASONING = {"none": "none", "auto": "auto", "deepseek": "auto"}


def cache_type(stated: Any) -> Any:
    """Our KV cache dtype for llama.cpp's; "auto" for f16, llama.cpp's default."""
    return "auto" if stated == "f16" else stated


def spec_type(stated: str) -> str:
    """Our method for --spec-type, "auto" for several types without the target's prediction block, which "auto" lacks.

    Raises:
        ValueError: a type is unknown.
    """
    named = [name.strip() for name in stated.split(",")]
    if not set(named) <= SPEC_TYPES.keys():
        raise ValueError(f"expected one of {', '.join(SPEC_TYPES)}, or --method with one of ours")
    methods = {SPEC_TYPES[name] for name in named}
    methods = methods - {NO_DRAFT} or methods
    inside = [method for method in methods if kinds.inside(method)]
    return inside[0] if inside else methods.pop() if len(methods) == 1 else AUTO


def reasoning(stated: str) -> str:
    """Our reasoning parser for a --reasoning-format; raises `ValueError` if there is none."""
    if stated not in REASONING:
        raise ValueError(f"expected one of {', '.join(REASONING)}")
    return REASONING[stated]


def context(stated: int) -> int | None:
    """Number of tokens of a sequence, at most; None for 0, the model's own limit."""
    return stated or None


def rows(stated: int) -> int | None:
    """Number of sequences that run together, at most; None for -1, a number that the server chooses."""
    return None if stated == -1 else stated


def sampling(name: str, stated: Any) -> dict[str, Any] | None:
    """Default of one sampling parameter, as a mapping of its name; None for a value that means llama.cpp's default."""
    if name in ("seed", "max_tokens") and stated in (-1, 2**32 - 1):
        return None
    return {name: stated}


def rope(name: str, stated: float) -> dict[str, Any] | None:
    """One key of the target's RoPE as a mapping; None for the number that means the model's own.

    Args:
        name: key, or "scale" for the factor of frequencies, which is 1 divided by the factor of the context.

    Raises:
        ValueError: the number has no meaning.
    """
    own = OWN_ROPE.get(name)
    if stated == own:
        return None
    if not 0 < stated < math.inf:
        raise ValueError("expected a number above 0" + ("" if own is None else f", or {own} for the model's own"))
    return {"factor": 1 / stated} if name == "scale" else {name: stated}


def names(stated: str) -> list[str]:
    """Names in a text that separates them by commas."""
    return [name.strip() for name in stated.split(",")]


# Numbers that mean the model's own in llama-server; --rope-scale has none.
OWN_ROPE = {"rope_theta": 0, "scale": 0, "original_max_position_embeddings": 0, "beta_fast": -1, "beta_slow": -1}
SAMPLING = (
    ("temp/temperature", "temperature", float), ("top_k", "top_k", int), ("top_p", "top_p", float),
    ("min_p", "min_p", float), ("seed/-s", "seed", int), ("repeat_penalty", "repetition_penalty", float),
    ("presence_penalty", "presence_penalty", float), ("frequency_penalty", "frequency_penalty", float),
    ("predict/-n/n_predict", "max_tokens", int),
)  # fmt: skip
ROPE = (
    ("rope_scale", "factor", float), ("rope_freq_base", "rope_theta", float), ("rope_freq_scale", "scale", float),
    ("yarn_orig_ctx", "original_max_position_embeddings", int), ("yarn_beta_fast", "beta_fast", float),
    ("yarn_beta_slow", "beta_slow", float),
)  # fmt: skip
INVERSE = "its key factor is 1 divided by it"
ALONE = {"flash_attn": "on"}  # values of options that were switches in older releases
ON_DEVICE = "the whole model is on one device, which --device cpu or --device cuda selects"
THREADS = "--threads is the number for everything that is computed"
CACHE_OF_DRAFT = "the draft's KV cache has the dtype of the target's, which --kv-cache-dtype sets"
# Options in the notation of `rules.keys`, each with the option of ours that it sets.
SET: dict[str, Sets] = {
    "ctx_size/-c:int": Sets(
        "max_seq_len", context, "each sequence may have so many; llama-server divides it among its slots"
    ),
    "parallel/-np:int": Sets("max_batch_size", rows),
    "spec_type:str": Sets(
        "method",
        spec_type,
        f"for {', '.join(SPEC_TYPES)}; several, with commas between them, are auto, or mtp if that is one of them",
    ),
    "alias/-a:str": Sets("served_model_name", names),
    **{
        f"{option}:{kind.__name__}": Sets(
            "rope_scaling", partial(rope, key), f"its key {key}" if key != "scale" else INVERSE
        )
        for option, key, kind in ROPE
    },
    "cors_origins:str": Sets("cors_origin", names),
    "reasoning_format:str": Sets("reasoning_parser", reasoning, "for none, auto and deepseek"),
    **{
        f"{words}:{kind.__name__}": Sets("default_sampling", partial(sampling, name), "for requests that do not set it")
        for words, name, kind in SAMPLING
    },
    **{
        f"cache_type_{plane}/-ct{plane}:str": Sets(
            "kv_cache_dtype", cache_type, "keys and values have one dtype, q8_0 is int8"
        )
        for plane in "kv"
    },
}
NO_EFFECT: dict[str, str] = {
    ON_DEVICE: "gpu_layers/-ngl/n_gpu_layers=auto|all "
        "gpu_layers_draft/-ngld/n_gpu_layers_draft/spec_draft_ngl=auto|all",
    THREADS: "threads_batch/-tb:int threads_draft/-td/spec_draft_threads:int "
        "threads_batch_draft/-tbd/spec_draft_threads_batch:int threads_http:int",
    "drafts of every length are verified; --adaptive chooses the length for each step":
        "draft_min/draft_n_min/spec_draft_n_min=0 draft_p_min/spec_draft_p_min:float "
        "draft_p_split/spec_draft_p_split:float",
    CACHE_OF_DRAFT: "cache_type_k_draft/-ctkd/spec_draft_type_k cache_type_v_draft/-ctvd/spec_draft_type_v",
    "drafts are made up to the end of the target's context": "ctx_size_draft/-cd:int",
    "--max-num-tokens, which -ub sets, is the number of tokens of a step": "batch_size/-b:int",
    "--request-timeout cancels requests, --keep-alive closes connections that have none": "timeout/-to:int",
    "weights are read at the start and stay in memory": "mmap=true mlock=false",
    "set --cpus, or start the server with numactl": "numa",
    "/v1/embeddings is always served": "embedding=true embeddings=true",
    NO_PART: "props=false warmup:bool cache_reuse=0",
    ALWAYS: "cont_batching/-cb=true kv_unified/-kvu=true jinja=true",
}  # fmt: skip
REFUSED: dict[str, str] = {
    f"{KERNELS}; write -fa auto, or leave it out": "flash_attn/-fa=on|auto",
    "requests set it as response_format or guided_grammar; leave it out": "grammar grammar_file json_schema/-j",
    "requests set it as chat_template_kwargs; leave it out": "chat_template_kwargs",
    "set --thinking-token-budget instead": "reasoning_budget=-1",
    "put the keys into the variable SAMETOKEN_API_KEY, separated by commas": "api_key_file",
    "export HF_TOKEN instead": "hf_token/-hft",
    "export HF_HUB_OFFLINE=1 instead": "offline=false",
    "give -hf OWNER/NAME:FILE.gguf instead": "hf_file/-hff",
    "download the file and give its path": "model_url/-mu docker_repo/-dr",
    "set --log-level instead: debug, info, warning or error": "log_disable=false verbosity/-lv",
    "set --tensor-parallel-size instead": "split_mode/-sm=none|layer tensor_split/-ts rpc",
    "set CUDA_VISIBLE_DEVICES instead": "main_gpu/-mg",
    f"{ON_DEVICE}; leave it out": "cpu_moe/-cmoe=false n_cpu_moe/-ncmoe override_tensor/-ot",
    "set --max-matching-ngram-size and --max-draft-len instead":
        "spec_ngram_simple_size_n spec_ngram_simple_size_m spec_ngram_simple_min_hits",
    "lookups read the texts of requests and nothing else; leave it out":
        "lookup_cache_static/-lcs lookup_cache_dynamic/-lcd",
    "adapters are not supported; merge them into the weights": "lora lora_scaled",
    "only text is supported; leave it out": "mmproj/-mm mmproj_url/-mmu",
    "the checkpoint states it; leave it out": "override_kv",
    "state attention_factor in the JSON of --rope-scaling instead": "yarn_attn_factor:float=-1.0|1.0",
    "the kind of --rope-scaling decides it; leave it out": "yarn_ext_factor:float=-1.0",
    "a reply ends where the context ends; leave it out": "context_shift=false",
    "a server has one model; start one for each": "models_dir models_preset",
}  # fmt: skip
