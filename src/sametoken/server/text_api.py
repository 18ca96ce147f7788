"""Endpoints that answer with text: completions, chat completions, responses and messages, whole or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.errors import RequestError
from sametoken.server.api import Api
from sametoken.server.chat_schema import ChatRequest
from sametoken.server.chat_words import ChatWords
from sametoken.server.completion_words import CompletionWords
from sametoken.server.errors import invalid, refused
from sametoken.server.fields import field_names
from sametoken.server.messages_schema import CountRequest, MessagesRequest
from sametoken.server.messages_words import MessagesWords
from sametoken.server.reply import Reply
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.responses_words import ResponsesWords
from sametoken.server.schema import CompletionRequest
from sametoken.server.words import Source, Words

LOG = logging.getLogger("sametoken.server")
AnyRequest = CompletionRequest | ChatRequest | ResponsesRequest | MessagesRequest


class Form(NamedTuple):
    """One of the forms in which text is asked for and replied.

    Attributes:
        body: what a request has. `prefix`: of the ids of replies.
        words: word the reply.
        anthropic: errors have Anthropic's envelope.
        renamed: what the body calls fields that errors may name, where it has other names.
    """

    body: type[AnyRequest]
    prefix: str
    words: Callable[[Any, Source], Words]
    anthropic: bool = False
    renamed: Mapping[str, str] = {}


COMPLETIONS = Form(CompletionRequest, "cmpl", CompletionWords)
CHAT = Form(ChatRequest, "chatcmpl", ChatWords)
RESPONSES = Form(ResponsesRequest, "resp", ResponsesWords)
MESSAGES = Form(MessagesRequest, "msg", lambda _, source: MessagesWords(source), True, {"stop": "stop_sequences"})


class TextApi(Api):
    """What continues a prompt or a conversation."""

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        return await self._answer(request, COMPLETIONS)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._answer(request, CHAT)

    async def responses(self, request: Request) -> Response:
        """Continue a conversation, in the newer form."""
        return await self._answer(request, RESPONSES)

    async def messages(self, request: Request) -> Response:
        """Continue a conversation, in Anthropic's form."""
        return await self._answer(request, MESSAGES)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation in Anthropic's form has as a prompt."""
        chat = _as_chat(await self._read(request, CountRequest))
        return JSONResponse({"input_tokens": len((await self._prompts.of_chat(chat)).prompts[0])})

    async def _answer(self, request: Request, form: Form) -> Response:
        """The walk of every request for text: body, prompt, parameters, engine, words."""
        body = await self._read(request, form.body)
        asked = body if isinstance(body, CompletionRequest | ChatRequest) else _as_chat(body)
        head = self._head(form.prefix, asked.request_id)
        if isinstance(asked, ChatRequest):
            made = await self._prompts.of_chat(asked)
        else:
            made = await self._prompts.of_texts(asked)
        fields = {name: name for name in field_names(type(asked))} | dict(form.renamed)
        if asked.forms:
            fields["structured_outputs"] = asked.forms[0]
        try:
            job = await self._worker.submit(made.prompts, asked.to_sampling(self._worker.llm.default_sampling, made))
        except RequestError as error:
            raise refused(error, fields) from error
        LOG.debug("%s: %d sequences, user %r", type(asked).__name__, len(job.requests), asked.user)
        try:
            words = form.words(body, Source(head, self._tokenizer, job.requests, asked.reader(made.opening)))
        except BaseException:
            job.close()  # or its sequences would keep their places for ever
            raise
        return Reply(job, words, bool(asked.stream), fields, form.anthropic)


def _as_chat(body: ResponsesRequest | CountRequest) -> ChatRequest:
    """The same request as a body of /v1/chat/completions."""
    try:
        return body.to_chat()
    except ValidationError as error:
        raise invalid(error, field_names(type(body))) from error
