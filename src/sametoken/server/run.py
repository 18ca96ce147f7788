"""Run of the server around an engine, until a signal ends it or the engine fails."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn

from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.llm import LLM
from sametoken.errors import EngineError
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.options.server import ServerConfig
from sametoken.server.app import build_app
from sametoken.server.exchange import ACCESS, Exchanges
from sametoken.server.listen import Server, loop_factory, settings, urls_of
from sametoken.server.metrics import Metrics
from sametoken.server.threads import DaemonPool
from sametoken.server.traces import Traces, exporter_of
from sametoken.server.worker import Worker

LOG = logging.getLogger("sametoken.server")


class EngineServer(Server):
    """Server of one engine.

    Args:
        config, started, traces: see `Server`.
        worker: worker of the engine, which is drained before connections are closed.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Worker, started: Callable[[], None], traces: Traces | None
    ) -> None:
        super().__init__(config, worker.drain, worker.config.drain_seconds, started, traces)
        self.worker = worker
        worker.engine.on_failure = lambda: self.fail(worker.engine.failure)


def serve(
    llm: LLM,
    bound: Sequence[socket.socket],
    config: ServerConfig,
    info: Mapping[str, Any],
    started: Callable[[], None] | None = None,
) -> None:
    """Serve until a signal ends it.

    Args:
        llm: the engine, which no other code may use until the server ends.
        bound: sockets of `bind`, or the Unix socket of a replica.
        info: the resolved configuration; its "model" is the served name unless `config` has others.
        started: callback once connections are accepted; None logs a line.

    Raises:
        EngineError: the engine failed; its requests got an error.
    """
    # With a fixed draft length, because the engine's thread measures the costs of drafts later, while the server runs.
    if llm.engine.table.table.device.type != "cpu":  # the first use compiles the kernels of a GPU
        fixed = RequestSpeculation(adaptive=False)
        llm.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True, speculative=fixed))

    def ready() -> None:
        url = urls_of(bound, config)
        LOG.info(f"ready: {url}, model {info['model']}, method {llm.method}; the page there is the playground")

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(llm, bound, config, info, started or ready))


async def _serve(
    llm: LLM, bound: Sequence[socket.socket], config: ServerConfig, info: Mapping[str, Any], started: Callable[[], None]
) -> None:
    trusted = "*" if all(each.family == socket.AF_UNIX for each in bound) else None  # only proxies use Unix sockets
    server = make_server(llm, config, info, started, trusted)
    try:
        await server.serve([*bound])
    finally:
        await server.worker.engine.close()
    if isinstance(failure := server.worker.engine.failure, EngineError):
        raise failure


def make_server(
    llm: LLM,
    config: ServerConfig,
    info: Mapping[str, Any],
    started: Callable[[], None],
    trusted: str | None = None,
) -> EngineServer:
    """Make a server in the running event loop, without starting it.

    Args:
        started: callback once connections are accepted.
        trusted: see `settings`.
    """
    asyncio.get_running_loop().set_default_executor(DaemonPool())
    names = config.served_model_name or (info["model"],)
    worker = Worker(AsyncLLM(llm, config.max_chunks_per_second), config, Metrics(names[0]))
    ACCESS.setLevel(logging.NOTSET if config.access_log else logging.CRITICAL)
    endpoint = config.otlp_traces_endpoint
    traces = Traces(exporter_of(endpoint), names[0]) if endpoint is not None else None
    app = Exchanges(build_app(worker, names, info), config, traces)
    return EngineServer(settings(app, config, trusted), worker, started, traces)
