"""SGLang's command for a speculative configuration, as SGLang 0.5.23 reads it."""

from __future__ import annotations

from typing import Any

from sametoken.deploy.plan.launch import Launch, Stated, Wanted, name_of, words
from sametoken.errors import ConfigError

NAME, IMAGE = "SGLang", "lmsysorg/sglang:v0.5.23"
FLAGS = {
    "revision": "revision", "tokenizer": "tokenizer_path", "chat_template": "chat_template", "dtype": "dtype",
    "device": "device", "max_batch_size": "max_running_requests", "max_num_tokens": "chunked_prefill_size",
    "max_seq_len": "context_length", "tensor_parallel_size": "tp_size", "data_parallel_size": "dp_size",
    "kv_cache_tokens_per_block": "page_size", "kv_cache_max_tokens": "max_total_tokens",
    "kv_cache_dtype": "kv_cache_dtype", "generation_config": "sampling_defaults",
    "served_model_name": "served_model_name", "reasoning_parser": "reasoning_parser",
    "max_queue": "max_queued_requests",
}  # fmt: skip
SERVER = {
    "root_path": "fastapi_root_path", "ssl_certfile": "ssl_certfile", "ssl_keyfile": "ssl_keyfile",
    "ssl_ca_certs": "ssl_ca_certs", "log_level": "log_level",
}  # fmt: skip
REASONS = {
    "draft_len_schedule": "it chooses lengths by a file of its own; give --engine-args '--speculative-adaptive "
    "--speculative-adaptive-config FILE'",
    "max_concurrency": "it has no limit of the batch for drafts; leave it out",
    "adaptive": "drafts have one length unless you give --engine-args --speculative-adaptive; set --no-adaptive",
    "api_key": "its key would stand on the command line, which every user of the machine sees; put a proxy before it",
    "kv_cache_free_memory_fraction": "its share is of all memory, not of what is free; give for example --engine-args "
    "'--mem-fraction-static 0.8'",
    "quantization": "give the format's own name, for example --engine-args '--quantization fp8'",
    "draft_quantization": "give for example --engine-args '--speculative-draft-model-quantization fp8'",
}


def cache_type(dtype: str) -> str:
    """SGLang's dtype of the KV cache for ours; raises `ValueError` where there is none."""
    if dtype == "int8":
        raise ValueError("has no such type; expected auto, bfloat16 or fp8")
    return {"fp8": "fp8_e4m3", "bfloat16": "bf16"}.get(dtype, dtype)


def one_name(names: Any) -> str:
    """The only name of the model; raises `ValueError` for several."""
    if len(names) != 1:
        raise ValueError("serves a model under one name; give one")
    return str(names[0])


CONVERT = {
    "kv_cache_dtype": cache_type,
    "generation_config": lambda source: "model" if source == "auto" else "openai",
    "served_model_name": one_name,
}


def translate(wanted: Wanted) -> Launch:
    """The command of SGLang's server.

    Raises:
        ConfigError: SGLang has no option for something that was stated.
    """
    stated = Stated(NAME, wanted)
    drafts = _speculative(wanted, stated)
    graphs, reuse = stated.take("cuda_graphs", True), stated.take("kv_cache_enable_block_reuse", True)
    host, port = stated.take("host", "127.0.0.1"), stated.take("port", 8000)
    engine = stated.named(FLAGS, CONVERT)
    server = {"host": host, "port": port} | stated.named(SERVER, {})
    stated.finish(REASONS)
    switches = [] if graphs else ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]
    switches += [] if reuse else ["--disable-radix-cache"]
    options = (*words(engine), *switches, "--enable-metrics", *wanted.extra, *words(drafts))
    model = ("--model-path", wanted.model)
    script = ("-m", "sglang.launch_server", *model)
    return Launch(
        engine=NAME,
        program=("python", *script),
        script=script,
        worker=("python", "-m", "dynamo.sglang", *model),
        options=options,
        server=words(server),
        image=IMAGE,
        port=port,
        gpus=wanted.gpus,
        served=wanted.served,
        places=wanted.places,
    )


def _speculative(wanted: Wanted, stated: Stated) -> dict[str, Any]:
    """Options and values that make drafts, none without drafts."""
    if wanted.keys:
        raise ConfigError(f"{NAME} has no option for --api-key: {REASONS['api_key']}")
    if wanted.method is None:
        return {}
    for name in ("max_draft_len", "max_total_draft_tokens", "tree_top_k"):
        stated.take(name)
    said: dict[str, Any] = {"speculative_algorithm": name_of(wanted.method, "sglang", NAME)}
    speculative = wanted.speculative
    if wanted.draft is None:  # n-grams: the number counts the pending token
        return said | {"speculative_num_draft_tokens": speculative.budget + 1}
    said["speculative_draft_model_path"] = wanted.draft
    if (revision := stated.take("draft_revision")) is not None:
        said["speculative_draft_model_revision"] = revision
    chain = speculative.tree_top_k == 1
    return said | {
        "speculative_num_steps": speculative.longest if chain else speculative.max_draft_len,
        "speculative_eagle_topk": speculative.tree_top_k,
        "speculative_num_draft_tokens": (speculative.longest if chain else speculative.budget) + 1,
    }
