"""HTTP front of the replicas: forwards every request to a replica, and streams the answer back.

Replicas check fields, models and keys; the front only skips the body of a request without a key. The front itself
answers requests for the state of the server, by merging the states of the replicas. `serve_replicas` runs it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sametoken.options.server import ServerConfig
from sametoken.replicas import merging
from sametoken.replicas.process import OpenRequest, Replica, Work, leave
from sametoken.replicas.replicas import Replicas
from sametoken.replicas.routing import RoutedPrompt, prompt_of
from sametoken.replicas.upstream import Headers, NotAskedError, ReplicaAnswer, ReplicaLostError, ask
from sametoken.server.body_size import read_body
from sametoken.server.errors import MESSAGES, ApiError, reply, stopping
from sametoken.server.exchange import ACCESS, CURRENT, ID_HEADER, Exchange, log_access, without_root
from sametoken.server.http import DONE, AcceptedKeys, Origins, part_of, when_gone
from sametoken.server.listen import Server, loop_factory, settings, urls_of
from sametoken.server.threads import DaemonPool

if TYPE_CHECKING:
    from sametoken.engine.llm import LLM

LOG = logging.getLogger("sametoken.server")
PROMPTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
LONG_BODY = 2**16  # bytes from which a thread parses a body
ASK_S = 3.0  # for the state of a replica; Prometheus waits 10 s for all
FORWARDED = (b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded")


class Front:
    """ASGI application of the front.

    Args:
        replicas: replicas to which requests are forwarded.
        config: limits, keys, origins and root path.
    """

    def __init__(self, replicas: Replicas, config: ServerConfig) -> None:
        self._replicas, self._root, self._most = replicas, config.root_path, config.max_body
        self._keys = AcceptedKeys(config.api_key) if config.api_key else None
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        without_root(scope, self._root)
        exchange = Exchange.of(scope)
        CURRENT.set(exchange)  # of the task of this request
        try:
            answer = await self._answer(scope, receive, send, exchange)
        except (ApiError, asyncio.CancelledError) as error:
            if exchange.status:  # an answer has started
                raise
            answer = reply(error if isinstance(error, ApiError) else stopping(), scope["path"])
        if answer is not None:
            if self._config.enable_request_id_headers:
                answer.headers.append(ID_HEADER.decode(), exchange.id)
            app: ASGIApp = answer
            if self._config.cors_origin:
                app = Origins(answer, self._config)
            await app(scope, receive, send)
            exchange.ended, exchange.status = time.perf_counter(), answer.status_code
            log_access(exchange)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> Response | None:
        """Answer of the front itself, or None if the answer of a replica was sent."""
        path, method = scope["path"], scope["method"]
        if path in ("/health", "/ping") and (method in ("GET", "HEAD") or (path, method) == ("/ping", "POST")):
            return self._health()
        if path == "/live" and method in ("GET", "HEAD"):
            return JSONResponse({"status": "ok"})
        if path in MERGED and method == "GET":
            return await self._merged(scope, exchange)
        await self._pass_on(scope, receive, send, exchange)
        return None

    def _health(self) -> Response:
        """Health response: 200 while any replica accepts requests."""
        states = self._replicas.states
        ready = not self._replicas.stopping and any(state.status == "ready" for state in states)
        status = "ok" if ready else "stopping" if self._replicas.stopping else "starting"
        return JSONResponse({"status": status, "replicas": [state.status for state in states]}, 200 if ready else 503)

    async def _merged(self, scope: Scope, exchange: Exchange) -> Response:
        """Merge the state reports of all replicas; an error response of one replica is returned for all."""

        async def said(replica: Replica) -> tuple[ReplicaAnswer, bytes] | None:
            try:
                async with asyncio.timeout(ASK_S):
                    answer = await ask(replica.socket, "GET", _target(scope), _headers(scope, exchange))
                    try:
                        await answer.begin()
                        return answer, await answer.whole()
                    finally:
                        answer.close()
            except (TimeoutError, NotAskedError, ReplicaLostError):
                return None

        ready = self._replicas.ready()
        found = await asyncio.gather(*map(said, ready))
        texts = {}
        for replica, got in zip(ready, found, strict=True):
            if got is not None and got[0].status != 200:
                return _same(*got)
            if got is not None:
                texts[replica.number] = got[1].decode()
        if not texts:
            raise self._nobody()
        kind, merged = MERGED[scope["path"]]
        content = await asyncio.to_thread(merged, self._replicas.states, texts)
        return Response(content, media_type=kind)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        """Forward a request to a replica, and the answer to the client.

        If a replica is lost after it received a request, the request is not retried, since it may be the cause. A
        request that a stopping replica rejects is retried on another. One without a key is forwarded without its body.
        """
        body, prompt = b"", RoutedPrompt(sequences=0)
        if self._keys is None or self._keys.owner(scope) is not None:
            body = await read_body(Request(scope, receive), self._most)
            prompt = await _routed(scope["path"], body)
        tried: list[Replica] = []
        refusal = bytes(reply(stopping(), scope["path"]).body)
        while (replica := self._replicas.choose(prompt, tried)) is not None and not self._replicas.stopping:
            taken = replica.take(prompt)
            try:
                target, headers = _target(scope), _headers(scope, exchange)
                answer = await ask(replica.socket, scope["method"], target, headers, body)
                try:
                    with when_gone(receive, answer.close):
                        if await _begun(answer, replica.number, b"" if self._replicas.stopping else refusal):
                            replica.remember(prompt)
                            await _relay(answer, send, taken, replica.number, exchange)
                finally:
                    answer.close()
            except NotAskedError:
                tried.append(replica)
                continue
            finally:
                taken.close()
            return
        raise self._nobody()

    def _nobody(self) -> ApiError:
        if self._replicas.stopping:
            return stopping()
        message = "no replica takes requests now; they are being started, send the request again later"
        return ApiError(503, message, "server_error", code="no_replica", headers={"Retry-After": "5"})


MERGED: dict[str, tuple[str, Callable[..., bytes]]] = {
    "/metrics": ("text/plain; version=0.0.4", merging.metrics),
    "/load": ("application/json", lambda states, texts: json.dumps(merging.load(texts)).encode()),
    "/server_info": ("application/json", lambda *said: json.dumps(merging.server_info(*said)).encode()),
}


async def _begun(answer: ReplicaAnswer, number: int, refusal: bytes) -> bool:
    """Wait for the start of an answer; False if the client has disconnected.

    Args:
        refusal: body with which a stopping replica rejects requests, b"" if this counts as an answer too.

    Raises:
        ApiError: the replica is lost.
        NotAskedError: the replica is stopping.
    """
    try:
        await answer.begin()
        if refusal and answer.status == stopping().status and await answer.held() == refusal:
            raise NotAskedError
    except ReplicaLostError as error:
        if answer.closed:
            return False
        raise _lost(number) from error
    return True


async def _relay(answer: ReplicaAnswer, send: Send, taken: OpenRequest, number: int, exchange: Exchange) -> None:
    """Relay a started answer (for streams, whole events); an interrupted answer ends with an error."""
    exchange.status = answer.status
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    stream = any(value.startswith(b"text/event-stream") for name, value in answer.headers if name == b"content-type")
    parts, rest = 0, b""
    try:
        while not answer.complete or not parts:
            part = rest + await answer.part()
            parts, rest = parts + 1, b""
            if answer.complete:
                taken.close()  # before the end is sent, after which the client may send the next request
            elif parts == 2:  # the first event of a stream may precede the prefill
                taken.read()
            if stream and not answer.complete:
                events, end, rest = part.rpartition(b"\n\n")
                part = events + end
            if part or answer.complete:
                await send({"type": "http.response.body", "body": part, "more_body": not answer.complete})
    except ReplicaLostError:
        if answer.closed:
            return
        if not stream:
            raise  # the connection ends before the declared length
        refusal, anthropic = _lost(number), MESSAGES in exchange.path
        event = refusal.anthropic if anthropic else refusal.body
        await send(part_of([event], b"" if anthropic else DONE, more=False))


def _lost(number: int) -> ApiError:
    message = f"replica {number} ended before the answer was complete; the server's log has the details"
    return ApiError(500, message, "server_error", code="replica_failed", headers={"x-should-retry": "false"})


def _same(answer: ReplicaAnswer, body: bytes) -> Response:
    """Response with the answer of a replica."""
    copy = Response(body, answer.status)
    copy.raw_headers = [each for each in answer.headers if each[0] != ID_HEADER]
    return copy


async def _routed(path: str, body: bytes) -> RoutedPrompt:
    if path not in PROMPTS:
        return RoutedPrompt(size=len(body))
    return prompt_of(body) if len(body) < LONG_BODY else await asyncio.to_thread(prompt_of, body)


def _target(scope: Scope) -> bytes:
    """Path and query, unchanged."""
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path


def _headers(scope: Scope, exchange: Exchange) -> Headers:
    """Headers of the client, with its address and the id of the request."""
    own = [(ID_HEADER, exchange.id.encode()), (b"x-forwarded-proto", scope["scheme"].encode())]
    if scope["client"] is not None:
        own.append((b"x-forwarded-for", scope["client"][0].encode()))
    return [*((name, value) for name, value in scope["headers"] if name not in (ID_HEADER, *FORWARDED)), *own]


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
