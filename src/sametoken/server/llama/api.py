"""Endpoints of llama-server: its own, and OpenAI's without /v1; they accept any name of the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.errors import RequestError, shown
from sametoken.options.sampling import SamplingParams
from sametoken.server.api import Api
from sametoken.server.body_size import LONG_BODY, read_body
from sametoken.server.embedding_api import EmbeddingApi
from sametoken.server.errors import ApiError, misread, not_supported
from sametoken.server.llama.schema import (
    ApplyTemplateRequest,
    InfillRequest,
    LlamaChatRequest,
    LlamaCompletionRequest,
    LlamaResponsesRequest,
    LlamaTokenizeRequest,
    NativeRequest,
)
from sametoken.server.llama.slots import SlotApi, Slots
from sametoken.server.llama.words import BUILD, LlamaWords, NativeWords, settings
from sametoken.server.text_api import CHAT, COMPLETIONS, RESPONSES, ApiFormat, TextApi
from sametoken.server.token_api import TokenApi, long_reply
from sametoken.server.worker import Worker

BODIES = {CHAT.name: LlamaChatRequest, COMPLETIONS.name: LlamaCompletionRequest, RESPONSES.name: LlamaResponsesRequest}
# Paths whose errors are in llama-server's envelope.
PATHS = (
    "/completion",
    "/completions",
    "/infill",
    "/chat/completions",
    "/responses",
    "/apply-template",
    "/props",
    "/lora-adapters",
    "/slots",
)
Endpoint = Callable[..., Awaitable[Response]]


def llama_format(api: ApiFormat, slots: Slots, verbose: bool) -> ApiFormat:
    """Extend an API of OpenAI with llama-server's fields of requests and replies."""

    def words(body: Any, source: Any) -> LlamaWords:
        return LlamaWords(api.words(body, source), body, source, slots, verbose)

    return api._replace(body=BODIES.get(api.name, api.body), words=words)


class AnyModel(Api):
    """Base class of endpoints that accept any name of the model."""

    def _check_model(self, model: str | None) -> None:
        """Accept any name, because there is one model."""


class LlamaText(AnyModel, TextApi):
    """Endpoints that continue a prompt or a conversation.

    Args:
        worker, names: see `Api`.
        slots: record of the sequence in each slot.
    """

    def __init__(self, worker: Worker, names: Sequence[str], slots: Slots) -> None:
        super().__init__(worker, names)
        self._slots = slots

    def plain(self, api: ApiFormat) -> ApiFormat:
        """API of OpenAI with llama-server's extensions."""
        return llama_format(api, self._slots, self._worker.config.verbose)

    def native(self, name: str, body: type[NativeRequest], purpose: str) -> ApiFormat:
        """API of llama-server that OpenAI does not have."""
        return ApiFormat(name, purpose, body, "cmpl", partial(NativeWords, slots=self._slots), marked=False)

    def formats(self) -> Mapping[str, ApiFormat]:
        """APIs of OpenAI at paths without /v1, by path."""
        return {"/chat/completions": self.plain(CHAT), "/responses": self.plain(RESPONSES)}

    async def response_tokens(self, request: Request) -> Response:
        """Number of prompt tokens of a response's input."""
        asked = (await self._read(request, LlamaResponsesRequest)).request
        assert asked.conversation is not None
        _, ids = await self._prompts.rendered(asked.conversation, asked.special_tokens, "input")
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def input_tokens(self, request: Request) -> Response:
        """Number of prompt tokens of a conversation."""
        body = await self._read(request, LlamaChatRequest)
        _, ids = await self._prompts.rendered(body.talk, body.request.special_tokens, "messages")
        return JSONResponse({"input_tokens": len(ids)})

    async def apply_template(self, request: Request) -> Response:
        """Prompt text that the chat template makes of a conversation."""
        body = await self._read(request, ApplyTemplateRequest)
        text, _ = await self._prompts.rendered(body.talk, body.request.special_tokens, "messages")
        return JSONResponse({"prompt": text})


class LlamaTokens(AnyModel, TokenApi):
    """Tokenizer endpoints for clients of llama-server and of vLLM."""

    async def tokenize(self, request: Request) -> Response:
        """Token ids of llama-server's `content`, or of vLLM's prompt or conversation."""
        body = await self._read(request, LlamaTokenizeRequest)
        if body.content is None:
            Api._check_model(self, body.model)
            return await self._tokenized(body)
        return await asyncio.to_thread(self._content_reply, body)

    def _content_reply(self, body: LlamaTokenizeRequest) -> Response:
        ids = self._content(body)
        tokens = [{"id": token, "piece": self._piece(token)} for token in ids] if body.with_pieces else ids
        return long_reply({"tokens": tokens})

    def _content(self, body: LlamaTokenizeRequest) -> list[int]:
        parts = [body.content] if isinstance(body.content, str) else body.content
        ids: list[int] = []
        try:
            for place, part in enumerate(parts):
                begins = body.add_special and place == 0
                ids += self._tokenizer.encode(part, begins) if isinstance(part, str) else [part]
        except RequestError as error:
            raise misread(error, "content") from error
        return ids

    def _piece(self, token: int) -> str | list[int]:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)


