"""`sametoken serve`: an OpenAI-compatible server of one model, with or without a draft."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sametoken.commands import planning
from sametoken.commands.ahead import starting
from sametoken.commands.doors import notes_of_start
from sametoken.commands.models import join_ranks, model_names, open_llm, use_cpus
from sametoken.commands.options import (
    Chosen,
    Option,
    Values,
    engine_options,
    refuse_given,
    settings_of,
    settings_options,
    titled,
)
from sametoken.commands.resolution import Resolution, check_choice, check_text, foreign_options, resolve
from sametoken.commands.terminal import tell
from sametoken.errors import ConfigError
from sametoken.options.engine import EngineConfig, KVCacheConfig
from sametoken.options.server import ServerConfig
from sametoken.options.serving import CACHE
from sametoken.options.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from socket import socket

    from sametoken.engine.llm import LLM

# Changes of engine options in this command. The share of prompts keeps streams below twice their usual time while a
# long prompt is read; -t is llama-server's name of threads.
SERVED: dict[str, dict[str, Any]] = {"max_prefill_share": {"default": 0.4}, "threads": {"aliases": ("-t",)}}


def _engine_options() -> Iterator[Option]:
    for option in engine_options():
        yield option._replace(**SERVED.get(option.name, {}))


STARTED = titled(
    "Another engine",
    Option("engine_python", str, None, "Python of the environment where the engine of --engine is installed.", "FILE"),
    Option(
        "engine_timeout",
        Annotated[float, Field(gt=0)],
        1800.0,
        "number of seconds that the engine of --engine may take to start.",
    ),
)
OPTIONS: tuple[Option, ...] = (
    *settings_options(ServerConfig),
    *_engine_options(),
    *foreign_options(),
    *planning.OPTIONS,
    *STARTED,
)
KEYS_VARIABLE = "SAMETOKEN_API_KEY"
KEYS_VARIABLES = (KEYS_VARIABLE, "VLLM_API_KEY", "LLAMA_API_KEY")
FRACTION, VISIBLE = f"{CACHE}free_memory_fraction", "CUDA_VISIBLE_DEVICES"
LOG = logging.getLogger("sametoken")
PREFIXES = {"kv_cache": CACHE}  # prefixes of the names of options, by group of the resolved configuration
EXAMPLES = {
    "serve the pair of models that comes with the package": "sametoken serve",
    "serve a model and its draft to the whole network":
        "sametoken serve MODEL --draft DRAFT --host 0.0.0.0 --api-key KEY",
    "use a file of TensorRT-LLM's keys": "sametoken serve MODEL --extra-llm-api-options options.yaml",
}  # fmt: skip
NOTE = (
    "Common options of trtllm-serve, vllm serve and llama-server work too; docs/server.md lists what each does here. "
    "`sametoken llama-server ...` and `sametoken vllm serve ...` take those programs' whole command lines."
)


def command(model: str | None, values: Chosen) -> int:
    """Serve a model over HTTP as OpenAI's API does.

    Drafts change the speed, never a token (on CUDA: with --deterministic).

    Takes the options of `trtllm-serve`, `vllm serve` and `llama-server` too, and TensorRT-LLM's YAML file. With
    --engine another engine serves: this command starts it, waits until it answers, and ends with it.
    """
    if values["engine"] != planning.OURS:
        return start_engine(model, values)
    planning.check_engine(values)
    refuse_given((*planning.OPTIONS, *STARTED), values, "another engine: give --engine too")
    resolution = resolve(model, values)
    resolution.notes[:0] = notes_of_start()
    server = server_config(resolution.values)
    info = resolved(model, resolution, server)
    try:
        from sametoken.server.listen import bind, check
        from sametoken.server.logs import configure

        if server.data_parallel_size > 1:
            from sametoken.replicas.front import serve_replicas
    except ImportError as error:
        raise lacking(error) from None
    configure(server.log_level, server.log_format)
    join_ranks(resolution.values, server.data_parallel_size)  # the file may set the number of ranks
    check(server)
    for line in described(info):
        LOG.info(line)
    for note in resolution.notes:
        LOG.warning(note)
    with bind(server) as bound:
        if server.data_parallel_size > 1:
            open_one = partial(open_replica, model, resolution, server.data_parallel_size)
            serve_replicas(open_one, bound, server, info)
        else:
            serve_one(model, resolution, bound, server, info)
    return 0


def serve_one(
    model: str | None, resolution: Resolution, bound: Sequence[socket], server: ServerConfig, info: Mapping[str, Any]
) -> None:
    """Serve with one engine; a thread imports the server's modules while the model is loaded."""
    use_cpus(resolution.values["cpus"], resolution.values["threads"])

    with starting(stays=True):
        # Imported completely before the thread starts, so that no two threads import one module.
        import sametoken.engine.llm  # noqa: F401

        ahead = Thread(target=_import_server, daemon=True)
        ahead.start()
        llm = open_engine(model, resolution)
        ahead.join()
    try:
        from sametoken.server.run import serve
    except ImportError as error:
        raise lacking(error) from None
    serve(llm, bound, server, info)


def _import_server() -> None:
    with suppress(ImportError):  # the main thread's import raises it again
        import sametoken.server.run  # noqa: F401


def lacking(error: ImportError) -> ConfigError:
    return ConfigError(f"{error.name} is not installed; the server needs it: pip install 'sametoken[server]'")


