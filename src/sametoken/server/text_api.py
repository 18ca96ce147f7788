"""Endpoints that generate text: completions, chat completions, responses and messages, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.engine.completion import Completion
from sametoken.engine.request import Request as EngineRequest
from sametoken.errors import RequestError
from sametoken.server.api import Api
from sametoken.server.beams import search
from sametoken.server.chat_batch import BatchChatRequest, joined
from sametoken.server.chat_schema import ChatRequest
from sametoken.server.chat_words import ChatWords
from sametoken.server.completion_words import CompletionWords
from sametoken.server.errors import CLIENT_GONE, ApiError, refused, worded
from sametoken.server.http import Encode, unless_gone
from sametoken.server.measured import MeasuredWords
from sametoken.server.messages_schema import CountRequest, MessagesRequest
from sametoken.server.messages_words import MessagesWords
from sametoken.server.prompts import Made
from sametoken.server.reply import EventStream, completions
from sametoken.server.responses_schema import ResponsesRequest, turns_of
from sametoken.server.responses_words import ResponsesWords
from sametoken.server.schema import CompletionRequest
from sametoken.server.scored_reply import scored, written
from sametoken.server.stored import StoredResponse
from sametoken.server.text_request import TextRequest
from sametoken.server.threads import SideWork, aside
from sametoken.server.words import ReplyHead, Source, Usual, Words
from sametoken.server.worker import Job

LOG = logging.getLogger("sametoken.server")
Keep = Callable[[dict[str, Any]], None]
_Reply = tuple[Sequence[EngineRequest], Words, Sequence[Completion]]


class ApiFormat(NamedTuple):
    """One API for the generation of text.

    Attributes:
        name: name of the endpoint in the OpenAPI document.
        purpose: description of the endpoint in the OpenAPI document.
        body: class of the request's body.
        prefix: prefix of the ids of replies, including the separator.
        words: class or function that makes the writer of the reply.
        anthropic: True if errors have Anthropic's envelope.
        marked: True if a stream ends with OpenAI's mark.
        measured: True if replies can have timing metrics.
    """

    name: str
    purpose: str
    body: type[Any]
    prefix: str
    words: Callable[[Any, Source], Words]
    anthropic: bool = False
    marked: bool = True
    measured: bool = False


COMPLETIONS = ApiFormat("completions", "Continue a prompt.", CompletionRequest, "cmpl-", CompletionWords, measured=True)
CHAT = ApiFormat("chat_completions", "Continue a conversation.", ChatRequest, "chatcmpl-", ChatWords, measured=True)
RESPONSES = ApiFormat(
    "responses", "Continue a conversation, in the newer form.", ResponsesRequest, "resp_", ResponsesWords
)
MESSAGES = ApiFormat(
    "messages", "Continue a conversation, in Anthropic's form.", MessagesRequest, "msg_", MessagesWords, anthropic=True
)


class TextApi(Api):
    """Endpoints that continue a prompt or a conversation."""

    @property
    def _usual(self) -> Usual:
        config = self._worker.config
        return Usual(config.enable_force_include_usage, config.return_tokens_as_token_ids)

    def endpoint(self, api: ApiFormat) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of an API's requests: body, admission, prompt and parameters, engine, reply."""

        async def answer(request: Request) -> Response:
            body = await self._read(request, api.body)
            asked, keep = body.request, None
            if isinstance(body, ResponsesRequest):
                asked, keep = self._in_history(body)
            if asked.beams is not None:
                return await self._search(api, request, body, asked)
            begun = await self._begin(api, request, body, asked, keep)
            if begun is None:
                return Response(status_code=CLIENT_GONE)
            job, words = begun
            if isinstance(body, ResponsesRequest) and body.background:
                return self._in_background(job, words, asked)
            if body.stream:
                return EventStream(job, words, asked.fields, api.anthropic, api.marked)
            try:
                done = await completions(job, request.receive)
            except Exception as error:
                raise worded(error, asked.fields, self._worker.config.request_timeout) from error
            if len(done) < len(job.requests):
                return Response(status_code=CLIENT_GONE)
            if scored(job.requests):
                return await _whole([(job.requests, words, done)])
            return JSONResponse(words.whole(done))

        answer.__name__, answer.__doc__ = api.name, api.purpose
        return answer

    async def chat_batch(self, request: Request) -> Response:
        """Continue several conversations, each in one choice."""
        body = await self._read(request, BatchChatRequest)
        begun, replies, fields = list[tuple[Job, Words]](), list[_Reply](), body.parts[0].request.fields
        self._worker.admit(len(body.parts))
        try:
            for part in body.parts:
                if (one := await self._begin(CHAT, request, part, part.request)) is None:
                    return Response(status_code=CLIENT_GONE)
                begun.append(one)
            for job, words in begun:
                done = await completions(job, request.receive)
                if len(done) < len(job.requests):
                    return Response(status_code=CLIENT_GONE)
                replies.append((job.requests, words, done))
        except Exception as error:
            raise worded(error, fields, self._worker.config.request_timeout) from error
        finally:
            for job, _ in begun:
                job.close()
        return await _whole(replies, joined)

    async def _begin(
        self, api: ApiFormat, request: Request, body: Any, asked: TextRequest, keep: Keep | None = None
    ) -> tuple[Job, Words] | None:
        """Submit a request to the engine; None if the client disconnects before its prompt is made.

        Args:
            keep: callback that receives the response, see `ReplyHead`.
        """
        worker = self._worker
        worker.admit(asked.sequences)
        try:
            work = asked.work or (None if self._tokenizer.is_quick else SideWork.TEXT)
            if work is not None:
                made = await unless_gone(request.receive, aside(work, self._prompts.make, asked))
            elif request.state.is_long:
                made = await unless_gone(request.receive, asyncio.to_thread(self._prompts.make, asked))
            else:  # a short prompt does not need a thread
                made = self._prompts.make(asked)
        except RequestError as error:
            raise refused(error, asked.fields) from error
        if made is None:
            return None
        if not made.requests:
            empty = RequestError("prompt is an empty list, expected a text, token ids, or a list of them")
            raise refused(empty, asked.fields)
        job = worker.take(made.requests)
        LOG.debug("%s: %d sequences, user %r", api.name, len(job.requests), asked.user)
        most, room = made.requests[0].params.max_tokens, min(each.room for each in made.requests)
        if most is not None and room < most:
            message = "%s: %s is %d and the context holds %d more; there the reply ends by length"
            LOG.info(message, api.name, asked.fields["max_tokens"], most, room)
        try:
            words = self._words(api, body, asked, made, keep)
            measured = worker.config.enable_per_request_metrics and api.measured and len(job.requests) == 1
            return job, MeasuredWords(words, job.requests[0]) if measured else words
        except BaseException:
            job.close()  # otherwise the sequences would never leave the queue
            raise

    async def _search(self, api: ApiFormat, request: Request, body: Any, asked: TextRequest) -> Response:
        """Reply to a request with beam search."""
        assert asked.beams is not None
        worker = self._worker
        worker.admit(asked.sequences)
        try:
            made = await unless_gone(request.receive, aside(asked.work or SideWork.TEXT, self._prompts.make, asked))
            done = [] if made is None else await search(worker, made.requests, asked.beams, request.receive)
        except Exception as error:
            raise worded(error, asked.fields, worker.config.request_timeout) from error
        if made is None or not done:
            return Response(status_code=CLIENT_GONE)
        return await _whole([(made.requests, self._words(api, body, asked, made), done)])

    def _words(self, api: ApiFormat, body: Any, asked: TextRequest, made: Made, keep: Keep | None = None) -> Words:
        """Writer of the reply to a request."""
        id_ = f"{api.prefix}{asked.id or secrets.token_hex(12)}"
        head = ReplyHead(id_, int(time.time()), self._names[0], self._usual, keep)
        return api.words(body, Source(head, self._tokenizer, made.requests, made.reader))

    def _in_history(self, body: ResponsesRequest) -> tuple[TextRequest, Keep | None]:
        """Request continued from the body's previous response, and the callback that stores the new response."""
        asked, store = body.request, self._worker.stored
        if body.background and not self._worker.config.max_stored_responses:
            words = "background: this server keeps no responses (max_stored_responses 0); leave it out"
            raise ApiError(400, words, param="background")
        talk = asked.conversation
        assert talk is not None
        own = 0 if body.instructions is None else 1  # instructions are for this request only
        if body.previous_response_id is not None:
            before = store.conversation(body.previous_response_id)
            talk = replace(talk, turns=[*talk.turns[:own], *before, *talk.turns[own:]])
            asked = replace(asked, conversation=talk)
        turns = talk.turns[own:]

        def keep(response: dict[str, Any]) -> None:
            store.put(StoredResponse(response, [*turns, *turns_of(response["output"])]))

        return asked, None if body.store is False else keep

    def _in_background(self, job: Job, words: Words, asked: TextRequest) -> Response:
        """Reply at once to a request in the background, and start a task that completes the stored response."""
        stored = StoredResponse(dict(cast(Any, words).queued()), stop=job.close)
        answer, worker = JSONResponse(stored.response), self._worker
        worker.stored.put(stored)

        async def work() -> None:
            done = list[Completion]()
            try:
                async for chunk in job.chunks:
                    job.saw(chunk)
                    done += [chunk.completion] if chunk.completion is not None else []
                    if stored.response["status"] == "queued":
                        stored.response["status"] = "in_progress"
                if stored.response["status"] == "in_progress":
                    words.whole(done)
            except Exception as error:
                failure = worded(error, asked.fields, worker.config.request_timeout)
                worker.count(failure)
                about = failure.body["error"]
                stored.response |= {"status": "failed", "error": {"code": about["type"], "message": about["message"]}}
            finally:
                job.close()

        task = asyncio.create_task(work())
        worker.background.add(task)
        task.add_done_callback(worker.background.discard)
        return answer

    async def response(self, response_id: str) -> Response:
        """Stored response."""
        return JSONResponse(self._worker.stored.find(response_id, "response_id").response)

    async def cancel_response(self, response_id: str) -> Response:
        """Cancel a response in the background."""
        return JSONResponse(self._worker.stored.cancel(response_id))

    async def delete_response(self, response_id: str) -> Response:
        """Delete a stored response."""
        stored = self._worker.stored.find(response_id, "response_id")
        if stored.response["background"]:
            self._worker.stored.cancel(response_id)
        self._worker.stored.drop(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def count_tokens(self, request: Request) -> Response:
        """Number of prompt tokens of a conversation in Anthropic's form."""
        asked = (await self._read(request, CountRequest)).request
        assert asked.conversation is not None
        _, ids = await self._prompts.rendered(asked.conversation, asked.special_tokens, "messages")
        return JSONResponse({"input_tokens": len(ids)})


async def _whole(
    replies: Sequence[_Reply], join: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] = lambda each: each[0]
) -> Response:
    """Whole reply, which `join` makes of the replies to the parts of a request."""

    def write(encode: Encode) -> Response:
        words = join([words.whole(done) for _, words, done in replies])
        return Response(encode(words), media_type="application/json")

    tokens = sum(len(each.token_ids) for _, _, done in replies for each in done)
    return await written([each for requests, _, _ in replies for each in requests], tokens, write)
