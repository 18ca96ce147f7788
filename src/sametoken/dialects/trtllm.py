"""TensorRT-LLM's keys as data: those of the YAML file that `trtllm-serve --extra_llm_api_options` reads.

Source: `llm_args.py` of TensorRT-LLM 1.2 and of 2026, older spellings included. `trtllm_yaml` reads the file.
"""

from __future__ import annotations

from typing import Any

from sametoken.dialects.rules import Group, NoEffect, Only, Rule, Sets, Table

ONE_PROCESS = "the model runs in one process"
NOT_PARALLEL = f"tensor parallelism is not implemented yet: {ONE_PROCESS}; set it to 1"
ONE_STEP = "graphs are captured for the batches that occur; the size of a batch is max_batch_size"
TOO_GENERAL = "not offered here; leave it out"
KERNELS = "kernels are chosen by the processor or GPU"
DENSE = "served models have no mixture of experts"
METRICS = "/metrics always has every statistic"
EAGLE_HEADS = ("eagle3", "eagle")  # what decoding_type Eagle may be: which, the head's own files say

DECODING_TYPES: dict[str, Any] = {
    "eagle": EAGLE_HEADS,
    "eagle3": "eagle3",
    "drafttarget": "draft_target",
    "medusa": "medusa",
    "ngram": "ngram",
    "sa": "suffix",
    "auto": "auto",
}
KNOWN_TYPES = "expected Eagle, Eagle3, DraftTarget, Medusa, NGram, SA or AUTO"
NO_DECODING_TYPES = {
    "userprovided": "a drafter of your own is a Python object, which a file cannot hold; "
    "implement sametoken.drafters.base.Drafter",
    "mtp": "prediction layers inside the target are not supported",
    "lookahead": "Jacobi lookahead is not supported; NGram and SA draft without a model",
    "savestate": "hidden states are dumped by sametoken prepare",
    "pard": "parallel drafts are not supported",
    "dflash": "block diffusion drafts are not supported",
    "dspark": "block diffusion drafts are not supported",
    "domino": "such drafts are not supported",
    "pearl": "such drafts are not supported",
}


def decoding_type(stated: Any) -> Any:
    """Our method, or several of which the draft's own files say one.

    Raises:
        ValueError: there is none.
    """
    name = plain_name(str(stated))
    if name not in DECODING_TYPES:
        raise ValueError(f"{NO_DECODING_TYPES[name]}; {KNOWN_TYPES}" if name in NO_DECODING_TYPES else KNOWN_TYPES)
    return DECODING_TYPES[name]


def plain_name(stated: str) -> str:
    """A decoding type without what its spellings differ in: Draft_Target, DraftTarget."""
    return stated.replace("_", "").lower()


def opposite(stated: Any) -> Any:
    """The other truth value; anything else stays, for the check of our setting to refuse."""
    return not stated if isinstance(stated, bool) else stated


