"""Engine as a Dynamo worker: methods for the unified backend, KV events, and start and end of the process.

Admission, time limits and counters are those of `sametoken serve`. Dynamo is imported inside functions only, so that
tests run without it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sametoken.deploy.dynamo.preflight import Address, Planes
from sametoken.deploy.dynamo.translation import chunk_of, sampling_of
from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.llm import LLM
from sametoken.errors import EngineError, RequestError, SametokenError
from sametoken.options.sampling import SamplingParams
from sametoken.options.server import ServerConfig
from sametoken.server.errors import ApiError
from sametoken.server.metrics import PREFIX, VLLM, Metrics
from sametoken.server.worker import Job, Worker


class Served(NamedTuple):
    """Model that a worker serves.

    Attributes:
        directory: directory with tokenizer and configuration, for the frontend.
        name: name of the model for clients.
        aliases: further names.
    """

    directory: str
    name: str
    aliases: tuple[str, ...]


class DynamoEngine:
    """Engine for Dynamo's `Worker`, which calls all methods on its event loop.

    Args:
        open_llm: function that loads the models; called once, in a thread.
        served: names and directory of the model.
        config: limits of admission and time.

    Attributes:
        failure: error that prevented the start or ended the engine; None if there was none.
    """

    def __init__(self, open_llm: Callable[[], LLM], served: Served, config: ServerConfig) -> None:
        self._open, self._served, self._config = open_llm, served, config
        self.failure: SametokenError | None = None
        self._metrics = Metrics(served.name)
        self._worker: Worker | None = None
        self._loads: Any = None  # Dynamo's publisher of loads
        self._published: tuple[int, int] | None = None
        self._prompts = self._reused = 0  # tokens
        self._probes: set[asyncio.Future[None]] = set()

    async def start(self, worker_id: int) -> Any:
        """Load the models; return Dynamo's `EngineConfig` with their description for the frontend."""
        from dynamo.common.backend import EngineConfig, LlmRegistration

        try:
            llm = await asyncio.to_thread(self._warm)
        except SametokenError as error:
            self.failure = error
            raise
        engine = AsyncLLM(llm, self._config.max_chunks_per_second)
        engine.on_failure = self._fail
        self._worker = Worker(engine, self._config, self._metrics)
        drafts = {"nextn": llm.speculative.max_draft_len, "source": "backend_config", "method": llm.method}
        return EngineConfig(
            model=self._served.directory,
            served_model_name=self._served.name,
            model_aliases=list(self._served.aliases),
            runtime_data={"spec_decode": drafts} if llm.method != "none" else None,
            llm=LlmRegistration(
                context_length=llm.max_seq_len,
                kv_cache_block_size=llm.engine.table.page_size,
                total_kv_blocks=llm.engine.load.pages,
                max_num_seqs=llm.engine.max_batch_size,
                max_num_batched_tokens=llm.engine.scheduler.max_num_tokens,
            ),
        )

    def _warm(self) -> LLM:
        llm = self._open()
        llm.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))  # first-run measurements and compilation
        llm.engine.reports.append(lambda report: self._publish_load())
        return llm

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "generate was called before start"
        return self._worker

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Chunks of one request, which ends immediately when its context is stopped."""
        try:
            job = await self._taken(request, context.id())
        except (SametokenError, ApiError) as error:
            raise as_dynamo(error) from error
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        stopped.add_done_callback(lambda _: self._finish(job))  # Dynamo does not resume a stopped stream
        try:
            async for chunk in job.chunks:
                job.saw(chunk)
                yield chunk_of(chunk)
            if any(each.finish_reason is None for each in job.requests):
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except (SametokenError, TimeoutError) as error:
            raise as_dynamo(error) from error
        finally:
            stopped.cancel()

    async def _taken(self, request: Mapping[str, Any], key: str) -> Job:
        """Add the request to the queue of the engine."""
        llm = self.worker.llm
        params = sampling_of(request, llm.default_sampling, llm.tokenizer.eos_ids, key)
        if params.structured_outputs is not None:  # compilation of a grammar is slow
            made = await asyncio.to_thread(llm.make_requests, request["token_ids"], params)
        else:
            made = llm.make_requests(request["token_ids"], params)
        return self.worker.take(made)

    def _finish(self, job: Job) -> None:
        first = job.requests[0]
        if first.started:
            self._prompts += len(first.prompt_ids)
            self._reused += first.cached_tokens
        job.close()
        if self.worker.engine.alive:  # the pages of a cancelled request are free without a further step
            probe = asyncio.ensure_future(self.worker.engine.call(self._publish_load))
            self._probes.add(probe)
            probe.add_done_callback(self._probed)

    def _probed(self, probe: asyncio.Future[None]) -> None:
        self._probes.discard(probe)
        if not probe.cancelled():
            probe.exception()  # the engine ended; the error is retrieved here and delivered by the streams

    async def kv_event_sources(self) -> list[Any]:
        """Sources of KV events: the prefix cache of the engine."""
        from dynamo.common.backend.publisher import PushSource

        def ready(publisher: Any) -> None:
            self.worker.llm.engine.scheduler.blocks.listener = PageEvents(publisher)

        return [PushSource(on_ready=ready, dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Data-parallel ranks: one, for the one engine."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Set Dynamo's publisher of loads, for the router and the gauges."""
        self._loads = publisher

    def _publish_load(self) -> None:
        """Publish the number of used pages to the router if it changed; called on the engine's thread."""
        if self._loads is None or self._worker is None:
            return
        from dynamo.common.backend.publisher import ComponentSnapshot

        load = self.worker.load()
        if self._published == (load.pages_used, self._prompts):
            return
        self._published = load.pages_used, self._prompts
        share = self._reused / self._prompts if self._prompts else None
        self._loads.publish(0, ComponentSnapshot(load.pages_used, load.pages, load.pages_used / load.pages, 0, share))

    async def register_prometheus(self, metrics: Any) -> None:
        """Add the metrics of the engine, with those of speculation, to the worker's."""
        from dynamo.common.backend.metrics import register_engine_registry

        register_engine_registry(metrics, self._metrics.registry, prefix_filters=[PREFIX, VLLM])

    async def health_check_payload(self) -> dict[str, Any]:
        """Request of one token, by which Dynamo can probe an idle worker."""
        from dynamo.common.backend.health_check import build_health_check_payload

        payload: dict[str, Any] = build_health_check_payload(0)
        return payload

    def _fail(self) -> None:
        """End the process by SIGTERM after a failure of the engine; called on the engine's thread."""
        self.failure = self.worker.engine.failure
        os.kill(os.getpid(), signal.SIGTERM)

    async def cleanup(self) -> None:
        """End the engine; open streams end with an error after which they migrate. May be called twice."""
        if self._worker is not None:
            self._worker.llm.engine.scheduler.blocks.listener = None
            self._loads = None
            self._worker.draining = True
            await self._worker.engine.close()


