"""TensorRT-LLM's YAML and command for a speculative configuration, as its PyTorch backend of 1.2 and newer reads it."""

from __future__ import annotations

import re
from typing import Any

from sametoken import kinds
from sametoken.deploy.plan.launch import NO_TREES, Launch, Stated, Wanted, name_of, words
from sametoken.deploy.plan.sglang import one_name
from sametoken.deploy.plan.text import as_yaml
from sametoken.errors import ConfigError
from sametoken.options.serving import CACHE, elsewhere

NAME, FILE = "TensorRT-LLM", "trtllm.yml"
IMAGE, NEWER = (f"nvcr.io/nvidia/tensorrt-llm/release:{version}" for version in ("1.2.0rc6", "1.3.0rc12"))
OLD_NAMES, NEW_NAMES = "trtllm-1.2", "trtllm-1.3"  # tools in the records of kinds
KEYS = {
    ours: theirs
    for theirs, ours in elsewhere("trtllm").items()
    if ours in ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size", "dtype", "tokenizer")
} | {"revision": "revision"}
CACHE_KEYS = {ours: theirs for theirs, ours in elsewhere("trtllm", "kv_cache_config").items()}
SERVER = {"reasoning_parser": "reasoning_parser", "chat_template": "chat_template", "log_level": "log_level"}
EAGLE = ("Eagle", "Eagle3")
REASONS = {
    "max_matching_ngram_size": "SA finds matches of any length; leave it out",
    "api_key": "its server has no keys; put a proxy before it",
    "tree_top_k": NO_TREES,
    "acceptance_window": "newer versions count a rate of accepted tokens instead of a length; leave it out",
    "acceptance_length_threshold": "newer versions count a rate of accepted tokens instead of a length; leave it out",
    "data_parallel_size": "start one server for each replica, with a proxy before them",
    "suffix_decoding_max_cached_requests": "it keeps at most 1024 requests; leave it out",
}


def cache_type(dtype: str) -> str:
    """TensorRT-LLM's dtype of the KV cache for ours; raises `ValueError` where there is none."""
    if dtype == "int8":
        raise ValueError("has no such type; expected auto, bfloat16 or fp8")
    return "fp8" if dtype.startswith("fp8") else dtype


def translate(wanted: Wanted) -> Launch:
    """The command of trtllm-serve and its file.

    Raises:
        ConfigError: TensorRT-LLM has no option for something that was stated.
    """
    if wanted.keys:
        raise ConfigError(f"{NAME} has no option for --api-key: {REASONS['api_key']}")
    stated = Stated(NAME, wanted)
    drafts = _speculative(wanted, stated, names_of(wanted.image))
    host, port, graphs = stated.take("host", "127.0.0.1"), stated.take("port", 8000), stated.take("cuda_graphs", True)
    config = stated.named(KEYS, {})
    cache = stated.named(CACHE_KEYS, {f"{CACHE}dtype": cache_type})
    name = one_name(stated.take("served_model_name", [wanted.model]))
    server = {"host": host, "port": port, "served_model_name": name} | stated.named(SERVER, {})
    stated.finish(REASONS)
    if drafts:
        # Drafters outside the target's own step need the host between two steps.
        config["disable_overlap_scheduler"] = drafts["decoding_type"] in ("DraftTarget", "Draft_Target", "NGram")
        config["speculative_config"] = drafts
    if cache:
        config["kv_cache_config"] = cache
    if not graphs:
        config["cuda_graph_config"] = None
    config["return_perf_metrics"] = True
    notes = ("TensorRT-LLM before 1.4 reads the sizes of draft_len_schedule as the smallest of a range",)
    scheduled = "draft_len_schedule" in drafts
    worker = ("--model-path", wanted.model, "--served-model-name", name, "--extra-engine-args", FILE)
    backend = () if "--backend" in wanted.extra else ("--backend", "pytorch")
    program = (wanted.model, *backend, "--extra_llm_api_options", FILE)
    return Launch(
        engine=NAME,
        program=("trtllm-serve", *program),
        script=("-m", "tensorrt_llm.commands.serve", *program),
        worker=("python", "-m", "dynamo.trtllm", *worker),
        options=wanted.extra,
        server=words(server, dashes=False),
        image=IMAGE,
        port=port,
        gpus=wanted.gpus,
        served=wanted.served,
        places=wanted.places,
        metrics="/prometheus/metrics",
        files={FILE: as_yaml(config)},
        notes=notes if scheduled else (),
    )


def names_of(image: str) -> str:
    """The version whose names an image has: before 1.3 a table chose the class, since then its own name does."""
    found = re.search(r":v?(\d+)\.(\d+)", image)
    return NEW_NAMES if found and (int(found[1]), int(found[2])) >= (1, 3) else OLD_NAMES


def _speculative(wanted: Wanted, stated: Stated, names: str) -> dict[str, Any]:
    """The group speculative_config, empty without drafts.

    Args:
        names: tool in the records of kinds.
    """
    if wanted.method is None:
        return {}
    if (known := kinds.named(wanted.method).aliases) and names not in known and NEW_NAMES in known:
        raise ConfigError(f"--method {wanted.method}: {NAME} has such drafts since 1.3; give --image {NEWER}")
    kind, speculative = name_of(wanted.method, names, NAME), wanted.speculative
    if stated.take("draft_revision") is not None:
        raise ConfigError(f"--draft-revision: {NAME} has no such key; download the draft and give its directory")
    for name in ("max_draft_len", "max_total_draft_tokens"):
        stated.take(name)
    said: dict[str, Any] = {"decoding_type": kind, "max_draft_len": speculative.longest}
    if wanted.draft is not None:
        said["speculative_model_dir"] = wanted.draft
    if wanted.layers and kind in EAGLE:
        said["eagle3_layers_to_capture"] = [*wanted.layers]
    if kind in EAGLE and speculative.tree_top_k > 1:
        said["max_draft_len"] = speculative.max_draft_len
        said["use_dynamic_tree"], said["dynamic_tree_max_topK"] = True, stated.take("tree_top_k")
        said["max_total_draft_tokens"] = speculative.budget
    if kind == "NGram":
        for theirs, ours in elsewhere("trtllm", kind).items():
            said[theirs] = getattr(speculative, ours)
            stated.take(ours)
    for name in ("draft_len_schedule", "max_concurrency"):
        if (value := stated.take(name)) is not None:
            said[name] = value
    return said
