"""Keywords of `LLM` other than the model and its draft, as types for editors and type checkers.

`options.engine` declares the meaning of each keyword; a test compares names and defaults.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from sametoken.options.engine import DType, KVDType, Quantization


class EngineOptions(TypedDict, total=False):
    """Keys of `EngineConfig`, and of `KVCacheConfig` with the prefix "kv_cache_"; all are optional."""

    dtype: DType
    device: str
    max_batch_size: int
    max_num_tokens: int
    max_mixed_prefill_tokens: int
    max_prefill_share: float
    max_seq_len: int | None
    cap_max_seq_len: bool
    rope_scaling: dict[str, Any] | None
    deterministic: bool | None
    quantization: Quantization
    draft_quantization: Quantization
    weight_cache: bool
    cuda_graphs: bool
    tensor_parallel_size: int
    tensor_parallel_check: bool
    tokenizer: str | None
    chat_template: str | None
    generation_config: Literal["auto", "none", "vllm"]
    kv_cache_tokens_per_block: int
    kv_cache_enable_block_reuse: bool
    kv_cache_max_tokens: int | None
    kv_cache_free_memory_fraction: float | None
    kv_cache_dtype: KVDType


class Options(EngineOptions, total=False):
    """Keys of `EngineOptions`, and common keywords of vLLM; `dialects.keywords` translates all keywords of vLLM."""

    max_model_len: int | str
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    enforce_eager: bool
    block_size: int
    seed: int | None
    swap_space: float
    trust_remote_code: bool
    speculative_config: dict[str, Any]
    hf_overrides: dict[str, Any]
