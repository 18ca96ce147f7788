"""Options of `trtllm-serve`, `vllm serve` and `llama-server` that `sametoken serve` accepts or refuses, as data.

Options with the same spelling here (--max_batch_size, --host, --api-key, ...) are not listed. Other names of our
options come from their declarations (`options.declaration.Elsewhere`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from sametoken.dialects import llama_server
from sametoken.dialects.rules import NoEffect, Rule, Sets, Translation, apply, described, keys, spelled, table
from sametoken.dialects.trtllm import ALWAYS, METRICS, NO_PART, ONE_PROCESS, TOP
from sametoken.dialects.vllm import overrides
from sametoken.options.declaration import members
from sametoken.options.serving import OPTIONS, elsewhere


class Flag(NamedTuple):
    """One option of another server.

    Attributes:
        server: the server's command.
        kind: type of the option's values; bool for a switch.
        rule: translation of a value.
        aliases: further names, without leading dashes except for names with one dash; a switch has only the latter.
    """

    server: str
    kind: type
    rule: Rule
    aliases: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Aliases as users write them, with dashes."""
        if self.kind is bool:
            return tuple(f"{name}/-no{name[1:]}" for name in self.aliases)
        plain = (f"--{name}" for name in self.aliases if not name.startswith("-"))
        return tuple(dict.fromkeys([*map(spelled, self.aliases), *plain]))

    @property
    def help(self) -> str:
        """Text of the option for the help of `sametoken serve`."""
        return f"as in {self.server}: {described(self.rule)}."


def log_level(stated: str) -> str:
    """Our log level for one of uvicorn's."""
    return {"critical": "error", "trace": "debug"}.get(stated, stated)


def opposite(stated: Any) -> Any:
    """Negated truth value; any other value is returned unchanged, and the check of our setting refuses it."""
    return not stated if isinstance(stated, bool) else stated


TRT, VLLM, LLAMA = "trtllm-serve", "vllm serve", "llama-server"
# Options of trtllm-serve that are keys of its YAML file too; the last name of each is the key.
KEYS = (
    "backend pp_size/pipeline_parallel_size cp_size/context_parallel_size ep_size/moe_expert_parallel_size "
    "cluster_size/moe_cluster_parallel_size gpus_per_node max_beam_width trust_remote_code enable_chunked_prefill "
    "enable_attention_dp num_postprocess_workers"
)
CALLS = "tool calls of all supported formats are recognised without it"
NOT_LOGGED = "prompts and parameters are never logged; --access-log has a line per request"
# Other options of each server, by the reason: first those without effect, then those that are refused.
OWN: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    TRT: (
        {
            ONE_PROCESS: "num_input_processor_workers=0",
            CALLS: "tool_parser/tool_call_parser:str",
            ALWAYS: "fail_fast_on_attention_window_too_large=true",
            NO_PART: "telemetry=false",
        },
        {
            "give a directory or Hub id as --tokenizer": "custom_tokenizer",
            "Python modules from elsewhere are not imported; leave it out": "custom_module_dirs middleware",
            "only text is supported; leave it out":
                "num_media_load_workers:int media_io_kwargs video_pruning_rate:float",
            "the template is the server's; leave it out": "allow_request_chat_template=false",
            f"{ONE_PROCESS}; leave it out": "metadata_server_config_file server_role disagg_cluster_uri",
            "HTTP is the only protocol": "grpc=false",
        },
    ),
    VLLM: (
        {
            "it is a share of all memory; use --kv-cache-free-memory-fraction, a share of the free memory":
                "gpu_memory_utilization:float",
            CALLS: "enable_auto_tool_choice=true",
            NOT_LOGGED: "disable_log_requests=true enable_log_requests=false",
            ALWAYS: "enable_server_load_tracking=true",
            METRICS: "disable_log_stats:bool",
        },
        {
            "certificates are read once, at the start; restart the server for new ones": "enable_ssl_refresh=false",
        },
    ),
    LLAMA: (llama_server.NO_EFFECT, llama_server.REFUSED),
}  # fmt: skip


def _flags() -> Iterator[tuple[str, Flag]]:
    for key in keys(KEYS):
        rule = TOP[key.names[-1]]
        kind = rule.kind if isinstance(rule, NoEffect) else bool if key.names[0].startswith("enable") else int
        yield key.names[0], Flag(TRT, kind, rule, key.names[1:])
    for server, (no_effect, refused) in OWN.items():
        for names, setting in elsewhere(server.replace(" ", "-")).items():
            name, *aliases = names.split("/")
            kind = next(each for each in members(OPTIONS[setting].hint) if each is not type(None))
            yield name, Flag(server, kind, Sets(setting), tuple(aliases))
        rules = table({}, no_effect, refused)
        for key in keys(" ".join([*no_effect.values(), *refused.values()])):
            yield key.names[0], Flag(server, key.kind, rules[key.names[0]], key.names[1:])
    yield "enforce_eager", Flag(VLLM, bool, Sets("cuda_graphs", opposite))
    yield "hf_overrides", Flag(VLLM, str, Sets("rope_scaling", overrides, "keys of RoPE and the context alone"))
    yield "rope_theta", Flag(VLLM, float, Sets("rope_scaling", partial(llama_server.rope, "rope_theta")))
    yield "disable_uvicorn_access_log", Flag(VLLM, bool, Sets("access_log", opposite))
    for names, sets in llama_server.SET.items():
        (key,) = keys(names)
        yield key.names[0], Flag(LLAMA, key.kind, sets, key.names[1:])
    yield "uvicorn_log_level", Flag(VLLM, str, Sets("log_level", log_level))


FLAGS: Mapping[str, Flag] = MappingProxyType(dict(_flags()))


def read_flags(given: Mapping[str, Any]) -> Translation:
    """Translate the values of given options, by the keys of `FLAGS`.

    Raises:
        ConfigError: a value is not possible here, or two options contradict each other.
    """
    result = Translation()
    for name, value in given.items():
        result.add(apply(FLAGS[name].rule, value, spelled(name)))
    return result
