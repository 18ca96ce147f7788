"""Runs the application: the socket before the model, signals that drain, and an end that no stream misses.

The first SIGINT, SIGTERM or SIGHUP lets open requests go on until a deadline, a second one ends them at once; every
stream that is cut short ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.llm import LLM
from sametoken.errors import ConfigError, EngineError
from sametoken.options.sampling import SamplingParams
from sametoken.options.server import ServerConfig
from sametoken.server.app import build_app
from sametoken.server.connection import Connection
from sametoken.server.exchange import ACCESS, Exchanges
from sametoken.server.metrics import Metrics
from sametoken.server.threads import DaemonPool
from sametoken.server.traces import Traces, exporter_of
from sametoken.server.worker import Worker

LOG = logging.getLogger("sametoken.server")
LAST_WORDS_S = 2  # for connections to take the final events after the engine has stopped


def check(config: ServerConfig) -> None:
    """Finds out before a model is loaded whether certificates can be read and traces be exported.

    Raises:
        ConfigError: what is wrong, and with which file.
    """
    if config.otlp_traces_endpoint is not None:
        exporter_of(config.otlp_traces_endpoint)
    if config.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{name} {path}: no such file, or it cannot be read; give a file in PEM")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")  # asks nobody
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile} with its key, or ssl_ca_certs, cannot be used: {error}; "
            "expected PEM files that belong together, the key without a passphrase"
        ) from error


def _certificates(config: ServerConfig) -> dict[str, Any]:
    """Uvicorn's settings for HTTPS."""
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": config.ssl_cert_reqs,
    }


def bind(config: ServerConfig) -> socket.socket:
    """The address, taken before the model is loaded: a port in use is found out at once. Not listening yet.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {reason}; choose another --port or "
            "--host, or stop what uses it"
        ) from error
    return bound


def serve(llm: LLM, bound: socket.socket, config: ServerConfig, info: Mapping[str, Any]) -> None:
    """Serves until a signal ends it.

    Args:
        llm: belongs to the server from now on.
        bound: from `bind`.
        info: the resolved configuration; its "model" is the served name unless `config` has others.

    Raises:
        EngineError: the engine failed; its requests got an error.
    """
    llm.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))  # what is measured or compiled once
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(llm, bound, config, info))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one; None is Python's own."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


async def _serve(llm: LLM, bound: socket.socket, config: ServerConfig, info: Mapping[str, Any]) -> None:
    host, port = bound.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    ready = f"ready: {url}, model {info['model']}, method {llm.method}; the page there is the playground"
    server = make_server(llm, config, info, lambda: LOG.info(ready))
    try:
        await server.serve([bound])
    finally:
        await server.worker.engine.close()
    if isinstance(failure := server.worker.engine.failure, EngineError):
        raise failure


def make_server(llm: LLM, config: ServerConfig, info: Mapping[str, Any], started: Callable[[], None]) -> Server:
    """A server of the running event loop, not yet started; `started` is called once it accepts connections."""
    asyncio.get_running_loop().set_default_executor(DaemonPool())
    names = config.served_model_name or (info["model"],)
    worker = Worker(AsyncLLM(llm, config.max_chunks_per_second), config, Metrics(names[0]))
    ACCESS.setLevel(logging.NOTSET if config.access_log else logging.CRITICAL)
    endpoint = config.otlp_traces_endpoint
    traces = Traces(exporter_of(endpoint), names[0]) if endpoint is not None else None
    app = build_app(worker, names, info)
    settings = uvicorn.Config(
        Exchanges(app, config.root_path, traces),
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=LAST_WORDS_S,
        server_header=False,
        timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]  # it takes any number
        **_certificates(config),
    )
    return Server(settings, worker, started, traces)


class Server(uvicorn.Server):
    """Uvicorn with our way to stop.

    Args:
        config: uvicorn's.
        worker: is drained before connections are closed.
        started: called once connections are accepted.
        traces: are exported to the end, None for none.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Worker, started: Callable[[], None], traces: Traces | None = None
    ) -> None:
        super().__init__(config)
        self.worker, self._announce, self._traces = worker, started, traces
        self._hurry = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        worker.engine.on_failure = lambda: self._loop.call_soon_threadsafe(self._engine_failed)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Sends the last traces after the last answer."""
        await super().shutdown(sockets)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """SIGHUP stops too, so that a terminal that closes cuts off no stream; under nohup it is ignored as ever."""
        with super().capture_signals():
            main = threading.current_thread() is threading.main_thread()
            if not main or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first drains, a second one hurries, a third one waits for nothing."""
        self._loop.call_soon_threadsafe(self.stop, signal.Signals(sig).name)

    def stop(self, why: str) -> None:
        """Begins to stop, or hurries if that has begun."""
        if self._stopping is None:
            LOG.info("%s: finishing open requests for at most %g s", why, self.worker.config.drain_seconds)
            self._stopping = asyncio.ensure_future(self._drain())
        elif not self._hurry.is_set():
            LOG.info("%s: ending open requests now", why)
            self._hurry.set()
        else:
            self.force_exit = True

    def _engine_failed(self) -> None:
        LOG.critical("%s; the server ends", self.worker.engine.failure)
        self.should_exit = True

    async def _drain(self) -> None:
        await self.worker.drain(self._hurry)
        self.should_exit = True
