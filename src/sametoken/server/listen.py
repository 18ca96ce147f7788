"""Sockets, certificates, uvicorn's settings, and a server that drains on signals; independent of the engine.

The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 lets open requests continue until a deadline; a second one ends them at
once. Every stream that is ended so gets an error event.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sametoken.errors import ConfigError
from sametoken.options.server import ServerConfig
from sametoken.server.connection import Connection
from sametoken.server.traces import Traces, exporter_of

LOG = logging.getLogger("sametoken.server")
LAST_WORDS_S = 2  # for connections to take the final events after the engine has stopped


def check(config: ServerConfig) -> None:
    """Check, before a model is loaded, that files can be used and traces can be exported.

    Raises:
        ConfigError: a file cannot be used, or the package for traces is missing.
    """
    if config.slot_save_path is not None and not os.path.isdir(config.slot_save_path):
        raise ConfigError(f"slot_save_path {config.slot_save_path}: no such directory; make it, or give another")
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
        # The empty passphrase prevents a prompt on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile} with its key, or ssl_ca_certs, cannot be used: {error}; "
            "expected PEM files that belong together, the key without a passphrase"
        ) from error


@contextmanager
def bind(config: ServerConfig) -> Generator[list[socket.socket], None, None]:
    """Bind sockets to the configured addresses, without listening yet.

    They are bound before the model is loaded, so that a port in use is an error at once.

    Raises:
        ConfigError: an address cannot be bound.
    """
    port, several = config.port, len(config.hosts) > 1
    with ExitStack() as open_ones:
        bound = []
        for host in config.hosts:
            bound.append(open_ones.enter_context(_bind_host(host, port, several)))
            port = bound[-1].getsockname()[1]  # with port 0, the free port of the first address is used for all
        for path in config.paths:
            bound.append(open_ones.enter_context(_bind_path(path)))
            open_ones.callback(Path(path).unlink, missing_ok=True)
        yield bound


def _bind_host(host: str, port: int, several: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if several and family == socket.AF_INET6:  # :: leaves IPv4 to the other addresses
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another --port or --host, or stop what uses it"
        ) from error
    return bound


def _bind_path(path: str) -> socket.socket:
    """Bound Unix socket; replaces the file of a socket on which no process listens."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and bound.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()
        bound.close()
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(path)
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {path}: {reason}; choose another path, or stop what uses it") from error
    return bound


def urls_of(bound: Sequence[socket.socket], config: ServerConfig) -> str:
    """URLs of the server for clients, with commas between them; unix:PATH for a Unix socket."""
    scheme = "http" if config.ssl_certfile is None else "https"
    return ", ".join(_url_of(each.getsockname(), scheme) for each in bound)


def _url_of(address: str | tuple[Any, ...], scheme: str) -> str:
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of uvloop's event loop, or None for Python's own if uvloop is not installed."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


def settings(app: ASGIApp, config: ServerConfig, trusted: str | None = None) -> uvicorn.Config:
    """Uvicorn's settings.

    Args:
        trusted: proxies whose X-Forwarded-For is used; None means FORWARDED_ALLOW_IPS, or proxies on this machine.
    """
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=LAST_WORDS_S,
        server_header=False,
        timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]  # uvicorn accepts any number
        forwarded_allow_ips=trusted,
        **_certificates(config),
    )


def _certificates(config: ServerConfig) -> dict[str, Any]:
    """Uvicorn's settings for HTTPS."""
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": config.ssl_cert_reqs,
    }


class Server(uvicorn.Server):
    """Uvicorn's server, which drains before it stops.

    Args:
        config: uvicorn's settings.
        drain: function that refuses new requests and returns when open ones have ended; after its event is set, it
            ends them at once.
        seconds: time limit of `drain`, for the log.
        started: callback once connections are accepted.
        traces: exporter that is closed after the last reply, or None.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[asyncio.Event], Awaitable[None]],
        seconds: float,
        started: Callable[[], None],
        traces: Traces | None = None,
    ) -> None:
        super().__init__(config)
        self._let_end, self._seconds, self._announce, self._traces = drain, seconds, started, traces
        self._hurry = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Send the last traces after the last answer."""
        await super().shutdown(sockets)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGHUP and SIGUSR1 as SIGTERM, unless they are ignored or have a handler.

        A terminal that closes sends SIGHUP, which shall not cut off streams; nohup ignores it. mpirun passes SIGUSR1 on
        to its ranks, but kills them after SIGTERM.
        """
        with super().capture_signals():
            main = threading.current_thread() is threading.main_thread()
            also = [
                each for each in (signal.SIGHUP, signal.SIGUSR1) if main and signal.getsignal(each) is signal.SIG_DFL
            ]
            for each in also:
                signal.signal(each, self.handle_exit)
            try:
                yield
            finally:
                for each in also:
                    signal.signal(each, signal.SIG_DFL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first drains, the second ends open requests, the third exits at once."""
        self._loop.call_soon_threadsafe(self.stop, signal.Signals(sig).name)

    def stop(self, why: str) -> None:
        """Begin to drain; if draining has begun, end open requests; if they are being ended, exit at once."""
        if self._stopping is None:
            LOG.info("%s: finishing open requests for at most %g s", why, self._seconds)
            self._stopping = asyncio.ensure_future(self._drain())
        elif not self._hurry.is_set():
            LOG.info("%s: ending open requests now", why)
            self._hurry.set()
        else:
            self.force_exit = True

    def fail(self, error: Exception | None) -> None:
        """End the server because of an error; thread-safe."""
        LOG.critical("%s; the server ends", error)
        self._loop.call_soon_threadsafe(setattr, self, "should_exit", True)

    async def _drain(self) -> None:
        await self._let_end(self._hurry)
        self.should_exit = True
