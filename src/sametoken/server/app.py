"""The FastAPI application: which paths there are, and how each turns a body into work and work into a reply."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken import __version__
from sametoken.checkpoint.tokenizer import LONG_TEXT
from sametoken.engine.completion import Completion
from sametoken.engine.llm import Prompt
from sametoken.errors import RequestError
from sametoken.server import playground
from sametoken.server.answers import Answer, CompletionAnswer, Head
from sametoken.server.chat_answer import ChatAnswer
from sametoken.server.chat_schema import ChatMessage, ChatRequest, DetokenizeRequest, TokenizeRequest
from sametoken.server.errors import ApiError, failed, invalid, refused
from sametoken.server.fields import field_names
from sametoken.server.http import CLIENT_GONE, EventStream, Keys, event, read, reply, unless_gone
from sametoken.server.openapi import describe
from sametoken.server.responses_answer import ResponsesAnswer
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.schema import CompletionRequest, Generation
from sametoken.server.worker import Job, Worker
from sametoken.speculation.params import SamplingParams

LOG = logging.getLogger("sametoken.server")
MESSAGE_COST = 50  # characters that take as long to tokenise as a message to be rendered


class Api:
    """The endpoints.

    Args:
        worker: what serves requests.
        names: what clients may call the model; the first stands in replies.
        info: the resolved configuration, for /server_info.
    """

    def __init__(self, worker: Worker, names: Sequence[str], info: Mapping[str, Any]) -> None:
        self._worker, self._names, self._info = worker, tuple(names), dict(info)
        self._tokenizer, self._most = worker.llm.tokenizer, worker.config.max_body
        self._created = int(time.time())

    # Text.

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        body = await read(request, CompletionRequest, self._most)
        head = self._head("cmpl", body.model)
        job = await self._submit(body, body.prompt, body.to_sampling)
        answer = CompletionAnswer(body, head, job.requests, self._tokenizer)
        return await self._answer(request, body, job, answer)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        body = await read(request, ChatRequest, self._most)
        head = self._head("chatcmpl", body.model)
        job = await self._submit(
            body, [await self._prompt(body)], lambda: body.to_sampling(self._tokenizer.tags_tool_calls)
        )
        return await self._answer(request, body, job, ChatAnswer(body, head, job.requests, self._tokenizer))

    async def responses(self, request: Request) -> Response:
        """Continue a conversation, in the newer form."""
        body = await read(request, ResponsesRequest, self._most)
        head = self._head("resp", body.model)
        try:
            chat = body.to_chat()
        except ValidationError as error:
            raise invalid(error, field_names(ResponsesRequest)) from error
        job = await self._submit(
            chat, [await self._prompt(chat)], lambda: chat.to_sampling(self._tokenizer.tags_tool_calls)
        )
        answer = ResponsesAnswer(body, head, self._tokenizer, chat.reader())
        return await self._answer(request, body, job, answer)

    def _head(self, kind: str, model: str | None) -> Head:
        """The beginning of a reply; a model that is not here is refused."""
        if model is not None and model not in self._names:
            raise ApiError(
                404,
                f"the model {model[:100]!r} is not served here; available: {', '.join(self._names)}",
                "not_found_error",
                param="model",
                code="model_not_found",
            )
        return Head(f"{kind}-{secrets.token_hex(12)}", int(time.time()), self._names[0])

    async def _prompt(self, body: ChatRequest) -> list[int]:
        """The conversation of a request as its template puts it, with the functions that it offers."""
        options = dict(body.chat_template_kwargs or {})
        if body.offered:
            if not self._tokenizer.renders_tools:
                words = "tools: the chat template of this model has no place for them; expected a request without"
                raise ApiError(400, words, param="tools")
            tools = [{"type": "function", "function": each.model_dump(exclude_none=True)} for each in body.offered]
            options["tools"] = tools
        return await self._rendered(body.messages, True, options)

    async def _submit(
        self, body: CompletionRequest | ChatRequest, prompts: Sequence[Prompt], sampling: Callable[[], SamplingParams]
    ) -> Job:
        fields = {name: name for name in field_names(type(body))}
        if body.response_format is not None:
            fields["structured_outputs"] = "response_format"
        try:
            params = sampling()
        except RequestError as error:
            raise refused(error, fields) from error
        job = await self._worker.submit(prompts, params, fields)
        LOG.debug("%s: %d sequences, user %s", type(body).__name__, len(job.requests), body.user)
        return job

    async def _rendered(self, messages: Sequence[ChatMessage], *how: Any) -> list[int]:
        """Prompt ids of a conversation; see `_render`."""
        if sum(MESSAGE_COST + len(message.content or "") for message in messages) > LONG_TEXT:
            return await asyncio.to_thread(self._render, messages, *how)
        return self._render(messages, *how)

    def _render(self, messages: Sequence[ChatMessage], generation: bool, options: Mapping[str, Any]) -> list[int]:
        """Prompt ids of a conversation.

        Args:
            messages: for the template, as the options are. `generation`: whether the assistant's turn follows.
        """
        try:
            turns = [message.for_template() for message in messages]
            text = self._tokenizer.apply_chat_template(turns, generation, **options)
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (RequestError, RecursionError) as error:
            raise refused(RequestError(f"messages: {error}"), {"messages": "messages"}) from error

    async def _answer(self, request: Request, body: Generation, job: Job, answer: Answer) -> Response:
        if body.stream:
            return EventStream(_events(job, answer), self._failed, job.close)
        try:
            done = await unless_gone(request, _completions(job))
        finally:
            job.close()
        return Response(status_code=CLIENT_GONE) if done is None else JSONResponse(answer.whole(done))

    def _failed(self, error: Exception) -> ApiError:
        """An error in an open stream."""
        told = error if isinstance(error, ApiError) else failed(error)
        self.count(told)
        return told

    def count(self, error: ApiError) -> None:
        """Tells the metrics of an error."""
        self._worker.metrics.saw_error(error.status, error.body["error"]["code"])

    # Tokens.

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        body = await read(request, TokenizeRequest, self._most)
        self._head("", body.model)
        if body.messages is not None:
            ids = await self._rendered(body.messages, body.add_generation_prompt, body.chat_template_kwargs or {})
        else:
            try:
                special = body.add_special_tokens is not False
                ids = await asyncio.to_thread(self._tokenizer.encode, body.prompt or "", special)
            except RequestError as error:
                raise refused(RequestError(f"prompt: {error}"), {"prompt": "prompt"}) from error
        strings = [self._tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return JSONResponse(
            {"count": len(ids), "max_model_len": self._worker.llm.max_seq_len, "tokens": ids, "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, marks included."""
        body = await read(request, DetokenizeRequest, self._most)
        self._head("", body.model)
        size = self._worker.llm.config.vocab_size
        if wrong := [token for token in body.tokens if token >= size]:
            raise ApiError(400, f"tokens: got {wrong[0]}, expected token ids 0 .. {size - 1}", param="tokens")
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    # About the server.

    async def models(self) -> Response:
        """The names of the model."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, name: str) -> Response:
        """One name of the model."""
        self._head("", name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "sametoken"}
        return {**about, "max_model_len": self._worker.llm.max_seq_len}

    async def health(self) -> Response:
        """200 while requests are taken, 503 while the server stops or if the engine failed."""
        return JSONResponse({"status": "ok" if self._worker.ready else "stopping"}, 200 if self._worker.ready else 503)

    async def live(self) -> Response:
        """200 while the process answers."""
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """The version of sametoken."""
        return JSONResponse({"version": __version__})

    async def server_info(self) -> Response:
        """The resolved configuration, what requests may choose, and how busy the engine is."""
        llm = self._worker.llm
        offers = {
            "method": llm.method,
            "methods": list(llm.methods),
            "max_draft_len": llm.speculative.max_draft_len,
            "max_seq_len": llm.max_seq_len,
            "chat": self._tokenizer.has_chat_template,
        }
        return JSONResponse({**self._info, "offers": offers, "load": self._worker.load()._asdict()})

    async def page(self, request: Request) -> Response:
        """A file of a page for people."""
        return playground.file_reply(request.url.path)

    async def metrics(self) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self._worker.metrics.text(), media_type="text/plain; version=0.0.4")


async def _completions(job: Job) -> list[Completion]:
    """All completions of a job, in order of prompt and choice."""
    done = [chunk.completion async for chunk in job.chunks() if chunk.completion is not None]
    return sorted(done, key=lambda completion: (completion.index, completion.choice))


async def _events(job: Job, answer: Answer) -> AsyncGenerator[bytes, None]:
    """The events of a stream up to the closing mark, which the stream itself sends."""
    for opening in answer.opening():
        yield event(opening)
    done: list[Completion] = []
    async for chunk in job.chunks():
        for said in answer.events(chunk):
            yield event(said)
        if chunk.completion is not None:
            done.append(chunk.completion)
    for closing in answer.closing(done):
        yield event(closing)


def build_app(worker: Worker, names: Sequence[str], info: Mapping[str, Any]) -> FastAPI:
    """The application of a worker."""
    api = Api(worker, names, info)
    app = FastAPI(title="sametoken", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.post("/v1/completions")(api.completions)
    app.post("/v1/chat/completions")(api.chat_completions)
    app.post("/v1/responses")(api.responses)
    app.post("/tokenize")(api.tokenize)
    app.post("/detokenize")(api.detokenize)
    for path, endpoint in (
        ("/v1/models", api.models),
        ("/v1/models/{name:path}", api.model),
        ("/health", api.health),
        ("/live", api.live),
        ("/version", api.version),
        ("/server_info", api.server_info),
        ("/metrics", api.metrics),
    ):
        app.get(path)(endpoint)
        app.head(path, include_in_schema=False)(endpoint)  # what load balancers ask
    for path in playground.PATHS:
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(api.page)
    describe(app)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        api.count(error)
        return reply(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = f"{request.method} {request.url.path[:100]}: {error.detail}; GET /docs lists the paths"
        return await api_error(request, ApiError(error.status_code, known, headers=error.headers))

    async def own_error(request: Request, error: Exception) -> Response:
        return await api_error(request, failed(error))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, own_error)
    config = worker.config
    app.add_middleware(Keys, keys=config.api_key, refused=api.count)
    if config.cors_origin:
        # The outermost, since a browser's preflight carries no key.
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origin), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app
