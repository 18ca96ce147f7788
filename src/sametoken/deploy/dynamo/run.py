"""An engine as a Dynamo worker until a signal ends it: register, serve, drain."""

from __future__ import annotations

from collections.abc import Callable

from sametoken.deploy.dynamo.engine import DynamoEngine, Served
from sametoken.deploy.dynamo.preflight import Address, Planes
from sametoken.engine.llm import LLM
from sametoken.options.server import ServerConfig


def run_worker(
    open_llm: Callable[[], LLM], served: Served, config: ServerConfig, address: Address, planes: Planes
) -> None:
    """Serve until SIGTERM or SIGINT; arguments are those of `DynamoEngine`, then how the frontend finds it.

    Raises:
        SametokenError: the engine could not start, or failed.
    """
    from dynamo.common.backend import LLMEngine, WorkerConfig
    from dynamo.common.backend.run import run

    class Engine(DynamoEngine, LLMEngine):  # type: ignore[misc]  # Dynamo's defaults for what is optional
        from_args = None  # an engine is made here

    engine = Engine(open_llm, served, config)
    worker = WorkerConfig(
        **address._asdict(),
        model_name=served.directory,
        served_model_name=served.name,
        discovery_backend=planes.discovery,
        request_plane=planes.requests,
        event_plane=planes.events,
    )

    async def made(_: object) -> tuple[DynamoEngine, WorkerConfig]:
        return engine, worker

    try:
        run(Engine, engine_factory=made)
    except Exception:
        if engine.failure is None:
            raise
    if engine.failure is not None:
        raise engine.failure
