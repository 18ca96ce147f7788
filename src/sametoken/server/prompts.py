"""Prompts of requests as token ids: conversations by the chat template, and what cuts or extends a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sametoken.checkpoint.tokenizer import LONG_TEXT, Tokenizer
from sametoken.engine.llm import Prompt
from sametoken.errors import RequestError
from sametoken.server.chat_schema import ChatMessage, ChatRequest, TokenizeRequest
from sametoken.server.errors import ApiError, misread
from sametoken.server.reasoning import CONTENT, Style, find_style
from sametoken.server.schema import CompletionRequest
from sametoken.server.speech import Rendered

_Read = tuple[str, list[int]]  # a conversation as the model reads it, and its tokens
MESSAGE_COST = 50  # characters that take as long to tokenise as a message to be rendered


class Prompts:
    """Makes prompts for one model.

    Args:
        tokenizer: with the chat template. `context`: tokens that prompt and reply may have together.
        parser: how thinking is marked; see `find_style`.
    """

    def __init__(self, tokenizer: Tokenizer, context: int, parser: str) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._style = find_style(parser, tokenizer.chat_templates)
        self._specials = {tokenizer.token_text(token) for token in tokenizer.special_ids}

    async def of_texts(self, body: CompletionRequest) -> Rendered:
        """The prompts of /v1/completions; texts stay texts unless they are to be tokenised otherwise than usual."""
        if body.truncate_prompt_tokens is None and body.add_special_tokens is not False:
            return Rendered(body.prompt)
        special = body.add_special_tokens is not False

        def encode(prompt: Prompt) -> list[int]:
            ids = self._tokenizer.encode(prompt, special) if isinstance(prompt, str) else list(prompt)
            return body.cut(ids, self._context, body.reply_tokens)

        try:
            return Rendered(await asyncio.to_thread(lambda: [encode(prompt) for prompt in body.prompt]))
        except RequestError as error:
            raise misread(error, "prompt") from error

    async def of_chat(self, body: ChatRequest) -> Rendered:
        """The conversation of a request as its template puts it, with the functions that it offers."""
        options: dict[str, Any] = {}
        if body.reasoning_effort is not None:
            options = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
        options |= body.chat_template_kwargs or {}
        if body.offered:
            if not self._tokenizer.renders_tools:
                words = "tools: the chat template of this model has no place for them; expected a request without"
                raise ApiError(400, words, param="tools")
            tools = [{"type": "function", "function": each.model_dump(exclude_none=True)} for each in body.offered]
            options["tools"] = tools
        if _is_long(body.messages):
            text, ids = await asyncio.to_thread(self._render, body.messages, body, options)
        else:
            text, ids = self._render(body.messages, body, options)
        made = Rendered([body.cut(ids, self._context, body.reply_tokens)], tags_calls=self._tokenizer.tags_tool_calls)
        return made if self._style is None else self._split(body, made, text, self._style)

    def _split(self, body: ChatRequest, made: Rendered, text: str, style: Style) -> Rendered:
        """A prompt with what is known of the reply to it."""
        shows_marks = bool(style.every_mark & self._specials)
        if shows_marks and body.skip_special_tokens is not False:
            style = style.without(self._specials)
        continued = (body.messages[-1].content or "") if body.continue_final_message else None
        opening = partial(style.opening, text, continued)
        match opening().state:
            case "content":
                waits = {}
            case "begin" if style.opens and style.otherwise == CONTENT:
                waits = {"after": style.after, "opens": style.opens}
            case _:
                waits = {"after": style.after}
        return made._replace(opening=opening, shows_marks=shows_marks, waits=waits)

    async def of_tokenize(self, body: TokenizeRequest) -> list[int]:
        """The ids that /tokenize tells."""
        if body.messages is not None:
            return (await asyncio.to_thread(self._render, body.messages, body, body.chat_template_kwargs or {}))[1]
        try:
            special = body.add_special_tokens is not False
            return await asyncio.to_thread(self._tokenizer.encode, body.prompt or "", special)
        except RequestError as error:
            raise misread(error, "prompt") from error

    def _render(
        self, messages: Sequence[ChatMessage], body: ChatRequest | TokenizeRequest, options: Mapping[str, Any]
    ) -> _Read:
        """A conversation; `options` are variables of the template."""
        goes_on = bool(body.continue_final_message)
        begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
        try:
            turns = [message.for_template() for message in messages]
            text = self._tokenizer.apply_chat_template(turns, begins, goes_on, **options)
            return text, self._tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        except (RequestError, RecursionError) as error:
            raise misread(error, "messages") from error


def _is_long(messages: Sequence[ChatMessage]) -> bool:
    """Whether the event loop must not wait for the rendering."""
    return sum(MESSAGE_COST + len(message.content or "") for message in messages) > LONG_TEXT
