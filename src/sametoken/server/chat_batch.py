"""Several conversations in one request, as in vLLM's /v1/chat/completions/batch; the reply has a choice for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, model_validator

from sametoken.server.chat_schema import ChatMessage, ChatRequest
from sametoken.server.fields import MOST_PROMPTS, Off

OF_PROMPT = ("prompt_logprobs", "prompt_token_ids")  # fields of a reply that describe its only prompt
HEAD = ("id", "object", "created", "model")  # fields at the beginning of a reply


class BatchChatRequest(ChatRequest):
    """The body of POST /v1/chat/completions/batch."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[ChatMessage], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)
    ]
    """conversations; choice i of the reply goes on with conversation i."""
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    """only 1."""
    stream: Off | None = None
    """only false."""
    _parts: list[ChatRequest] = PrivateAttr()

    @model_validator(mode="after")
    def _ask(self) -> Self:
        """Make one request for each conversation."""
        shared = {name: getattr(self, name) for name in ChatRequest.model_fields}
        parts = [ChatRequest.model_construct(**{**shared, "messages": turns}) for turns in self.messages]
        self._parts = [part._ask() for part in parts]  # type: ignore[operator]  # pydantic leaves it a method
        return self

    @property
    def parts(self) -> Sequence[ChatRequest]:
        """One request for each conversation."""
        return self._parts


def joined(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the replies to conversations: fields about a prompt move into its choice, and token counts are summed."""
    choices = [
        {**choice, "index": place} | {name: reply[name] for name in OF_PROMPT}
        for place, reply in enumerate(replies)
        for choice in reply["choices"]
    ]
    head = {name: replies[0][name] for name in HEAD}
    return {**head, "choices": choices, "usage": _sum([reply["usage"] for reply in replies])}


def _sum(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of counts by name, also within nested objects."""
    return {
        name: _sum([each[name] for each in counts])
        if isinstance(value, Mapping)
        else sum(each[name] for each in counts)
        for name, value in counts[0].items()
    }
