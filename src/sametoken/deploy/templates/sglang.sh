<# SGLang 0.5.23. `o` has the stated options by our names; an option that no line reads is refused. #>
{% if keys %}
{{ refuse("SGLang has no option for --api-key: its key would stand on the command line, which every user of the machine sees; put a proxy before it") }}
{% endif %}
{% if o.kv_cache_dtype == "int8" %}
{{ refuse("--kv-cache-dtype int8: SGLang has no such type; expected auto, bfloat16 or fp8") }}
{% endif %}
{% if (o.served_model_name or ()) | length > 1 %}
{{ refuse("--served-model-name: SGLang serves a model under one name; give one") }}
{% endif %}
[program]
python -m sglang.launch_server --model-path {{ model }}
[script]
-m sglang.launch_server --model-path {{ model }}
[worker]
python -m dynamo.sglang --model-path {{ model }}
[options]
--revision {{ o.revision }}
--tokenizer-path {{ o.tokenizer }}
--chat-template {{ o.chat_template }}
--dtype {{ o.dtype }}
--device {{ o.device }}
--max-running-requests {{ o.max_batch_size }}
--chunked-prefill-size {{ o.max_num_tokens }}
--context-length {{ o.max_seq_len }}
--tp-size {{ o.tensor_parallel_size }}
--dp-size {{ o.data_parallel_size }}
--page-size {{ o.kv_cache_tokens_per_block }}
--max-total-tokens {{ o.kv_cache_max_tokens }}
--kv-cache-dtype {{ o.kv_cache_dtype | named({"fp8": "fp8_e4m3", "bfloat16": "bf16"}) }}
--sampling-defaults {{ o.generation_config | named({"auto": "model"}, "openai") }}
--served-model-name {{ o.served_model_name }}
--reasoning-parser {{ o.reasoning_parser }}
--max-queued-requests {{ o.max_queue }}
{% if o.cuda_graphs is false %}
--disable-decode-cuda-graph
--disable-prefill-cuda-graph
{% endif %}
{% if o.kv_cache_enable_block_reuse is false %}
--disable-radix-cache
{% endif %}
--enable-metrics
{{ extra }}
{% if method %}
<# `s` has the lengths that follow from these options; num-draft-tokens includes the pending token #>
{% set read = (o.max_draft_len, o.max_total_draft_tokens, o.tree_top_k) %}
--speculative-algorithm {{ kind }}
{% if draft is none and kind != "NEXTN" %}
--speculative-num-draft-tokens {{ s.budget + 1 }}
{% else %}
{% set chain = s.tree_top_k == 1 %}
--speculative-draft-model-path {{ draft }}
--speculative-draft-model-revision {{ o.draft_revision }}
--speculative-num-steps {{ s.longest if chain else s.max_draft_len }}
--speculative-eagle-topk {{ s.tree_top_k }}
--speculative-num-draft-tokens {{ (s.longest if chain else s.budget) + 1 }}
{% endif %}
{% endif %}
[server]
--host {{ host }}
--port {{ port }}
--fastapi-root-path {{ o.root_path }}
--ssl-certfile {{ o.ssl_certfile }}
--ssl-keyfile {{ o.ssl_keyfile }}
--ssl-ca-certs {{ o.ssl_ca_certs }}
--log-level {{ o.log_level }}
[image]
lmsysorg/sglang:v0.5.23
[refused]
draft_len_schedule: it chooses lengths by a file of its own; give --engine-args '--speculative-adaptive --speculative-adaptive-config FILE'
max_concurrency: it has no limit of the batch for drafts; leave it out
adaptive: drafts have one length unless you give --engine-args --speculative-adaptive; set --no-adaptive
kv_cache_free_memory_fraction: its share is of all memory, not of what is free; give for example --engine-args '--mem-fraction-static 0.8'
rope_scaling: its keys replace all of the file's; give them whole as --engine-args '--json-model-override-args JSON'
quantization: give the format's own name, for example --engine-args '--quantization fp8'
draft_quantization: give for example --engine-args '--speculative-draft-model-quantization fp8'
