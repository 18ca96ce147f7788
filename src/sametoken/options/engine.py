"""The options of an engine: its model, its batches, its memory. Names are TensorRT-LLM's and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sametoken.options.declaration import Elsewhere, Positive, Settings, Shown

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int8_weight_only", "int4", "int4_g128"]
KVDType = Literal["auto", "bfloat16", "int8", "fp8", "fp8_e4m3"]
# vLLM's names for a scale per token and head, SGLang's bfloat16, llama.cpp's nearest type.
KV_ALIASES = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8", "bf16": "bfloat16", "q8_0": "int8"}
MOST_RANKS = 64
MOST_THREADS = 1024  # more than any machine this is for, and few enough to start


def _kv_dtype(given: Any) -> Any:
    """Our name of a cache's dtype; raises `ValueError` for one that another tool has and we refuse."""
    if given == "fp8_e5m2":
        raise ValueError(
            "E5M2 has one bit of fraction less than E4M3, and a scale per vector gives E4M3 its range; use fp8"
        )
    return KV_ALIASES.get(given, given) if isinstance(given, str) else given


class ModelSettings(Settings):
    """What is loaded beside MODEL."""

    draft: Annotated[
        str | None,
        Elsewhere(
            "trtllm speculative_config.speculative_model_dir",
            "trtllm speculative_config.speculative_model",
            "trtllm speculative_config.pytorch_weights_path",
            "vllm model",
        ),
    ] = None
    """draft model or head: directory, run or Hub id; without it: the embedded target's own."""
    revision: Annotated[str | None, Elsewhere("trtllm revision", "trtllm-serve hf_revision")] = None
    """branch, tag or commit of MODEL on the Hub; without it: its main branch."""
    draft_revision: Annotated[str | None, Elsewhere("vllm revision")] = None
    """the same for the draft."""


class KVCacheConfig(Settings):
    """The page pool."""

    tokens_per_block: Annotated[
        int, Field(ge=1, le=1024), Elsewhere("trtllm kv_cache_config.tokens_per_block", "vllm-serve block_size")
    ] = 32
    """page size."""
    enable_block_reuse: Annotated[
        bool, Elsewhere("trtllm kv_cache_config.enable_block_reuse", "vllm-serve enable_prefix_caching")
    ] = True
    """keep full pages of finished requests for prompts with the same beginning."""
    max_tokens: Annotated[
        Positive | None, Shown(("--kv-cache-tokens",)), Elsewhere("trtllm kv_cache_config.max_tokens")
    ] = None
    """tokens that the pool holds; without it: every row at full context, as far as memory goes."""
    free_memory_fraction: Annotated[
        float,
        Field(gt=0, le=1),
        Elsewhere(
            "trtllm kv_cache_config.free_gpu_memory_fraction",
            "trtllm-serve kv_cache_free_gpu_memory_fraction/free_gpu_memory_fraction",
        ),
    ] = 0.9
    """share of the memory left after the weights that the pool may take."""
    dtype: Annotated[KVDType, BeforeValidator(_kv_dtype), Elsewhere("trtllm kv_cache_config.dtype")] = "auto"
    """what keys and values are stored as, those of a draft model or head too: "auto" is the model's dtype; int8 and
    fp8 (E4M3, also fp8_e4m3) are codes with a scale for each token and head, about half of bfloat16's bytes."""


class EngineConfig(Settings):
    """The engine around the model."""

    dtype: Annotated[DType, Elsewhere("trtllm dtype")] = "auto"
    """of weights, activations and cache; "auto" is the checkpoint's own (bfloat16 for float16 on CPU)."""
    device: str = "auto"
    """"auto" is CUDA where there is one, otherwise the CPU."""
    max_batch_size: Annotated[
        int, Field(ge=1, le=4096), Elsewhere("trtllm max_batch_size", "vllm-serve max_num_seqs")
    ] = 16
    """sequences that run together."""
    max_num_tokens: Annotated[
        int, Field(ge=2), Elsewhere("trtllm max_num_tokens", "vllm-serve max_num_batched_tokens")
    ] = 512
    """tokens of one step over the batch, which bounds the pieces that prompts are cut into."""
    max_mixed_prefill_tokens: Positive = 64
    """prompt tokens at most of a step that also decodes."""
    max_prefill_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """of the time while streams run, prompts may take at most this share: at 0.5 a token of a stream takes twice as
    long on average while a prompt is read. 1 is no limit: most tokens a second in all."""
    max_seq_len: Annotated[
        Annotated[int, Field(ge=2)] | None, Elsewhere("trtllm max_seq_len", "vllm-serve max_model_len")
    ] = None
    """prompt plus output; without it: the model's context."""
    deterministic: bool | None = None
    """give a token the same bits whatever is computed beside it, so that drafts and batches cannot change the output
    even in bfloat16; without it: on for the CPU and off for CUDA, where fixed tiles cost time."""
    quantization: Quantization = "none"
    """what the target's weights are rounded to when they are loaded (CPU): int8 and int4 multiply with 8-bit
    activations, int8 has a scale per output, int4 per 32 inputs, int4_g128 per 128."""
    draft_quantization: Quantization = "none"
    """the same for a draft model."""
    cuda_graphs: bool = True
    """on CUDA, capture whole decoding steps and run them one ahead of the host; the CPU has no graphs."""
    tensor_parallel_size: Annotated[
        int,
        Field(ge=1, le=MOST_RANKS),
        Shown(("--tp_size", "--tp-size", "-tp")),
        Elsewhere("trtllm tensor_parallel_size"),
    ] = 1
    """processes that each hold and compute a part of every matrix of the target (CPU). mpirun, torchrun or srun may
    start them; otherwise they are started on this machine, which divides its threads among them."""
    tensor_parallel_check: bool = False
    """with several processes, compare a digest of what each computed after every forward."""
    tokenizer: Annotated[str | None, Elsewhere("trtllm tokenizer")] = None
    """directory or Hub id of another tokenizer for the same token ids; without it: the target's."""
    chat_template: str | None = None
    """file of a chat template in Jinja, or its text; without it: the tokenizer's."""
    generation_config: Literal["auto", "none", "vllm"] = "auto"
    """where sampling parameters that a request leaves out come from: "auto" is the model's generation_config.json,
    then our defaults; "none" is our defaults alone ("vllm" says the same)."""
