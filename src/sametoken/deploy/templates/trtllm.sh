<# PyTorch backend of TensorRT-LLM 1.2 and newer; further options are in trtllm.yml. `o` has the stated options by our
   names; an option that no line of both files reads is refused. #>
{% if keys %}
{{ refuse("TensorRT-LLM has no option for --api-key: its server has no keys; put a proxy before it") }}
{% endif %}
{% if (o.served_model_name or ()) | length > 1 %}
{{ refuse("--served-model-name: TensorRT-LLM serves a model under one name; give one") }}
{% endif %}
{% set backend = "" if "--backend" in extra else " --backend pytorch" %}
[program]
trtllm-serve {{ model }}{{ backend | safe }} --extra_llm_api_options trtllm.yml
[script]
-m tensorrt_llm.commands.serve {{ model }}{{ backend | safe }} --extra_llm_api_options trtllm.yml
[worker]
python -m dynamo.trtllm --model-path {{ model }} --served-model-name {{ served }} --extra-engine-args trtllm.yml
[options]
{{ extra }}
[server]
--host {{ host }}
--port {{ port }}
--served_model_name {{ served }}
--reasoning_parser {{ o.reasoning_parser }}
--chat_template {{ o.chat_template }}
--log_level {{ o.log_level }}
[files]
trtllm.yml
[image]
nvcr.io/nvidia/tensorrt-llm/release:1.2.0rc6
[metrics]
/prometheus/metrics
[notes]
{% if method and o.draft_len_schedule %}
TensorRT-LLM before 1.4 reads the sizes of draft_len_schedule as the smallest of a range
{% endif %}
[refused]
max_matching_ngram_size: SA finds matches of any length; leave it out
tree_top_k: it verifies chains only; set --tree-top-k 1, or use an engine with trees for this draft
acceptance_window: newer versions count a rate of accepted tokens instead of a length; leave it out
acceptance_length_threshold: newer versions count a rate of accepted tokens instead of a length; leave it out
data_parallel_size: start one server for each replica, with a proxy before them
suffix_decoding_max_cached_requests: it keeps at most 1024 requests; leave it out
