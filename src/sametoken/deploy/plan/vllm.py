"""vLLM's command for a speculative configuration, as vLLM 0.32 and 0.33 read it."""

from __future__ import annotations

import json
from typing import Any

from sametoken.deploy.plan.launch import NO_TREES, Launch, Stated, Wanted, name_of, words
from sametoken.errors import ConfigError
from sametoken.options.serving import elsewhere

NAME, IMAGE = "vLLM", "vllm/vllm-openai:v0.33.0"
ALIKE = (
    "revision tokenizer chat_template dtype tensor_parallel_size data_parallel_size kv_cache_dtype generation_config "
    "served_model_name"
)
FLAGS = {ours: theirs for theirs, ours in elsewhere("vllm-serve").items()} | {name: name for name in ALIKE.split()}
SERVER = {name: name for name in ["root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"]}
DTYPES = {"int8": "int8_per_token_head", "fp8": "fp8_per_token_head", "fp8_e4m3": "fp8_per_token_head"}
CONVERT = {
    "kv_cache_dtype": lambda dtype: DTYPES.get(dtype, dtype),
    "generation_config": lambda source: "vllm" if source == "none" else source,
}
MOST = 65536  # sequences of a batch; larger than vLLM's limits
REASONS = {
    "tree_top_k": NO_TREES,
    "kv_cache_free_memory_fraction": "its share is of all memory, not of what is free; give for example --engine-args "
    "'--gpu-memory-utilization 0.8'",
    "quantization": "give the format's own name, for example --engine-args '--quantization fp8'",
}


def translate(wanted: Wanted) -> Launch:
    """The command of vLLM's server.

    Raises:
        ConfigError: vLLM has no option for something that was stated.
    """
    stated = Stated(NAME, wanted)
    drafts = _speculative(wanted, stated)
    graphs = stated.take("cuda_graphs", True)
    stated.take("device")  # vLLM computes where it was built for
    host, port = stated.take("host", "127.0.0.1"), stated.take("port", 8000)
    engine = words(stated.named(FLAGS, CONVERT))
    server = words({"host": host, "port": port} | stated.named(SERVER, {}))
    stated.finish(REASONS)
    options = [*engine, *([] if graphs else ["--enforce-eager"]), *wanted.extra]
    if drafts is not None:
        options += ["--speculative-config", json.dumps(drafts)]
    return Launch(
        engine=NAME,
        program=("vllm", "serve", wanted.model),
        script=("-m", "vllm.entrypoints.openai.api_server", "--model", wanted.model),
        worker=("python", "-m", "dynamo.vllm", "--model", wanted.model),
        options=tuple(options),
        server=server,
        image=IMAGE,
        port=port,
        gpus=wanted.gpus,
        served=wanted.served,
        places=wanted.places,
        secrets=("VLLM_API_KEY",) if wanted.keys else (),
    )


def _speculative(wanted: Wanted, stated: Stated) -> dict[str, Any] | None:
    """The value of --speculative-config, None without drafts."""
    if wanted.method is None:
        return None
    stated.take("max_draft_len")
    stated.take("max_total_draft_tokens")
    said: dict[str, Any] = {"method": name_of(wanted.method, "vllm", NAME)}
    if wanted.draft is not None:
        said["model"] = wanted.draft
    if (revision := stated.take("draft_revision")) is not None:
        said["revision"] = revision
    if (ranks := stated.take("draft_tensor_parallel_size")) is not None:
        said["draft_tensor_parallel_size"] = ranks
    said["num_speculative_tokens"] = wanted.speculative.longest
    for theirs, ours in elsewhere("vllm", wanted.method).items():
        said[theirs] = getattr(wanted.speculative, ours)
        stated.take(ours)
    stated.take("draft_len_schedule")
    stated.take("max_concurrency")
    if wanted.speculative.schedule is not None:
        said["num_speculative_tokens_per_batch_size"] = ranges(wanted.speculative.schedule)
    if wanted.speculative.tree_top_k > 1:
        raise ConfigError(f"--tree-top-k {wanted.speculative.tree_top_k}: {NAME} cannot draft trees: {NO_TREES}")
    return said


def ranges(schedule: dict[int, int]) -> list[list[int]]:
    """[[first, last, tokens], ...] of a table of last batch sizes; vLLM would go on with the last length."""
    found, first = [], 1
    for last, tokens in sorted(schedule.items()):
        found.append([first, last, tokens])
        first = last + 1
    return [*found, [first, MOST, 0]]
