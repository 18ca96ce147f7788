"""Endpoints that answer with text: completions, chat completions and responses, whole or as a stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.engine.completion import Completion
from sametoken.engine.llm import Prompt
from sametoken.errors import RequestError
from sametoken.options.sampling import SamplingParams
from sametoken.server.answers import Answer, CompletionAnswer, Head
from sametoken.server.api import Api
from sametoken.server.chat_answer import ChatAnswer
from sametoken.server.chat_schema import ChatRequest
from sametoken.server.errors import CLIENT_GONE, ApiError, failed, invalid, refused
from sametoken.server.fields import field_names
from sametoken.server.http import EventStream, event, read, unless_gone
from sametoken.server.messages_answer import MessagesAnswer
from sametoken.server.messages_schema import CountRequest, MessagesRequest
from sametoken.server.prompts import Rendered
from sametoken.server.responses_answer import ResponsesAnswer
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.schema import CompletionRequest, Generation
from sametoken.server.worker import Job

LOG = logging.getLogger("sametoken.server")
Sampling = Callable[[Mapping[str, Any]], SamplingParams]  # of what the model recommends


class TextApi(Api):
    """What continues a prompt or a conversation."""

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        body = await read(request, CompletionRequest, self._most)
        head = self._head("cmpl", body.model, body.request_id)
        job = await self._submit(body, await self._prompts.of_texts(body), body.to_sampling)
        answer = CompletionAnswer(body, head, job.requests, self._tokenizer)
        return await self._answer(request, body, job, answer)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        body = await read(request, ChatRequest, self._most)
        head = self._head("chatcmpl", body.model, body.request_id)
        prompt = await self._prompts.of_chat(body)
        job = await self._submit(body, [prompt.ids], self._chat_sampling(body, prompt))
        answer = ChatAnswer(body, head, job.requests, self._tokenizer, body.reader(prompt.opening))
        return await self._answer(request, body, job, answer)

    async def responses(self, request: Request) -> Response:
        """Continue a conversation, in the newer form."""
        body = await read(request, ResponsesRequest, self._most)
        head = self._head("resp", body.model, body.request_id)
        try:
            chat = body.to_chat()
        except ValidationError as error:
            raise invalid(error, field_names(ResponsesRequest)) from error
        prompt = await self._prompts.of_chat(chat)
        job = await self._submit(chat, [prompt.ids], self._chat_sampling(chat, prompt))
        answer = ResponsesAnswer(body, head, self._tokenizer, chat.reader(prompt.opening), job.requests[0].params)
        return await self._answer(request, body, job, answer)

    async def messages(self, request: Request) -> Response:
        """Continue a conversation, in Anthropic's form."""
        body = await read(request, MessagesRequest, self._most)
        chat, prompt, head = await self._read_messages(body)
        job = await self._submit(chat, [prompt.ids], self._chat_sampling(chat, prompt), {"stop": "stop_sequences"})
        answer = MessagesAnswer(head, chat.reader(prompt.opening), len(prompt.ids))
        return await self._answer(request, chat, job, answer, anthropic=True)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation in Anthropic's form has as a prompt."""
        body = await read(request, CountRequest, self._most)
        _, prompt, _ = await self._read_messages(body)
        return JSONResponse({"input_tokens": len(prompt.ids)})

    async def _read_messages(self, body: CountRequest) -> tuple[ChatRequest, Rendered, Head]:
        head = self._head("msg", body.model)
        try:
            chat = body.to_chat()
        except ValidationError as error:
            raise invalid(error, field_names(type(body))) from error
        return chat, await self._prompts.of_chat(chat), head

    def _chat_sampling(self, body: ChatRequest, prompt: Rendered) -> Sampling:
        tags = self._tokenizer.tags_tool_calls
        return lambda recommended: body.to_sampling(recommended, tags, prompt.shows_marks, prompt.waits)

    async def _submit(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> Job:
        """Hands a request to the engine; `renamed` is what its client calls fields that errors may name."""
        fields = {name: name for name in field_names(type(body))} | dict(renamed)
        if body.forms:
            fields["structured_outputs"] = body.forms[0]
        try:
            params = sampling(self._worker.llm.default_sampling)
        except RequestError as error:
            raise refused(error, fields) from error
        job = await self._worker.submit(prompts, params, fields)
        LOG.debug("%s: %d sequences, user %r", type(body).__name__, len(job.requests), body.user)
        return job

    async def _answer(
        self, request: Request, body: Generation, job: Job, answer: Answer, anthropic: bool = False
    ) -> Response:
        if body.stream:
            return EventStream(_events(job, answer), self._failed, job.close, anthropic)
        try:
            done = await unless_gone(request, _completions(job))
        finally:
            job.close()
        return Response(status_code=CLIENT_GONE) if done is None else JSONResponse(answer.whole(done))

    def _failed(self, error: Exception) -> ApiError:
        """An error in an open stream."""
        told = error if isinstance(error, ApiError) else failed(error)
        self._worker.count(told)
        return told


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
