<# vLLM 0.32 and 0.33. `o` has the stated options by our names; an option that no line reads is refused. #>
[program]
vllm serve {{ model }}
[script]
-m vllm.entrypoints.openai.api_server --model {{ model }}
[worker]
python -m dynamo.vllm --model {{ model }}
[options]
--max-num-seqs {{ o.max_batch_size }}
--max-num-batched-tokens {{ o.max_num_tokens }}
--max-model-len {{ o.max_seq_len }}
--block-size {{ o.kv_cache_tokens_per_block }}
{{ o.kv_cache_enable_block_reuse | named({true: "--enable-prefix-caching", false: "--no-enable-prefix-caching"}) }}
--revision {{ o.revision }}
--tokenizer {{ o.tokenizer }}
--chat-template {{ o.chat_template }}
--dtype {{ o.dtype }}
--tensor-parallel-size {{ o.tensor_parallel_size }}
--data-parallel-size {{ o.data_parallel_size }}
{% set few = {"int8": "int8_per_token_head", "fp8": "fp8_per_token_head", "fp8_e4m3": "fp8_per_token_head"} %}
--kv-cache-dtype {{ o.kv_cache_dtype | named(few) }}
--generation-config {{ o.generation_config | named({"none": "vllm"}) }}
--served-model-name {{ o.served_model_name }}
{% if o.cuda_graphs is false %}
--enforce-eager
{% endif %}
{{ extra }}
{% if method %}
<# `s` has the lengths that follow from these options #>
{% set read = (o.max_draft_len, o.max_total_draft_tokens, o.draft_len_schedule, o.max_concurrency) %}
{% set drafts = {
    "method": kind, "model": draft, "revision": o.draft_revision,
    "draft_tensor_parallel_size": o.draft_tensor_parallel_size, "num_speculative_tokens": s.longest,
} %}
{% set batches = {"num_speculative_tokens_per_batch_size": s.schedule and ranges(s.schedule)} %}
--speculative-config {{ dict(dict(drafts, **own(method)), **batches) | in_json }}
{% if s.tree_top_k > 1 %}
{{ refuse("--tree-top-k %d: vLLM cannot draft trees: it verifies chains only; set --tree-top-k 1, or use an engine with trees for this draft" % s.tree_top_k) }}
{% endif %}
{% endif %}
<# vLLM has no option for the device: a build supports one #>
{% set read = o.device %}
[server]
--host {{ host }}
--port {{ port }}
--root-path {{ o.root_path }}
--ssl-certfile {{ o.ssl_certfile }}
--ssl-keyfile {{ o.ssl_keyfile }}
--ssl-ca-certs {{ o.ssl_ca_certs }}
--ssl-cert-reqs {{ o.ssl_cert_reqs }}
[image]
vllm/vllm-openai:v0.33.0
[secrets]
{% if keys %}
VLLM_API_KEY
{% endif %}
[refused]
tree_top_k: it verifies chains only; set --tree-top-k 1, or use an engine with trees for this draft
kv_cache_free_memory_fraction: its share is of all memory, not of what is free; give for example --engine-args '--gpu-memory-utilization 0.8'
rope_scaling: its keys replace all of the file's; give them whole, with rope_theta, as --engine-args '--hf-overrides JSON'
quantization: give the format's own name, for example --engine-args '--quantization fp8'