COMMON: Table = {
    "decoding_type": Sets("method", decoding_type, "Eagle is the version that the head's files say"),
    "max_draft_len": Sets("max_draft_len"),
    "max_total_draft_tokens": Sets("max_total_draft_tokens"),
    "speculative_model_dir": Sets("draft"),
    "speculative_model": Sets("draft"),
    "pytorch_weights_path": Sets("draft"),
    "max_concurrency": Sets("max_concurrency"),
    "draft_len_schedule": Sets("draft_len_schedule", note="sizes are upper bounds of the batch"),
    "acceptance_window": Sets("acceptance_window"),
    "acceptance_length_threshold": Sets("acceptance_length_threshold"),
    "acceptance_rate_window_size": Only((), "set acceptance_window and acceptance_length_threshold instead"),
    "acceptance_rate_threshold": Only((), "set acceptance_window and acceptance_length_threshold instead"),
    "load_format": Only(("auto",), "weights of a draft are loaded from its files; leave it out"),
    "use_rejection_sampling": NoEffect(
        bool, "a draft token is accepted if it is what the target draws there, which is exact at any temperature",
        (False,),
    ),
    "advanced_sampling_mode": NoEffect(str, "every sampling parameter goes together with drafts", ("full",)),
    "allow_advanced_sampling": NoEffect(bool, "every sampling parameter goes together with drafts", (True,)),
    "enable_penalty": NoEffect(bool, "penalties always go together with drafts", (True,)),
}  # fmt: skip
MIXED = Only((), "drafters are mixed by decoding_type AUTO; leave it out")
EAGLE: Table = {
    "use_dynamic_tree": Only((True, False), "expected true, with dynamic_tree_max_topK, or false for a chain"),
    "dynamic_tree_max_topK": Sets("tree_top_k"),
    "eagle_choices": Only((), "trees of fixed shape are not supported; set use_dynamic_tree and dynamic_tree_max_topK"),
    "greedy_sampling": NoEffect(bool, "drafts are drawn as the target draws, at any temperature", (True,)),
    "posterior_threshold": Only((), "typical acceptance changes the output; leave it out"),
    "num_eagle_layers": NoEffect(int, "the head's files say how many layers it has"),
    "max_non_leaves_per_layer": NoEffect(int, "dynamic_tree_max_topK bounds the nodes that are expanded"),
    "eagle3_one_model": NoEffect(bool, "target and head always share one engine", (True,)),
    "eagle3_layers_to_capture": Only((), "the head's config.json says it (eagle_aux_hidden_state_layer_ids)"),
    "eagle3_model_arch": Only(("llama3",), "only heads of Llama's layout are loaded"),
    "sa_config": MIXED,
}
NGRAM: Table = {
    "max_matching_ngram_size": Sets("max_matching_ngram_size"),
    "is_keep_all": NoEffect(bool, "one place is kept per n-gram, the newest or the oldest", (False,)),
    "is_use_oldest": Sets("is_use_oldest"),
    "is_public_pool": Sets("is_public_pool"),
}
SUFFIX: Table = {
    "max_matching_ngram_size": Only((-1,), "matches of any length are found; leave it out"),
    "enable_global_pool": NoEffect(bool, "finished outputs are searched; global_pool_size bounds them", (True,)),
    "global_pool_size": Sets("suffix_decoding_max_cached_requests"),
}
MEDUSA: Table = {
    "medusa_choices": Only((), "the heads' own tree is used; max_total_draft_tokens cuts it"),
    "num_medusa_heads": NoEffect(int, "the heads' files say how many there are"),
}
SPECULATIVE: dict[str, Table] = {
    "eagle": COMMON | EAGLE,  # type: ignore[operator]
    "eagle3": COMMON | EAGLE,  # type: ignore[operator]
    "drafttarget": COMMON | {"sa_config": MIXED},  # type: ignore[operator]
    "medusa": COMMON | MEDUSA,  # type: ignore[operator]
    "ngram": COMMON | NGRAM,  # type: ignore[operator]
    "sa": COMMON | SUFFIX,  # type: ignore[operator]
    "auto": COMMON,
}

CACHE: Table = {
    "enable_block_reuse": Sets("kv_cache_enable_block_reuse"),
    "free_gpu_memory_fraction": Sets("kv_cache_free_memory_fraction", note="of the memory left after the weights"),
    "tokens_per_block": Sets("kv_cache_tokens_per_block"),
    "max_tokens": Sets("kv_cache_max_tokens"),
    "dtype": Only(("auto",), "the cache has the model's own type"),
    "mamba_ssm_cache_dtype": NoEffect(str, "served models have no state-space layers", ("auto",)),
    "enable_partial_reuse": NoEffect(bool, "whole pages are reused", (False,)),
    "copy_on_partial_reuse": NoEffect(bool, "whole pages are reused", (False,)),
    "max_attention_window": Only((), "the model's own window is used"),
    "sink_token_length": Only((), "the model's own attention is used"),
    "host_cache_size": Only((0,), "pages stay where the model computes; leave it out"),
    "disk_cache_size": Only((0,), "pages stay where the model computes; leave it out"),
    "disk_cache_path": Only((), "pages stay where the model computes; leave it out"),
    "secondary_offload_min_priority": NoEffect(int, "pages stay where the model computes"),
    "max_gpu_total_bytes": Only((0,), "give the size as free_gpu_memory_fraction or max_tokens"),
    "event_buffer_max_size": Only((0,), "cache events are not published; leave it out"),
    "attention_dp_events_gather_period_ms": NoEffect(int, ONE_PROCESS),
    "iteration_stats_interval": NoEffect(int, METRICS),
    "use_uvm": Only((False,), "pages are in the device's own memory"),
    "use_kv_cache_manager_v2": NoEffect(str, "there is one cache manager", ("auto",)),
    "max_util_for_resume": NoEffect(float, "a sequence that lost its pages starts again as soon as there are some"),
    "block_reuse_config": NoEffect(dict, "any page may be reused; enable_block_reuse turns it off"),
    "cross_kv_cache_fraction": Only((), "served models have no encoder"),
}
GRAPHS: Table = {
    "batch_sizes": NoEffect(list, ONE_STEP),
    "max_batch_size": NoEffect(int, ONE_STEP),
    "enable_padding": NoEffect(bool, ONE_STEP, (False,)),
    "mode": NoEffect(str, "decoding steps are what is captured", ("decode",)),
}


def parallel(names: tuple[str, ...], reason: str) -> dict[str, Rule]:
    """Numbers of processes, each of which may be 1."""
    return dict.fromkeys(names, Only((1,), reason))


