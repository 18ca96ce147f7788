"""Server of several replicas behind one port."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.options.server import ServerConfig
from sametoken.replicas.front import Front
from sametoken.replicas.process import Work, leave
from sametoken.replicas.replicas import Replicas
from sametoken.server.exchange import ACCESS
from sametoken.server.listen import Server, loop_factory, settings, urls_of
from sametoken.server.threads import DaemonPool

if TYPE_CHECKING:
    from sametoken.engine.llm import LLM

LOG = logging.getLogger("sametoken.server")


def serve_replicas(
    open_engine: Callable[[int], LLM], bound: Sequence[socket.socket], config: ServerConfig, info: Mapping[str, Any]
) -> None:
    """Serve until a signal arrives.

    Args:
        open_engine: function that opens the engine of a replica in its process; pickled by name.
        bound: sockets from `bind`.
        config: settings of the server; `data_parallel_size` is the number of replicas.
        info: resolved configuration.

    Raises:
        EngineError: a replica cannot start, or all replicas have used up their restarts.
    """
    directory = tempfile.mkdtemp(prefix="sametoken-")
    # A replica is reached through its socket alone, without HTTPS, which the front terminates. It stores no responses:
    # the next request may go to another one.
    without = {"ssl_certfile": None, "ssl_keyfile": None, "ssl_ca_certs": None, "ssl_cert_reqs": 0}
    own = config.model_copy(update={**without, "max_stored_responses": 0})
    works = [
        Work(open_engine, number, f"{directory}/{number}", own, info) for number in range(config.data_parallel_size)
    ]
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(Replicas(works, config.drain_seconds), bound, config, info))
    finally:
        for work in works:
            leave(work.socket)
        if Path(directory).is_dir():
            Path(directory).rmdir()


async def _serve(
    replicas: Replicas, bound: Sequence[socket.socket], config: ServerConfig, info: Mapping[str, Any]
) -> None:
    asyncio.get_running_loop().set_default_executor(DaemonPool())
    ACCESS.setLevel(logging.NOTSET if config.access_log else logging.CRITICAL)
    try:
        method = await replicas.start()
        ready = (
            f"ready: {urls_of(bound, config)}, model {info['model']}, method {method}, {len(replicas.states)} replicas"
        )

        def started() -> None:
            LOG.info(f"{ready}; the page there is the playground")

        server = Server(settings(Front(replicas, config), config), replicas.drain, config.drain_seconds, started)
        replicas.on_failure = server.fail
        await server.serve([*bound])
    finally:
        await replicas.close()
    if replicas.failure is not None:
        raise replicas.failure
