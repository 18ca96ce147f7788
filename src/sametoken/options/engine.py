"""The options of an engine: its model, its batches, its memory. Names are TensorRT-LLM's and vLLM's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sametoken.options.declaration import Positive, Settings, Shown

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int8_weight_only", "int4", "int4_g128"]
MOST_THREADS = 1024  # more than any machine this is for, and few enough to start


class ModelSettings(Settings):
    """What is loaded beside MODEL."""

    draft: str | None = None
    """draft model or head: directory, run or Hub id; None is the embedded target's own."""
    revision: str | None = None
    """branch, tag or commit of MODEL on the Hub; None is its main branch."""
    draft_revision: str | None = None
    """the same for the draft."""


class KVCacheConfig(Settings):
    """The page pool."""

    tokens_per_block: Annotated[int, Field(ge=1, le=1024)] = 32
    """page size."""
    enable_block_reuse: bool = True
    """keep full pages of finished requests for prompts with the same beginning."""
    max_tokens: Annotated[Positive | None, Shown(("--kv-cache-tokens",))] = None
    """tokens that the pool holds; None plans for every row at full context, as far as memory goes."""
    free_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """share of the memory left after the weights that the pool may take."""


class EngineConfig(Settings):
    """The engine around the model."""

    dtype: DType = "auto"
    """of weights, activations and cache; "auto" is the checkpoint's own (bfloat16 for float16 on CPU)."""
    device: str = "auto"
    """"auto" is CUDA where there is one, otherwise the CPU."""
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """sequences that run together."""
    max_num_tokens: Annotated[int, Field(ge=2)] = 512
    """tokens of one step over the batch, which bounds the pieces that prompts are cut into."""
    max_mixed_prefill_tokens: Positive = 64
    """prompt tokens at most of a step that also decodes."""
    max_prefill_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """of the time while streams run, prompts may take at most this share: at 0.5 a token of a stream takes twice as
    long on average while a prompt is read. 1 is no limit: most tokens a second in all."""
    max_seq_len: Annotated[int, Field(ge=2)] | None = None
    """prompt plus output; None is the model's context."""
    deterministic: bool | None = None
    """give a token the same bits whatever is computed beside it, so that drafts and batches cannot change the output
    even in bfloat16; None is on for the CPU and off for CUDA, where fixed tiles cost time."""
    quantization: Quantization = "none"
    """what the target's weights are rounded to when they are loaded (CPU): int8 and int4 multiply with 8-bit
    activations, int8 has a scale per output, int4 per 32 inputs, int4_g128 per 128."""
    draft_quantization: Quantization = "none"
    """the same for a draft model."""
    cuda_graphs: bool = True
    """on CUDA, capture whole decoding steps and run them one ahead of the host; the CPU has no graphs."""
    tokenizer: str | None = None
    """directory or Hub id of another tokenizer for the same token ids; None is the target's."""
    chat_template: str | None = None
    """file of a chat template in Jinja, or its text; None is the tokenizer's."""
    generation_config: Literal["auto", "none", "vllm"] = "auto"
    """where sampling parameters that a request leaves out come from: "auto" is the model's generation_config.json,
    then our defaults; "none" is our defaults alone ("vllm" says the same)."""
