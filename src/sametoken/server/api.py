"""What all endpoints share: the model's names and how a conversation becomes a prompt."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sametoken.checkpoint.tokenizer import LONG_TEXT
from sametoken.errors import RequestError
from sametoken.server.answers import Head
from sametoken.server.chat_schema import ChatMessage
from sametoken.server.errors import ApiError, refused
from sametoken.server.worker import Worker

MESSAGE_COST = 50  # characters that take as long to tokenise as a message to be rendered


class Api:
    """Endpoints of one model.

    Args:
        worker: what serves requests.
        names: what clients may call the model; the first stands in replies.
    """

    def __init__(self, worker: Worker, names: Sequence[str]) -> None:
        self._worker, self._names = worker, tuple(names)
        self._tokenizer, self._most = worker.llm.tokenizer, worker.config.max_body

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
