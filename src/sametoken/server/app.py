"""The FastAPI application: its paths with their endpoints, its middleware, and its error handlers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from sametoken import __version__
from sametoken.server import playground
from sametoken.server import reply_schema as schemas
from sametoken.server.about_api import AboutApi
from sametoken.server.chat_batch import BatchChatRequest
from sametoken.server.chat_schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from sametoken.server.embedding_api import EmbeddingApi, EmbeddingsRequest
from sametoken.server.errors import AnthropicError, ApiError, failed, reply
from sametoken.server.hints import of_path
from sametoken.server.http import BearerKeys, KnownHosts, Origins, SpelledHeaders, is_loopback
from sametoken.server.llama.api import llama_routes, speaks_llama
from sametoken.server.messages_schema import CountRequest, MessagesRequest
from sametoken.server.openapi import BODY_REFUSALS, TEXT_REFUSALS, Operation, describe
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.schema import CompletionRequest
from sametoken.server.text_api import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TextApi
from sametoken.server.token_api import TokenApi
from sametoken.server.worker import Worker


def build_app(worker: Worker, names: Sequence[str], info: Mapping[str, Any]) -> FastAPI:
    """Build the application of a worker.

    Args:
        names: names of the model for clients; replies contain the first one.
        info: the resolved configuration, for /server_info.
    """
    app = FastAPI(title="sametoken", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    about = AboutApi(worker, names, info)
    for method, path, endpoint in llama_routes(worker, names, info):  # the first route of a path has priority
        app.api_route(path, methods=[method], include_in_schema=False)(endpoint)
    operations = _operations(TextApi(worker, names), TokenApi(worker, names), EmbeddingApi(worker, names), about)
    for method, path, endpoint, *_ in operations:
        app.api_route(path, methods=[method])(endpoint)
        if method == "GET":
            app.head(path, include_in_schema=False)(endpoint)  # for load balancers
    pages = (*playground.PATHS, playground.SLASHED)
    for path in pages if worker.config.ui else filter(playground.is_reference, pages):
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(about.page)
    describe(app, operations, worker.config.root_path)
    _word_errors(app, worker)
    config = worker.config
    if config.api_key:
        app.add_middleware(BearerKeys, keys=config.api_key, refused=worker.count)
    elif config.hosts and all(map(is_loopback, config.hosts)):
        app.add_middleware(KnownHosts, names=config.allowed_host, refused=worker.count)
    if config.cors_origin:
        # The outermost middleware, since a browser's preflight request has no key.
        app.add_middleware(Origins, config=config)
    if config.any_model:
        app.add_middleware(SpelledHeaders)
    return app


def _operations(text: TextApi, tokens: TokenApi, embedding: EmbeddingApi, about: AboutApi) -> list[Operation]:
    """All operations, each with path, endpoint, and types of body and reply; the OpenAPI document is made from them."""
    post, get = partial(Operation, "POST"), partial(Operation, "GET")
    texts = partial(post, refusals=TEXT_REFUSALS, streams=True)
    return [
        texts("/v1/completions", text.endpoint(COMPLETIONS), schemas.CompletionReply, body=CompletionRequest),
        texts("/v1/chat/completions", text.endpoint(CHAT), schemas.ChatReply, body=ChatRequest),
        post("/v1/chat/completions/batch", text.chat_batch, schemas.ChatBatchReply, TEXT_REFUSALS, BatchChatRequest),
        texts("/v1/responses", text.endpoint(RESPONSES), schemas.ResponsesReply, body=ResponsesRequest),
        get("/v1/responses/{response_id}", text.response, schemas.ResponsesReply, (401, 404)),
        post("/v1/responses/{response_id}/cancel", text.cancel_response, schemas.ResponsesReply, (400, 401, 404)),
        Operation("DELETE", "/v1/responses/{response_id}", text.delete_response, schemas.DeletedReply, (401, 404)),
        texts(
            "/v1/messages", text.endpoint(MESSAGES), schemas.MessagesReply, body=MessagesRequest, refusal=AnthropicError
        ),
        post(
            "/v1/messages/count_tokens",
            text.count_tokens,
            schemas.CountReply,
            BODY_REFUSALS,
            CountRequest,
            refusal=AnthropicError,
        ),
        post("/tokenize", tokens.tokenize, schemas.TokenizeReply, BODY_REFUSALS, TokenizeRequest),
        post("/detokenize", tokens.detokenize, schemas.DetokenizeReply, BODY_REFUSALS, DetokenizeRequest),
        get("/tokenizer_info", tokens.tokenizer_info, schemas.TokenizerInfoReply),
        post("/v1/embeddings", embedding.embeddings, schemas.EmbeddingsReply, BODY_REFUSALS, EmbeddingsRequest),
        get("/v1/models", about.models, schemas.ModelsReply),
        get("/v1/models/{name:path}", about.model, schemas.ModelReply, (401, 404)),
        get("/health", about.health, schemas.StatusReply, (), unready=True),
        get("/ping", about.ping, schemas.StatusReply, (), unready=True),
        post("/ping", about.ping, schemas.StatusReply, (), unready=True),
        get("/load", about.load, schemas.LoadReply),
        get("/live", about.live, schemas.StatusReply, ()),
        get("/version", about.version, schemas.VersionReply, ()),
        get("/server_info", about.server_info, schemas.ServerInfoReply),
        get("/metrics", about.metrics, None),
    ]


def _allowed(app: FastAPI, scope: Scope) -> str:
    """Methods of all routes of a path, separated by commas; Starlette names those of the first route alone."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def _word_errors(app: FastAPI, worker: Worker) -> None:
    """Install handlers that answer every error with an error envelope, and count it in the metrics."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        worker.count(error)
        path = request.url.path
        return reply(error, path, llama=worker.config.any_model or speaks_llama(path))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, headers, advice = request.url.path[:100], error.headers, ""
        if error.status_code == 405:
            headers = {"Allow": _allowed(app, request.scope)}
            advice = f"send {headers['Allow']}; "
        elif error.status_code == 404:
            advice = of_path(path, (route.path for route in app.routes if isinstance(route, Route)))
        known = f"{request.method} {path}: {error.detail}; {advice}GET /docs lists the paths"
        return await api_error(request, ApiError(error.status_code, known, headers=headers))

    async def own_error(request: Request, error: Exception) -> Response:
        return await api_error(request, failed(error))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, own_error)
