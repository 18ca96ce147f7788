"""Keys of TensorRT-LLM's YAML file (`trtllm-serve --extra_llm_api_options`), as data; `trtllm_yaml` reads the file.

Source: `llm_args.py` of TensorRT-LLM 1.2 and of 2026, older spellings included. Keys that differ from our options in
the name alone are in the declarations of our options.
"""

from __future__ import annotations

from typing import Any

from sametoken import kinds
from sametoken.dialects.rules import Group, Only, Rule, Sets, table
from sametoken.options.serving import elsewhere
from sametoken.options.speculation import AUTO

ONE_PROCESS = "one process schedules and samples, also with --tp_size"
KERNELS = "kernels are chosen by the processor or GPU"
METRICS = "/metrics always has every statistic"
PAGES = "pages stay where the model computes"
ALWAYS = "this server always behaves so"
NO_PART = "sametoken has no such part"
FILES = "the files of the draft state it"

# Our methods for each decoding_type, the newest first; with several, the head's files determine the method.
DECODING_TYPES: dict[str, tuple[str, ...]] = {
    **{name: ours[::-1] for name, ours in kinds.aliases("trtllm").items()},
    "AUTO": (AUTO,),
}
KNOWN_TYPES = f"expected {', '.join(kinds.aliases('trtllm'))} or AUTO"
DIFFUSION = "block diffusion drafts are not supported"
NO_DECODING_TYPES = {
    "userprovided": "a drafter of your own is a Python object, which a file cannot contain; "
    "implement sametoken.drafters.base.Drafter",
    "lookahead": "Jacobi lookahead is not supported; NGram and SA draft without a model",
    "savestate": "use sametoken prepare to write hidden states",
    "pard": "parallel drafts are not supported",
    **dict.fromkeys(("dflash", "dspark"), DIFFUSION),
    **dict.fromkeys(("domino", "pearl"), "such drafts are not supported"),
}


def decoding_type(stated: Any) -> Any:
    """Our method for a decoding type, or a tuple of methods, of which the draft's files determine one.

    Raises:
        ValueError: no method corresponds to the decoding type.
    """
    name, plain = named(stated), plain_name(str(stated))
    if name is None:
        raise ValueError(f"{NO_DECODING_TYPES[plain]}; {KNOWN_TYPES}" if plain in NO_DECODING_TYPES else KNOWN_TYPES)
    methods = DECODING_TYPES[name]
    return methods if len(methods) > 1 else methods[0]


def named(stated: Any) -> str | None:
    """Decoding type in TensorRT-LLM's spelling, or None if it is unknown."""
    return next((name for name in DECODING_TYPES if plain_name(name) == plain_name(str(stated))), None)


def plain_name(stated: str) -> str:
    """Decoding type in lower case without underscores; its spellings, such as Draft_Target, differ only in these."""
    return stated.replace("_", "").lower()