class LlamaAbout(AnyModel):
    """Endpoints that describe the server.

    Args:
        worker, names: see `Api`.
        info: the resolved configuration.
    """

    def __init__(self, worker: Worker, names: Sequence[str], info: Mapping[str, Any]) -> None:
        super().__init__(worker, names)
        self._info, self._created = info, int(time.time())

    async def health(self) -> Response:
        """Status 200 while requests are accepted; 503 while the server stops or if the engine failed."""
        ready = self._worker.ready
        return JSONResponse({"status": "ok" if ready else "stopping"}, 200 if ready else 503)

    async def models(self) -> Response:
        """List with the one model and all of its names."""
        llm, names = self._worker.llm, sorted(self._names)
        config = llm.config
        model = {
            "id": names[0], "aliases": names, "tags": sorted(self._worker.config.model_tags), "object": "model",
            "created": self._created, "owned_by": "sametoken",
            "meta": {"n_vocab": config.vocab_size, "n_ctx": llm.max_seq_len, "n_ctx_train": config.max_position,
                     "n_embd": config.hidden_size},
        }  # fmt: skip
        about = {"name": names[0], "model": names[0], "type": "model", "capabilities": ["completion"]}
        return JSONResponse({"models": [about], "object": "list", "data": [model]})

    async def props(self) -> Response:
        """Properties in llama-server's form: chat template, number of slots, default parameters."""
        worker, config, tokenizer = self._worker, self._worker.config, self._tokenizer
        info = tokenizer.info()
        return JSONResponse({
            "default_generation_settings": {"params": self._defaults(), "n_ctx": worker.llm.max_seq_len},
            "total_slots": worker.llm.engine.max_batch_size,
            "model_alias": sorted(self._names)[0],
            "model_path": self._info["model"],
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": config.slots, "endpoint_props": False, "endpoint_metrics": config.metrics,
            "ui": config.ui,
            "chat_template": info.get("chat_template") or "",
            "bos_token": info.get("bos_token") or "", "eos_token": info.get("eos_token") or "",
            "build_info": BUILD,
            "is_sleeping": worker.sleeping,
        })  # fmt: skip

    def _defaults(self) -> dict[str, Any]:
        values = {"max_tokens": None, **self._prompts.defaults}
        (request,) = self._worker.llm.requests([[0]], SamplingParams.from_mapping(values))
        return settings(request)

    async def change_props(self, request: Request) -> Response:
        """Status 501, because no property can be changed."""
        raise not_supported("properties cannot be changed while the server runs; give options at its start")

    async def adapters(self) -> Response:
        """Empty list, because no adapter is loaded."""
        return JSONResponse([])

    async def change_adapters(self, request: Request) -> Response:
        """Success for an empty list of scales; status 400 for others, because no adapter is loaded."""
        self._check_headers(request)
        received = await read_body(request, LONG_BODY)
        try:
            scales = from_json(received)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}; send a list of adapters") from error
        if scales != []:
            got = shown(scales)
            message = f"got {got}, expected [], because no adapter is loaded; merge adapters into the weights"
            raise ApiError(400, message)
        return JSONResponse({"success": True})


class LlamaEmbedding(AnyModel, EmbeddingApi):
    """Endpoint for embeddings that accepts any name of the model."""


def llama_routes(worker: Worker, names: Sequence[str], info: Mapping[str, Any]) -> list[tuple[str, str, Endpoint]]:
    """Method, path and endpoint of llama-server's paths; with `any_model` of OpenAI's extended paths too."""
    slots = Slots(worker.llm.engine.max_batch_size)
    text, tokens, about = LlamaText(worker, names, slots), LlamaTokens(worker, names), LlamaAbout(worker, names, info)
    embedding, places = LlamaEmbedding(worker, names), SlotApi(worker, names, slots)
    native = text.endpoint(text.native("completion", NativeRequest, "Continue a prompt, in llama-server's form."))
    infill = text.endpoint(text.native("infill", InfillRequest, "Fill a gap in a text, in llama-server's form."))
    routes: list[tuple[str, str, Endpoint]] = [
        ("POST", "/completion", native),
        ("POST", "/completions", native),
        ("POST", "/infill", infill),
        ("POST", "/apply-template", text.apply_template),
        ("POST", "/tokenize", tokens.tokenize),
        ("GET", "/props", about.props),
        ("POST", "/props", about.change_props),
        ("GET", "/lora-adapters", about.adapters),
        ("POST", "/lora-adapters", about.change_adapters),
        ("GET", "/slots", places.show),
        ("POST", "/slots/{slot}", places.change),
        ("POST", "/v1/chat/completions/input_tokens", text.input_tokens),
    ]
    for front in ("", "/v1") if worker.config.any_model else ("",):
        routes += [("POST", f"{front}{path}", text.endpoint(api)) for path, api in text.formats().items()]
        routes += [("GET", f"{front}/models", about.models), ("POST", f"{front}/embeddings", embedding.embeddings)]
        routes += [("POST", f"{front}/responses/input_tokens", text.response_tokens)]
    if worker.config.any_model:
        routes.append(("POST", "/v1/completions", text.endpoint(text.plain(COMPLETIONS))))
    routes.append(("POST", "/chat/completions/input_tokens", text.input_tokens))
    routes.append(("GET", "/v1/health", about.health))
    return routes


def speaks_llama(path: str) -> bool:
    """Return True if a path belongs to llama-server alone."""
    return path in PATHS or path.startswith(tuple(f"{each}/" for each in PATHS))