class Publisher(Protocol):
    """Methods of Dynamo's `KvEventPublisher` that are called here."""

    def publish_stored(
        self, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


class PageEvents:
    """Listener of the block manager that forwards its events to a publisher, on the engine's thread.

    A page is reusable once it is full and all its tokens are committed, so an event never has a rejected guess.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def stored(self, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """Publish a page that became reusable.

        Args:
            digest: digest of the page.
            parent: digest of the page before it, b"" for the first.
            tokens: token ids of the page.
        """
        parent_hash = hash_of(parent) if parent else None
        self._publisher.publish_stored(list(tokens), [len(tokens)], [hash_of(digest)], parent_hash)

    def removed(self, digest: bytes) -> None:
        """Publish that a page is no longer reusable."""
        self._publisher.publish_removed([hash_of(digest)])


def hash_of(digest: bytes) -> int:
    """Identifier of a page for Dynamo: the first 64 bits of its digest, as a signed integer."""
    return int.from_bytes(digest[:8], signed=True)


def run_worker(
    open_llm: Callable[[], LLM], served: Served, config: ServerConfig, address: Address, planes: Planes
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        open_llm: see `DynamoEngine`.
        served: see `DynamoEngine`.
        config: see `DynamoEngine`.
        address: address of the worker for the frontend.
        planes: services for discovery, requests and events.

    Raises:
        SametokenError: the engine did not start, or failed.
    """
    from dynamo.common.backend import LLMEngine, WorkerConfig
    from dynamo.common.backend.run import run

    class Engine(DynamoEngine, LLMEngine):  # type: ignore[misc]  # with Dynamo's defaults of optional methods
        from_args = None  # the engine is created below

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


def as_dynamo(error: Exception) -> Exception:
    """Dynamo's exception for an error: a status for the client, or `EngineShutdown` if the engine has ended.

    After `EngineShutdown` the frontend sends no requests to this worker, and its requests migrate.
    """
    from dynamo.llm import exceptions

    if isinstance(error, RequestError):
        return exceptions.InvalidArgument(str(error))  # type: ignore[no-any-return]
    if isinstance(error, TimeoutError):
        return exceptions.HttpError(408, f"the request was cancelled: {error}")  # type: ignore[no-any-return]
    if isinstance(error, ApiError) and error.status < 500:
        return exceptions.HttpError(error.status, str(error))  # type: ignore[no-any-return]
    if isinstance(error, EngineError | ApiError) or type(error) is SametokenError:  # failed, draining or closed
        return exceptions.EngineShutdown(str(error))  # type: ignore[no-any-return]
    return exceptions.HttpError(500, str(error))  # type: ignore[no-any-return]
