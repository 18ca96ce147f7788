"""Options that `trtllm-serve` and `vllm serve` have and we spell otherwise or do not need, as data.

Options that those servers and we spell alike (--max_batch_size, --host, --api-key, ...) are our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sametoken.dialects.rules import NoEffect, Only, Rule, Sets, Translation, apply
from sametoken.dialects.trtllm import CACHE, METRICS, NOT_PARALLEL, ONE_PROCESS, TOP, opposite

TEXT_ONLY = Only((), "served models read text only; leave it out")
ONE_SERVER = Only((), "prompts and outputs are computed by one server; leave it out")
NOT_LOGGED = "prompts and parameters are never logged; --access-log has a line per request"
CALLS = "calls are recognised by their form, whichever model wrote them"


class Flag(NamedTuple):
    """One option.

    Attributes:
        server: whose it is: "trtllm-serve" or "vllm serve".
        kind: bool, int, float or str.
        rule: what becomes of its value.
        aliases: further names, without dashes.
    """

    server: str
    kind: type
    rule: Rule
    aliases: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The aliases as users write them."""
        return tuple(dict.fromkeys(text for name in self.aliases for text in (spelled(name), f"--{name}")))

    @property
    def help(self) -> str:
        """A line for the help."""
        match self.rule:
            case Sets(setting, _, _):
                return f"as in {self.server}: sets {spelled(setting)}."
            case NoEffect(_, reason, _):
                return f"as in {self.server}: no effect here, {reason}."
            case Only(values, reason):
                allowed = " or ".join(str(value).lower() for value in values)
                return f"as in {self.server}: {f'only {allowed}' if allowed else 'refused'}, {reason}."
        raise TypeError(self.rule)


def log_level(stated: str) -> str:
    """Our level for one of uvicorn's."""
    return {"critical": "error", "trace": "debug"}.get(stated, stated)


def spelled(name: str) -> str:
    """An option as users write it."""
    return f"--{name.replace('_', '-')}"


TRT, VLLM = "trtllm-serve", "vllm serve"
FLAGS: Mapping[str, Flag] = MappingProxyType(
    {
        "backend": Flag(TRT, str, TOP["backend"]),
        "tp_size": Flag(TRT, int, Only((1,), NOT_PARALLEL), ("tensor_parallel_size",)),
        "pp_size": Flag(TRT, int, TOP["pipeline_parallel_size"], ("pipeline_parallel_size",)),
        "cp_size": Flag(TRT, int, TOP["context_parallel_size"], ("context_parallel_size",)),
        "ep_size": Flag(TRT, int, TOP["moe_expert_parallel_size"], ("moe_expert_parallel_size",)),
        "cluster_size": Flag(TRT, int, TOP["moe_cluster_parallel_size"], ("moe_cluster_parallel_size",)),
        "gpus_per_node": Flag(TRT, int, TOP["gpus_per_node"]),
        "max_beam_width": Flag(TRT, int, TOP["max_beam_width"]),
        "kv_cache_free_gpu_memory_fraction": Flag(
            TRT, float, CACHE["free_gpu_memory_fraction"], ("free_gpu_memory_fraction",)
        ),
        "kv_cache_dtype": Flag(TRT, str, CACHE["dtype"]),
        "hf_revision": Flag(TRT, str, Sets("revision")),
        "custom_tokenizer": Flag(TRT, str, Only((), "give a directory or Hub id as --tokenizer")),
        "custom_module_dirs": Flag(TRT, str, Only((), "modules of others are not imported; leave it out")),
        "trust_remote_code": Flag(TRT, bool, TOP["trust_remote_code"]),
        "enable_chunked_prefill": Flag(TRT, bool, TOP["enable_chunked_prefill"]),
        "enable_attention_dp": Flag(TRT, bool, TOP["enable_attention_dp"]),
        "num_postprocess_workers": Flag(TRT, int, TOP["num_postprocess_workers"]),
        "num_input_processor_workers": Flag(TRT, int, TOP["num_postprocess_workers"]),
        "num_media_load_workers": Flag(TRT, int, TEXT_ONLY),
        "media_io_kwargs": Flag(TRT, str, TEXT_ONLY),
        "video_pruning_rate": Flag(TRT, float, TEXT_ONLY),
        "tool_parser": Flag(TRT, str, NoEffect(str, CALLS), ("tool_call_parser",)),
        "allow_request_chat_template": Flag(TRT, bool, Only((False,), "the template is the server's; leave it out")),
        "metadata_server_config_file": Flag(TRT, str, ONE_SERVER),
        "server_role": Flag(TRT, str, ONE_SERVER),
        "disagg_cluster_uri": Flag(TRT, str, ONE_SERVER),
        "fail_fast_on_attention_window_too_large": Flag(
            TRT, bool, NoEffect(bool, "a cache that is too small is always an error", (True,))
        ),
        "grpc": Flag(TRT, bool, Only((False,), "HTTP is the only protocol")),
        "middleware": Flag(TRT, str, Only((), "modules of others are not imported; leave it out")),
        "telemetry": Flag(TRT, bool, NoEffect(bool, "nothing is sent anywhere", (False,))),
        "max_model_len": Flag(VLLM, int, Sets("max_seq_len")),
        "max_num_seqs": Flag(VLLM, int, Sets("max_batch_size")),
        "max_num_batched_tokens": Flag(VLLM, int, Sets("max_num_tokens")),
        "block_size": Flag(VLLM, int, Sets("kv_cache_tokens_per_block")),
        "enable_prefix_caching": Flag(VLLM, bool, Sets("kv_cache_enable_block_reuse")),
        "enforce_eager": Flag(VLLM, bool, Sets("cuda_graphs", opposite)),
        "gpu_memory_utilization": Flag(
            VLLM,
            float,
            NoEffect(
                float, "a share of all memory says nothing of what others use; --kv-cache-free-memory-fraction is of "
                "what is free"
            ),
        ),
        "data_parallel_size": Flag(VLLM, int, Only((1,), f"{ONE_PROCESS}; start several servers")),
        "enable_auto_tool_choice": Flag(VLLM, bool, NoEffect(bool, CALLS, (True,))),
        "disable_log_requests": Flag(VLLM, bool, NoEffect(bool, NOT_LOGGED, (True,))),
        "enable_log_requests": Flag(VLLM, bool, NoEffect(bool, NOT_LOGGED, (False,))),
        "disable_uvicorn_access_log": Flag(VLLM, bool, Sets("access_log", opposite)),
        "uvicorn_log_level": Flag(VLLM, str, Sets("log_level", log_level)),
        "enable_request_id_headers": Flag(VLLM, bool, NoEffect(bool, "every answer has X-Request-Id", (True,))),
        "enable_server_load_tracking": Flag(VLLM, bool, NoEffect(bool, "/load always tells", (True,))),
        "enable_ssl_refresh": Flag(VLLM, bool, Only((False,), "certificates are read once; start the server anew")),
        "disable_log_stats": Flag(VLLM, bool, NoEffect(bool, METRICS)),
    }
)  # fmt: skip


def read_flags(given: Mapping[str, Any]) -> Translation:
    """What those options say that were given, by their names.

    Raises:
        ConfigError: a value is not possible here, or two options contradict each other.
    """
    result = Translation()
    for name, value in given.items():
        result.add(apply(FLAGS[name].rule, value, spelled(name)))
    return result
