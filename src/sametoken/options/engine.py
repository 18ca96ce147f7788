"""Options of an engine: model, batches and memory; with keywords of `LLM` as types for editors and type checkers.

Names are those of TensorRT-LLM and vLLM. A test compares names and defaults of the keywords with the options.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from pydantic import BeforeValidator, Field

from sametoken.options.declaration import Elsewhere, Positive, Settings, Shown
from sametoken.options.rope import read_rope_scaling

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int8_weight_only", "int4", "int4_g128"]
KVDType = Literal["auto", "bfloat16", "int8", "fp8", "fp8_e4m3"]
# Names in vLLM (with one scale per token and head), in SGLang, and in llama.cpp (its nearest type).
KV_ALIASES = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8", "bf16": "bfloat16", "q8_0": "int8"}
MOST_RANKS = 64
MOST_THREADS = 1024  # above the number of cores of any supported machine, and few enough to start


def _kv_dtype(given: Any) -> Any:
    """Our name of a KV cache dtype; raises `ValueError` for E5M2, which other tools have and this engine refuses."""
    if given == "fp8_e5m2":
        raise ValueError(
            "E5M2 has one bit of fraction less than E4M3, and a scale per vector gives E4M3 its range; use fp8"
        )
    return KV_ALIASES.get(given, given) if isinstance(given, str) else given


class ModelSettings(Settings):
    """The draft, and versions on the Hub."""

    draft: Annotated[
        str | None,
        Elsewhere(
            "trtllm speculative_config.speculative_model_dir",
            "trtllm speculative_config.speculative_model",
            "trtllm speculative_config.pytorch_weights_path",
            "vllm model",
            "llama-server model_draft/-md/spec_draft_model/hf_repo_draft/-hfd/-hfrd/spec_draft_hf",
        ),
    ] = None
    """draft model or head: a directory, a training run or a Hub id; without it: none, but with the embedded target
    servers use its head "embedded-eagle3" and other commands its draft model "embedded" (demo: both)."""
    revision: Annotated[str | None, Elsewhere("trtllm revision", "trtllm-serve hf_revision")] = None
    """branch, tag or commit of MODEL on the Hub; without it: its main branch."""
    draft_revision: Annotated[str | None, Elsewhere("vllm revision")] = None
    """branch, tag or commit of the draft on the Hub; without it: its main branch."""


class KVCacheConfig(Settings):
    """The KV cache."""

    tokens_per_block: Annotated[
        int, Field(ge=1, le=1024), Elsewhere("trtllm kv_cache_config.tokens_per_block", "vllm-serve block_size")
    ] = 32
    """number of tokens in a page of the cache."""
    enable_block_reuse: Annotated[
        bool,
        Elsewhere(
            "trtllm kv_cache_config.enable_block_reuse",
            "vllm-serve enable_prefix_caching",
            "llama-server cache_prompt",
        ),
    ] = True
    """keep the full pages of finished requests, so that a prompt with the same beginning is not computed again."""
    max_tokens: Annotated[
        Positive | None, Shown(("--kv-cache-tokens",)), Elsewhere("trtllm kv_cache_config.max_tokens")
    ] = None
    """number of tokens that the cache holds; without it: every sequence at full context, as far as memory allows."""
    free_memory_fraction: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        Elsewhere(
            "trtllm kv_cache_config.free_gpu_memory_fraction",
            "trtllm-serve kv_cache_free_gpu_memory_fraction/free_gpu_memory_fraction",
        ),
    ] = None
    """share that the cache may take of the memory that is free once the weights are loaded; without it: 0.9 of a GPU's,
    and on the CPU a quarter of the machine's memory, which is taken as the cache fills and given back after ten minutes
    without a request."""
    dtype: Annotated[KVDType, BeforeValidator(_kv_dtype), Elsewhere("trtllm kv_cache_config.dtype")] = "auto"
    """number format of keys and values, those of a draft model or head too: "auto" is the model's dtype; int8 and fp8
    (E4M3, also written fp8_e4m3) have a scale for each token and head and take about half of bfloat16's bytes."""


