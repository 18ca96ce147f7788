"""The protocol of the four forms of replies, and what they share: from the engine's output to JSON.

An object is made for one request, and asked for the events of a stream, or at the end for the whole reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import Request
from sametoken.server.replies import Numbered, Spells, usage
from sametoken.server.schema import Generation
from sametoken.server.speech import ReplyReader

Event = Mapping[str, Any]  # the JSON object of a server-sent event


class Words(Protocol):
    """The words of one request.

    Attributes:
        reading: returns events about a prompt that is being read, since its previous call; None to send none.
    """

    reading: Callable[[], list[Event]] | None = None

    def first(self) -> list[Event]:
        """Events before the first chunk."""
        ...

    def delta(self, chunk: Chunk) -> list[Event]:
        """The events of a chunk."""
        ...

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        """Events after the last chunk; completions in the order in which they ended."""
        ...

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """The reply to a request that did not stream; completions in order of prompt and choice."""
        ...


class Usual(NamedTuple):
    """Defaults of replies for options that a request does not set.

    Attributes:
        always_usage: every chunk has usage, even if the request sets otherwise.
        numbers: tokens are reported by number.
    """

    always_usage: bool = False
    numbers: bool = False

    def spelling(self, tokenizer: Spells, asked: bool | None) -> Spells:
        """Speller of the tokens of log-probabilities; `asked` is the request's setting, None for the default."""
        return Numbered(tokenizer) if (self.numbers if asked is None else asked) else tokenizer


USUAL = Usual()


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Fields at the beginning of every object of a reply.

    Attributes:
        id: of the reply. `created`: Unix seconds. `model`: the served name.
        usual: what the server adds to replies.
        keep: callback that receives a whole response, None for no callback.
    """

    id: str
    created: int
    model: str
    usual: Usual = USUAL
    keep: Callable[[dict[str, Any]], None] | None = None

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Source(NamedTuple):
    """Data from which a reply is worded, besides the body of the request.

    Attributes:
        requests: in the engine, by prompt, then by choice.
        reader: separates thinking and calls in the text from content.
    """

    head: ReplyHead
    tokenizer: Spells
    requests: Sequence[Request]
    reader: ReplyReader


class Progress:
    """Progress of the choices of a stream, and the usage that its events report.

    Args:
        body: of the request, which asks for usage or does not. `source`: of its reply.

    Attributes:
        at_end: whether a last event has the usage of all. `always`: whether every event has that of its choice.
    """

    def __init__(self, body: Generation, source: Source) -> None:
        asked, requests = body.counted, source.requests
        self.at_end = bool(asked.include_usage) or source.head.usual.always_usage
        self.always = self.at_end and (bool(asked.continuous_usage_stats) or source.head.usual.always_usage)
        self._prompts = [len(request.prompt_ids) for request in requests]
        self._silent = {"usage": None} if self.at_end else {}
        self.tokens: dict[int, int] = {}  # generated so far, by place of the choice

    def count(self, event: dict[str, Any], place: int, tokens: int) -> None:
        """Add the tokens of an event, and put usage into it where that is asked for."""
        self.tokens[place] = self.tokens.get(place, 0) + tokens
        event |= self.usage(place) if self.always else self._silent

    def usage(self, place: int) -> dict[str, Any]:
        """The usage of one choice so far, as vLLM has it in every chunk, or OpenAI's null where only the end has it."""
        if not self.always:
            return self._silent
        return {"usage": usage(self._prompts[place], self.tokens.get(place, 0))}


def parts(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """The last chunk of a choice as one with all that it says, and an empty one that ends the choice.

    Clients stop at the reason that a choice ended, and would miss text beside it.
    """
    nothing = replace(
        chunk, text="", token_ids=[], origins=[], rejected=[], logprobs=None, steps=None if chunk.steps is None else []
    )
    return replace(chunk, completion=None), nothing


def end(choice: dict[str, Any], completion: Completion | None, calls: Sequence[Any] = ()) -> dict[str, Any]:
    """Set why a choice ended, and vLLM's `stop_reason`: the stop string or token id that ended it.

    A reply with cut-off calls has the same reason as other cut-off text.
    """
    if completion is None:
        choice["finish_reason"] = None
    else:
        called = calls and completion.finish_reason == "stop"
        choice["finish_reason"] = "tool_calls" if called else completion.finish_reason
        choice["stop_reason"] = completion.stop_reason
    return choice