def computes(values: Values) -> bool:
    """Return True if this process computes, rather than another engine."""
    return bool(values["engine"] == planning.OURS)


def start_engine(model: str | None, values: Chosen) -> int:
    """Serve with the engine of --engine as a child process, until it ends or a signal comes.

    Raises:
        SametokenError: the engine has no equivalent of an option, or does not start.
    """
    launch, notes = planning.planned(model, values)
    words = launch.words
    if values["engine_python"] is not None:
        words = (*launch.module(values["engine_python"]), *launch.options, *launch.server)
    for note in (*notes_of_start(), *notes):
        print(f"note: {note}", file=sys.stderr)

    from sametoken.deploy.start import start

    if launch.secrets and not os.environ.get(launch.secrets[0]):
        raise ConfigError(f"--api-key: {launch.engine} reads its key from {launch.secrets[0]}; export that instead")
    times = (values["engine_timeout"], values["drain_seconds"])
    return start(words, dict(launch.files), launch.port, times, tell)


def open_engine(model: str | None, resolution: Resolution) -> LLM:
    """Load the engine of the server."""
    llm = open_llm(model, resolution.values, calibrated=False)  # the engine's thread calibrates while the server runs
    check_choice(resolution, llm.method, llm.methods)
    return llm


def open_replica(model: str | None, resolution: Resolution, count: int, number: int) -> LLM:
    """Load the engine of one of `count` replicas, with its share of the machine; called in the replica's process.

    Raises:
        ConfigError: the machine has fewer GPUs than replicas.
    """
    import torch

    from sametoken.runtime.memory import default_share

    values = Chosen(resolution.values, resolution.values.given)
    use_cpus(values["cpus"], values["threads"], number, count)
    values["cpus"] = None  # already applied
    values["threads"] = max(1, torch.get_num_threads() // count)
    if values["device"] == "cpu" or not torch.cuda.device_count():
        share = values[FRACTION] or default_share(torch.device("cpu"))
        values[FRACTION] = share / count  # the replicas share the memory of the machine
    else:
        os.environ[VISIBLE] = own_gpu(os.environ.get(VISIBLE), torch.cuda.device_count(), number, count)
    return open_engine(model, resolution._replace(values=values))


def own_gpu(visible: str | None, gpus: int, number: int, count: int) -> str:
    """GPU of a replica, in the notation of CUDA_VISIBLE_DEVICES.

    Args:
        visible: value of the variable, or None.
        gpus: number of GPUs that are visible to this process.
        number: number of the replica, from 0.
        count: number of replicas.

    Raises:
        ConfigError: there are fewer GPUs than replicas.
    """
    if gpus < count:
        raise ConfigError(
            f"--data-parallel-size {count}: each replica needs a GPU of its own, and {gpus} can be seen; lower it, or "
            "set --device cpu"
        )
    return visible.split(",")[number].strip() if visible else str(number)


def server_config(values: Values) -> ServerConfig:
    """Settings of the server; API keys of the environment follow those of the command line.

    Raises:
        ConfigError: a value is refused.
    """
    chosen = settings_of(ServerConfig, values)
    given = list(chosen["api_key"] or ())
    for name in KEYS_VARIABLES:
        stated = os.environ.get(name, "")
        keys = [key for key in map(str.strip, stated.split(",")) if key]
        if stated and not keys:
            raise ConfigError(
                f"{name} is {stated!r}, which has no key; set it to keys with commas between, or unset it"
            )
        given += keys
    for key in given:
        check_text(key, f"--api-key or {KEYS_VARIABLE}")
    return ServerConfig(**{**chosen, "api_key": given})


def resolved(model: str | None, resolution: Resolution, server: ServerConfig) -> dict[str, Any]:
    """Resolved configuration for /server_info, with origins and notes but without secrets."""
    values = resolution.values
    speculative = SpeculativeConfig(**settings_of(SpeculativeConfig, values))
    target, draft = model_names(model, values["draft"], speculative.method)
    keys = {"api_key": len(server.api_key)}
    return {
        "model": target,
        "draft": draft,
        "speculative": speculative.model_dump(mode="json"),
        "engine": EngineConfig(**settings_of(EngineConfig, values)).model_dump(mode="json"),
        "kv_cache": KVCacheConfig(**settings_of(KVCacheConfig, values, CACHE)).model_dump(mode="json"),
        "server": server.model_dump(mode="json") | keys,
        "origins": resolution.origins,
        "notes": resolution.notes,
    }


def described(info: dict[str, Any]) -> list[str]:
    """Resolved configuration as text: a line per group, with the origin of a value in brackets."""
    origins: dict[str, str] = info["origins"]
    lines = [_with_origin("model", info["model"], origins) + ", " + _with_origin("draft", info["draft"], origins)]
    for group, settings in info.items():
        if isinstance(settings, dict) and settings is not origins:
            prefix = PREFIXES.get(group, "")
            items = (_with_origin(name, value, origins, prefix) for name, value in settings.items())
            lines.append(f"{group}: {', '.join(items)}")
    return lines


def _with_origin(name: str, value: Any, origins: dict[str, str], prefix: str = "") -> str:
    origin = origins.get(prefix + name)
    return f"{name} = {value}" + (f" [{origin}]" if origin else "")