COMMON = table(
    elsewhere("trtllm", "speculative_config"),
    {
        "a draft token is accepted if the target draws it, which is exact at every temperature":
            "use_rejection_sampling=false",
        "every sampling parameter works with drafts":
            "advanced_sampling_mode=full allow_advanced_sampling=true enable_penalty=true",
    },
    {
        "set acceptance_window and acceptance_length_threshold instead":
            "acceptance_rate_window_size acceptance_rate_threshold",
        "weights of a draft are loaded from its files; leave it out": "load_format=auto",
    },
    decoding_type=Sets("method", decoding_type, "Eagle is the version that the head's files state"),
)  # fmt: skip
RELAXED = "use_relaxed_acceptance_for_thinking=false relaxed_topk=1 relaxed_delta=0.0"
MIXED: dict[str, Rule] = {"sa_config": Only((), "drafters are mixed by decoding_type AUTO; leave it out")}
EAGLE = MIXED | table(
    elsewhere("trtllm", "Eagle"),
    {
        "drafts are drawn with the target's noise, at every temperature": "greedy_sampling=true",
        FILES: "num_eagle_layers:int eagle3_layers_to_capture:list",
        "dynamic_tree_max_topK limits how many nodes are expanded": "max_non_leaves_per_layer:int",
        ALWAYS: "eagle3_one_model=true",
    },
    {
        "expected true, with dynamic_tree_max_topK, or false for a chain": "use_dynamic_tree=true|false",
        "trees of fixed shape are not supported; set use_dynamic_tree and dynamic_tree_max_topK": "eagle_choices",
        "it would change the output; leave it out": "posterior_threshold",
        "only heads of Llama's layout are loaded": "eagle3_model_arch=llama3",
    },
)  # fmt: skip
# Keys of one decoding type.
OWN: dict[str, dict[str, Rule]] = {
    "Eagle": EAGLE,
    "Eagle3": EAGLE,
    "DraftTarget": MIXED,
    "Medusa": table(
        {},
        {FILES: "num_medusa_heads:int"},
        {"the tree in the head's files is used; max_total_draft_tokens limits its nodes": "medusa_choices"},
    ),
    "MTP": table(
        elsewhere("trtllm", "MTP"),
        {
            "one block makes every guess": "use_mtp_vanilla=false mtp_eagle_one_model=true",
            "the target's files state it": "num_nextn_predict_layers_from_model_config:int",
        },
        {
            "it would change the output; leave it out": RELAXED,
        },
    ),
    "NGram": table(
        elsewhere("trtllm", "NGram"),
        {"one place is kept for each n-gram, the newest or the oldest": "is_keep_all=false"},
        {},
    ),
    "SA": table(
        elsewhere("trtllm", "SA"),
        {"finished outputs are always searched; global_pool_size limits their number": "enable_global_pool=true"},
        {"matches of any length are found; leave it out": "max_matching_ngram_size=-1"},
    ),
}
SPECULATIVE = {name: COMMON | OWN.get(name, {}) for name in DECODING_TYPES}
CACHE = table(
    elsewhere("trtllm", "kv_cache_config"),
    {
        "only full pages are reused": "enable_partial_reuse=false copy_on_partial_reuse=false",
        "any page may be reused; enable_block_reuse turns it off": "block_reuse_config:dict",
        "there is one cache manager": "use_kv_cache_manager_v2=auto",
        "served models have no state-space layers": "mamba_ssm_cache_dtype=auto",
        PAGES: "secondary_offload_min_priority:int",
        ONE_PROCESS: "attention_dp_events_gather_period_ms:int",
        METRICS: "iteration_stats_interval:int",
        "a sequence that lost its pages starts again as soon as enough pages are free": "max_util_for_resume:float",
    },
    {
        f"{PAGES}; leave it out": "host_cache_size=0 disk_cache_size=0 disk_cache_path use_uvm=false",
        "the model's files state it; leave it out": "max_attention_window sink_token_length",
        "give the size as free_gpu_memory_fraction or max_tokens": "max_gpu_total_bytes=0",
        "cache events are not published; leave it out": "event_buffer_max_size=0",
        "served models have no encoder": "cross_kv_cache_fraction",
    },
)  # fmt: skip
GRAPHS = table(
    {},
    {
        "a graph is captured for each batch size that occurs; max_batch_size limits the batch":
            "batch_sizes:list max_batch_size:int enable_padding=false mode=decode",
    },
    {},
)  # fmt: skip
TOP = table(
    elsewhere("trtllm"),
    {
        "prompts are always computed in pieces of at most max_num_tokens, so none is too long for a step":
            "enable_chunked_prefill=true",
        "steps overlap with the host's work only where they are CUDA graphs; "
        "cuda_graph_config: null turns both off": "disable_overlap_scheduler:bool",
        KERNELS: "enable_autotuner=false attn_backend:str nvfp4_gemm_config:dict torch_compile_config:dict "
            "enable_min_latency=false prefill_cuda_graph_backend=disabled",
        METRICS: "print_iter_log=false enable_iter_perf_stats=true enable_iter_req_stats=true return_perf_metrics=true "
            "prometheus_metrics_config:dict",
        ONE_PROCESS: "gpus_per_node=1 attention_dp_config:dict allreduce_strategy=AUTO orchestrator_type:str "
            "num_postprocess_workers=0 num_serve_frontends=1",
        "sametoken has one engine, in PyTorch and compiled kernels": "backend=pytorch",
        "code from a checkpoint is never run": "trust_remote_code=false",
        "grammars are always applied by llguidance": "guided_decoding_backend=llguidance",
        "max_seq_len is the limit for prompt and output together": "max_input_len:int",
        "there is one implementation of experts": "moe_config:dict",
        "first come, first served; the newest sequence starts again when pages run out": "scheduler_config:dict",
        "the n of a request with use_beam_search is the width of its search": "max_beam_width:int",
        "a step never waits for more requests":
            "batch_wait_timeout_ms:float=0 batch_wait_timeout_iters=0 batch_wait_max_tokens_ratio:float=0",
        "what a request leaves out comes from the model's generation_config.json; --generation-config none changes "
        "that": "generation_config=trtllm",
        NO_PART: "garbage_collection_gen0_threshold:int sleep_config:dict telemetry_config:dict",
    },
    {
        "not supported: no such parallelism, a chunk for every step; set it to 1":
            "pipeline_parallel_size=1 context_parallel_size=1 moe_tensor_parallel_size=1 moe_expert_parallel_size=1 "
            "moe_cluster_parallel_size=1 stream_interval=1",
        f"attention is not data-parallel: {ONE_PROCESS}; set it to false": "enable_attention_dp=false",
        "weights are loaded from the checkpoint's files; leave it out": "load_format=auto",
        "adapters are not supported; merge them into the weights": "lora_config peft_cache_config",
        f"{ONE_PROCESS}; leave it out": "kv_connector_config cache_transceiver_config",
        "it would change the output; leave it out": "sparse_attention_config kv_cache_compression_config",
        "set environment variables before the start": "env_overrides",
        "the checkpoint's config.json describes the model; leave it out": "model_kwargs",
    },
    kv_cache_config=Group(CACHE),
    cuda_graph_config=Group(GRAPHS, present=("cuda_graphs", True), absent=("cuda_graphs", False)),
)  # fmt: skip