def refused(names: tuple[str, ...], reason: str = TOO_GENERAL) -> dict[str, Rule]:
    """Keys that may be null only."""
    return dict.fromkeys(names, Only((), reason))


TOP: Table = {
    "max_batch_size": Sets("max_batch_size"),
    "max_num_tokens": Sets("max_num_tokens"),
    "max_seq_len": Sets("max_seq_len"),
    "dtype": Sets("dtype"),
    "revision": Sets("revision"),
    "tokenizer": Sets("tokenizer"),
    "kv_cache_config": Group(CACHE),
    "cuda_graph_config": Group(GRAPHS, present=("cuda_graphs", True), absent=("cuda_graphs", False)),
    "enable_chunked_prefill": NoEffect(
        bool, "prompts are always computed in pieces of at most max_num_tokens, so none is too long for a step", (True,)
    ),
    "disable_overlap_scheduler": NoEffect(
        bool, "the host runs ahead where steps are captured as graphs (CUDA) and not elsewhere; "
        "cuda_graph_config: null turns both off",
    ),
    "enable_autotuner": NoEffect(bool, KERNELS, (False,)),
    "print_iter_log": NoEffect(bool, METRICS, (False,)),
    "enable_iter_perf_stats": NoEffect(bool, METRICS, (True,)),
    "enable_iter_req_stats": NoEffect(bool, METRICS, (True,)),
    "return_perf_metrics": NoEffect(bool, METRICS, (True,)),
    "prometheus_metrics_config": NoEffect(dict, "histograms have fixed buckets"),
    "backend": NoEffect(str, "sametoken has one engine, in PyTorch and compiled kernels", ("pytorch",)),
    "trust_remote_code": NoEffect(bool, "code from a checkpoint is never run", (False,)),
    "guided_decoding_backend": NoEffect(str, "forms are always kept by llguidance", ("llguidance",)),
    **parallel(("tensor_parallel_size",), NOT_PARALLEL),
    **parallel(
        ("pipeline_parallel_size", "context_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size",
         "moe_cluster_parallel_size", "max_beam_width", "stream_interval"),
        "not implemented: one process, no beams, a chunk every step; set it to 1",
    ),
    "gpus_per_node": NoEffect(int, ONE_PROCESS, (1,)),
    "enable_attention_dp": Only((False,), f"attention is not data-parallel: {ONE_PROCESS}; set it to false"),
    "attention_dp_config": NoEffect(dict, ONE_PROCESS),
    "allreduce_strategy": NoEffect(str, ONE_PROCESS, ("AUTO",)),
    "orchestrator_type": NoEffect(str, ONE_PROCESS),
    "num_postprocess_workers": NoEffect(int, "replies are made in the server's own process", (0,)),
    "num_serve_frontends": NoEffect(int, "replies are made in the server's own process", (1,)),
    "max_input_len": NoEffect(int, "prompt and output share max_seq_len"),
    "attn_backend": NoEffect(str, KERNELS),
    "moe_config": NoEffect(dict, DENSE),
    "nvfp4_gemm_config": NoEffect(dict, KERNELS),
    "torch_compile_config": NoEffect(dict, KERNELS),
    "prefill_cuda_graph_backend": NoEffect(str, "decoding steps are what is captured", ("disabled",)),
    "scheduler_config": NoEffect(dict, "first come, first served; the newest sequence starts again when pages run out"),
    "batch_wait_timeout_ms": NoEffect(float, "a step never waits for more requests", (0,)),
    "batch_wait_timeout_iters": NoEffect(int, "a step never waits for more requests", (0,)),
    "batch_wait_max_tokens_ratio": NoEffect(float, "a step never waits for more requests", (0,)),
    "load_format": Only(("auto",), "weights are loaded from the checkpoint's files; leave it out"),
    "generation_config": NoEffect(str, "requests have OpenAI's defaults", ("trtllm",)),
    "enable_min_latency": NoEffect(bool, KERNELS, (False,)),
    "garbage_collection_gen0_threshold": NoEffect(int, "Python's own threshold is kept"),
    "sleep_config": NoEffect(dict, "the server does not sleep"),
    "telemetry_config": NoEffect(dict, "nothing is sent anywhere"),
    **refused(("lora_config", "peft_cache_config"), "adapters are not supported; merge them into the weights"),
    **refused(("kv_connector_config", "cache_transceiver_config"), ONE_PROCESS),
    **refused(("sparse_attention_config", "kv_cache_compression_config"), "it would change the output; leave it out"),
    **refused(("env_overrides",), "set environment variables before the start"),
    **refused(("model_kwargs",), "the checkpoint's config.json says what the model is"),
}  # fmt: skip
