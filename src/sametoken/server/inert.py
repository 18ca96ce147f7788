"""Fields of requests that are accepted without effect, each with its type and, in the text below it, the reason.

The table "accepted without effect" of docs/server.md is generated from these classes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sametoken.server.fields import Body


class Inert(Body):
    """Fields of every request for text that have no effect."""

    user: str | None = None
    """the user's name changes no token; `user` is logged at level debug."""
    safety_identifier: str | None = None
    """the user's name changes no token; `user` is logged at level debug."""
    session_id: str | None = None
    """the user's name changes no token; `user` is logged at level debug."""
    metadata: dict[str, str] | None = None
    """no effect; /v1/responses repeats it."""
    store: bool | None = None
    """only responses of /v1/responses are kept."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """there is one tier; requests are served in order of arrival."""
    prompt_cache_key: str | None = None
    """the prefix cache finds a prompt by its tokens, and keeps it while there is room."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """the prefix cache finds a prompt by its tokens, and keeps it while there is room."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """no supported model was trained to read it; write the wish into the prompt."""
    priority: Annotated[int, Field(ge=0, le=0)] | None = None
    """requests are served in order of arrival, as with 0."""
    spaces_between_special_tokens: bool | None = None
    """it is for slow tokenizers only, which are not supported."""
    guided_decoding_backend: str | None = None
    """there is one backend, llguidance."""
