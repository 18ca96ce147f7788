"""Fields of requests that are accepted and change nothing, as data: a type, and in the docstring the reason.

The table "accepted without effect" of docs/server.md is generated from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sametoken.server.fields import Body


class Inert(Body):
    """Fields of every request for text that change nothing.

    Attributes:
        user, safety_identifier, session_id: who asks changes no token; `user` is logged at level debug.
        metadata, store: nothing is stored; /v1/responses repeats `metadata`.
        service_tier: there is one tier; requests are served in order of arrival.
        prompt_cache_key, prompt_cache_retention: the prefix cache finds a prompt by its tokens, and keeps it while
            there is room.
        verbosity: no supported model was trained to read it; say it in the prompt.
        priority: requests are served in order of arrival, which is what 0 asks for.
        length_penalty: it is for beam search only, which is not offered.
        spaces_between_special_tokens: it is for slow tokenizers only, which are not supported.
        guided_decoding_backend: there is one, llguidance.
    """

    user: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    priority: Annotated[int, Field(ge=0, le=0)] | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None
    guided_decoding_backend: str | None = None


class InertOfMessage(Body):
    """Fields of a message that replies and clients' own objects have, and that no chat template reads.

    Attributes:
        annotations, images: of an earlier reply; text is all that the model reads.
        audio: refers to a recording that is not stored here; `content` is what was said.
        parsed: `content` as an object of the client's.
        provider_specific_fields, thinking_blocks: what litellm found beside the standard fields.
    """

    annotations: list[Any] | None = None
    images: list[Any] | None = None
    audio: dict[str, Any] | None = None
    parsed: Any = None
    provider_specific_fields: dict[str, Any] | None = None
    thinking_blocks: list[Any] | None = None


class InertOfCall(Body):
    """Fields of a call in a message that no chat template reads.

    Attributes:
        index: its place in a stream; calls are read in their order.
        provider_specific_fields: what litellm found beside the standard fields.
    """

    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None


class InertOfFunction(Body):
    """Fields of a called function that no chat template reads.

    Attributes:
        parsed_arguments: `arguments` as an object of the client's.
        provider_specific_fields: what litellm found beside the standard fields.
    """

    parsed_arguments: Any = None
    provider_specific_fields: dict[str, Any] | None = None


class InertOfItem(Body):
    """Fields of an item of /v1/responses that come back from an earlier response.

    Attributes:
        id, status: as the earlier response had them.
        parsed_arguments: `arguments` as an object of the client's.
    """

    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    parsed_arguments: Any = None
