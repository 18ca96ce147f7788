"""The FastAPI application: which paths there are, who answers them, and how errors are worded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from sametoken import __version__
from sametoken.server import playground
from sametoken.server.about_api import AboutApi
from sametoken.server.embedding_api import EmbeddingApi
from sametoken.server.errors import ApiError, failed, reply
from sametoken.server.http import Keys
from sametoken.server.openapi import describe
from sametoken.server.text_api import TextApi
from sametoken.server.token_api import TokenApi
from sametoken.server.worker import Worker

Endpoint = tuple[str, str, Callable[..., Any]]  # method, path, what answers


def build_app(worker: Worker, names: Sequence[str], info: Mapping[str, Any]) -> FastAPI:
    """The application of a worker.

    Args:
        names: what clients may call the model; the first stands in replies.
        info: the resolved configuration, for /server_info.
    """
    app = FastAPI(title="sametoken", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    about = AboutApi(worker, names, info)
    apis = TextApi(worker, names), TokenApi(worker, names), EmbeddingApi(worker, names), about
    for method, path, endpoint in _routes(*apis):
        app.api_route(path, methods=[method])(endpoint)
        if method == "GET":
            app.head(path, include_in_schema=False)(endpoint)  # what load balancers ask
    for path in (*playground.PATHS, playground.SLASHED):
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(about.page)
    describe(app, worker.config.root_path)
    _word_errors(app, worker)
    config = worker.config
    app.add_middleware(Keys, keys=config.api_key, refused=worker.count)
    if config.cors_origin:
        # The outermost, since a browser's preflight carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return app


def _routes(text: TextApi, tokens: TokenApi, embedding: EmbeddingApi, about: AboutApi) -> Iterator[Endpoint]:
    yield "POST", "/v1/completions", text.completions
    yield "POST", "/v1/chat/completions", text.chat_completions
    yield "POST", "/v1/responses", text.responses
    yield "POST", "/v1/messages", text.messages
    yield "POST", "/v1/messages/count_tokens", text.count_tokens
    yield "POST", "/tokenize", tokens.tokenize
    yield "POST", "/detokenize", tokens.detokenize
    yield "GET", "/tokenizer_info", tokens.tokenizer_info
    yield "POST", "/v1/embeddings", embedding.embeddings
    yield "GET", "/v1/models", about.models
    yield "GET", "/v1/models/{name:path}", about.model
    yield "GET", "/health", about.health
    yield "GET", "/ping", about.ping
    yield "POST", "/ping", about.ping
    yield "GET", "/load", about.load
    yield "GET", "/live", about.live
    yield "GET", "/version", about.version
    yield "GET", "/server_info", about.server_info
    yield "GET", "/metrics", about.metrics


def _allowed(app: FastAPI, scope: Scope) -> str:
    """The methods of all routes of a path; Starlette names those of the first."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def _word_errors(app: FastAPI, worker: Worker) -> None:
    """Has every error answered with the envelope, and counted."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        worker.count(error)
        return reply(error, request.url.path)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = f"{request.method} {request.url.path[:100]}: {error.detail}; GET /docs lists the paths"
        headers = {"Allow": _allowed(app, request.scope)} if error.status_code == 405 else error.headers
        return await api_error(request, ApiError(error.status_code, known, headers=headers))

    async def own_error(request: Request, error: Exception) -> Response:
        return await api_error(request, failed(error))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, own_error)
