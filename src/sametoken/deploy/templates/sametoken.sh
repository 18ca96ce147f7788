<# Our own server, with every stated option. #>
{% set of_server = (
    "host", "port", "data_parallel_size", "max_queue", "request_timeout", "max_body", "drain_seconds",
    "max_chunks_per_second", "cors_origin", "keep_alive", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs",
    "ssl_cert_reqs", "log_level", "log_format", "access_log",
) %}
{% set gpus = gpus if o.device == "cuda" else 0 %}<# the CPU by default #>
[program]
sametoken serve {{ model }}
[script]
-m sametoken.cli serve {{ model }}
[worker]
python -m sametoken.deploy.dynamo --model {{ model }}
[options]
--draft {{ draft }}
--method {{ method }}
{% for name in stated if name not in of_server %}
{{ as_stated(name) }}
{% endfor %}
{{ extra }}
[server]
--host {{ host }}
--port {{ port }}
{% for name in stated if name in of_server[2:] %}
{{ as_stated(name) }}
{% endfor %}
[image]
sametoken:{{ "cuda" if gpus else "cpu" }}
[gpus]
{{ gpus }}
[secrets]
{% if keys %}
SAMETOKEN_API_KEY
{% endif %}
[refused]