class EngineConfig(Settings):
    """Computation of the model."""

    dtype: Annotated[DType, Elsewhere("trtllm dtype")] = "auto"
    """number format of weights, activations and cache; "auto" is the checkpoint's own (on the CPU, bfloat16 takes the
    place of float16)."""
    device: str = "auto"
    """where to compute; "auto" is CUDA where there is a CUDA device, otherwise the CPU."""
    max_batch_size: Annotated[
        int, Field(ge=1, le=4096), Elsewhere("trtllm max_batch_size", "vllm-serve max_num_seqs")
    ] = 16
    """number of sequences that run together at most."""
    max_num_tokens: Annotated[
        int,
        Field(ge=2),
        Elsewhere("trtllm max_num_tokens", "vllm-serve max_num_batched_tokens", "llama-server ubatch_size/-ub"),
    ] = 512
    """number of tokens of one step over the whole batch at most; longer prompts are cut into pieces."""
    max_mixed_prefill_tokens: Positive = 64
    """number of prompt tokens at most in a step that also decodes."""
    max_prefill_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of the time that reading prompts may take at most while other requests stream. Example 0.5: while a prompt
    is read, a token of a stream takes twice as long on average as in plain decoding; what drafts save goes to the
    prompt. 1 is no limit and gives the most tokens per second in all."""
    max_seq_len: Annotated[
        Annotated[int, Field(ge=2)] | None, Elsewhere("trtllm max_seq_len", "vllm-serve max_model_len")
    ] = None
    """number of tokens of prompt and output together at most; without it: the model's context."""
    cap_max_seq_len: bool = False
    """take the model's context where max_seq_len is longer, with a warning; off: refuse it."""
    rope_scaling: Annotated[dict[str, Any] | None, BeforeValidator(read_rope_scaling), Shown(bare="rope_type")] = None
    """RoPE of the target in place of its file's, as JSON or the name of a kind, to stretch the context. It changes the
    target's tokens. Example: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}. Keys are
    those of rope_parameters in config.json, and max_position_embeddings; without rope_type the file's own are changed.
    A draft model of the target's family and context gets it too."""
    deterministic: bool | None = None
    """compute the same bits for a token whatever else is in the batch, so that neither drafts nor batches can change
    the output, even in bfloat16; without it: on for the CPU, and off for CUDA, where it costs time."""
    quantization: Quantization = "none"
    """format that the target's weights are rounded to when they are loaded (CPU). int8 and int4 round activations to 8
    bits too; int8_weight_only does not. int8 has a scale per output, int4 one per 32 inputs, int4_g128 one per 128."""
    draft_quantization: Quantization = "none"
    """format that the weights of a draft model or head are rounded to; the same values as for quantization."""
    weight_cache: bool = True
    """keep the weights as the CPU's kernels read them in files beside the Hub's cache, and map these at the next start,
    which then takes a moment; processes share their memory. docs/checkpoints.md has the limits."""
    cuda_graphs: bool = True
    """on CUDA, run whole decoding steps as CUDA graphs, and start each before the host has read the result of the one
    before. No effect on the CPU."""
    tensor_parallel_size: Annotated[
        int,
        Field(ge=1, le=MOST_RANKS),
        Shown(("--tp_size", "--tp-size", "--tp", "-tp")),
        Elsewhere("trtllm tensor_parallel_size"),
    ] = 1
    """number of processes that each hold and compute a part of every matrix of the target (CPU). mpirun, torchrun or
    srun may start them; otherwise they are started on this machine, which divides its threads among them."""
    tensor_parallel_check: bool = False
    """with tensor parallelism, check after every forward that all processes computed the same."""
    tokenizer: Annotated[str | None, Elsewhere("trtllm tokenizer")] = None
    """directory or Hub id of another tokenizer for the same token ids; without it: the target's."""
    chat_template: Annotated[str | None, Elsewhere("llama-server chat_template_file")] = None
    """file of a chat template in Jinja, or its text; without it: the tokenizer's own."""
    generation_config: Literal["auto", "none", "vllm"] = "auto"
    """source of sampling parameters that a request leaves out. "auto": the model's generation_config.json, then our
    defaults. "none": our defaults alone ("vllm" means the same)."""


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
