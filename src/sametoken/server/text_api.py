"""Endpoints that answer with text: completions, chat completions, responses and messages, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.errors import RequestError
from sametoken.server.api import Api
from sametoken.server.chat_schema import ChatRequest
from sametoken.server.chat_words import ChatWords
from sametoken.server.completion_words import CompletionWords
from sametoken.server.errors import CLIENT_GONE, refused, worded
from sametoken.server.messages_schema import CountRequest, MessagesRequest
from sametoken.server.messages_words import MessagesWords
from sametoken.server.prompts import Made
from sametoken.server.reply import EventStream, completions
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.responses_words import ResponsesWords
from sametoken.server.schema import CompletionRequest
from sametoken.server.text_request import TextRequest
from sametoken.server.threads import aside
from sametoken.server.words import ReplyHead, Source, Usual, Words

LOG = logging.getLogger("sametoken.server")


class ApiFormat(NamedTuple):
    """One of the APIs in which text is asked for and replied.

    Attributes:
        name, purpose: of the endpoint, for the OpenAPI document.
        body: what a request has. `prefix`: of the ids of replies, to the sign before their number.
        words: word the reply.
        anthropic: errors have Anthropic's envelope.
        marked: whether a stream ends with OpenAI's mark.
    """

    name: str
    purpose: str
    body: type[Any]
    prefix: str
    words: Callable[[Any, Source], Words]
    anthropic: bool = False
    marked: bool = True


COMPLETIONS = ApiFormat("completions", "Continue a prompt.", CompletionRequest, "cmpl-", CompletionWords)
CHAT = ApiFormat("chat_completions", "Continue a conversation.", ChatRequest, "chatcmpl-", ChatWords)
RESPONSES = ApiFormat(
    "responses", "Continue a conversation, in the newer form.", ResponsesRequest, "resp_", ResponsesWords
)
MESSAGES = ApiFormat(
    "messages", "Continue a conversation, in Anthropic's form.", MessagesRequest, "msg_", MessagesWords, anthropic=True
)


class TextApi(Api):
    """What continues a prompt or a conversation."""

    @property
    def _usual(self) -> Usual:
        config = self._worker.config
        return Usual(config.enable_force_include_usage, config.return_tokens_as_token_ids)

    def endpoint(self, api: ApiFormat) -> Callable[[Request], Awaitable[Response]]:
        """What answers every request of an API: body, place, prompt and parameters, engine, words."""

        async def answer(request: Request) -> Response:
            worker, body = self._worker, await self._read(request, api.body)
            asked = body.request
            worker.admit(asked.sequences)
            try:
                made = await self._made(asked, request.state.is_long)
            except RequestError as error:
                raise refused(error, asked.fields) from error
            job = worker.take(made.requests)
            LOG.debug("%s: %d sequences, user %r", api.name, len(job.requests), asked.user)
            most, room = made.requests[0].params.max_tokens, min(each.room for each in made.requests)
            if most is not None and room < most:
                said = "%s: %s is %d and the context holds %d more; there the reply ends by length"
                LOG.info(said, api.name, asked.fields["max_tokens"], most, room)
            try:
                id_ = f"{api.prefix}{asked.id or secrets.token_hex(12)}"
                head = ReplyHead(id_, int(time.time()), self._names[0], self._usual)
                words = api.words(body, Source(head, self._tokenizer, job.requests, made.reader))
            except BaseException:
                job.close()  # or its sequences would keep their places for ever
                raise
            if body.stream:
                return EventStream(job, words, asked.fields, api.anthropic, api.marked)
            try:
                done = await completions(job, request.receive)
            except Exception as error:
                raise worded(error, asked.fields, worker.config.request_timeout) from error
            if len(done) < len(job.requests):
                return Response(status_code=CLIENT_GONE)
            return JSONResponse(words.whole(done))

        answer.__name__, answer.__doc__ = api.name, api.purpose
        return answer

    async def _made(self, asked: TextRequest, is_long: bool) -> Made:
        """The engine's requests; the event loop makes only those of a short prompt."""
        if asked.work is not None:
            return await aside(asked.work, self._prompts.make, asked)
        return await asyncio.to_thread(self._prompts.make, asked) if is_long else self._prompts.make(asked)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation in Anthropic's form has as a prompt."""
        asked = (await self._read(request, CountRequest)).request
        assert asked.conversation is not None
        _, ids = await self._prompts.rendered(asked.conversation, asked.special_tokens, "messages")
        return JSONResponse({"input_tokens": len(ids)})
