"""What each engine's command line and files may have, read in its own sources: plans are held against it."""

from __future__ import annotations


def words(text: str) -> set[str]:
    """The words of a text."""
    return set(text.split())


# vLLM 0.33: keys of --speculative-config, and the options of `vllm serve` that plans use.
VLLM_KEYS = words(
    "method model num_speculative_tokens enforce_eager draft_tensor_parallel_size quantization moe_backend "
    "attention_backend kv_cache_dtype max_model_len revision code_revision draft_load_config prompt_lookup_max "
    "prompt_lookup_min parallel_drafting num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
    "rejection_sample_method draft_sample_method use_heterogeneous_vocab"
)
VLLM_METHODS = {"ngram", "draft_model", "suffix", "eagle", "eagle3", "mtp", "medusa"}  # medusa up to 0.32
VLLM_FLAGS = words(
    "revision tokenizer chat-template dtype tensor-parallel-size data-parallel-size kv-cache-dtype generation-config "
    "served-model-name root-path ssl-certfile ssl-keyfile ssl-ca-certs ssl-cert-reqs max-num-seqs "
    "max-num-batched-tokens max-model-len block-size enable-prefix-caching no-enable-prefix-caching enforce-eager "
    "speculative-config host port gpu-memory-utilization"
)
# SGLang 0.5.23.
SGLANG_ALGORITHMS = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO"}
SGLANG_FLAGS = words(
    "model-path revision tokenizer-path chat-template dtype device max-running-requests chunked-prefill-size "
    "context-length tp-size dp-size page-size max-total-tokens kv-cache-dtype sampling-defaults served-model-name "
    "reasoning-parser max-queued-requests fastapi-root-path ssl-certfile ssl-keyfile ssl-ca-certs log-level host port "
    "disable-radix-cache disable-decode-cuda-graph disable-prefill-cuda-graph enable-metrics speculative-algorithm "
    "speculative-draft-model-path speculative-draft-model-revision speculative-num-steps speculative-eagle-topk "
    "speculative-num-draft-tokens mem-fraction-static"
)
# TensorRT-LLM 1.2 to 1.4.
TRTLLM_FLAGS = words(
    "host port backend log_level reasoning_parser chat_template served_model_name extra_llm_api_options"
)
TRTLLM_KEYS = words(
    "tensor_parallel_size max_batch_size max_num_tokens max_seq_len dtype tokenizer revision speculative_config "
    "kv_cache_config cuda_graph_config disable_overlap_scheduler return_perf_metrics"
)
TRTLLM_CACHE_KEYS = {"enable_block_reuse", "tokens_per_block", "max_tokens", "free_gpu_memory_fraction", "dtype"}
_COMMON = {"decoding_type", "max_draft_len", "max_total_draft_tokens", "max_concurrency", "draft_len_schedule"}
_MODEL = _COMMON | {"speculative_model_dir"}
TRTLLM_SPECULATIVE = {
    "Eagle": _MODEL | {"use_dynamic_tree", "dynamic_tree_max_topK"},
    "DraftTarget": _MODEL,
    "NGram": _COMMON | {"max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"},
    "SA": _COMMON | {"enable_global_pool", "global_pool_size"},
}
