"""The protocol of the writers of replies, which convert the engine's output to JSON, and their shared parts.

A writer is made for one request; it returns the events of a stream, or the whole reply at the end.
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
    """Writer of the reply to one request.

    Attributes:
        reading: function that returns the events about a prompt being read since its previous call; None for no events.
    """

    reading: Callable[[], list[Event]] | None = None

    def first(self) -> list[Event]:
        """Events before the first chunk."""
        ...

    def delta(self, chunk: Chunk) -> list[Event]:
        """Events of a chunk."""
        ...

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        """Events after the last chunk; `completions` are in the order of their ends."""
        ...

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """Whole reply to a request without a stream; `completions` are ordered by prompt and choice."""
        ...


class Usual(NamedTuple):
    """Defaults of replies for options that a request does not set.

    Attributes:
        always_usage: True if every chunk has usage, even if the request sets otherwise.
        numbers: True if tokens are reported by id.
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
        id: id of the reply.
        created: time of the reply, in Unix seconds.
        model: served name of the model.
        usual: defaults of the server for replies.
        keep: callback that receives a whole response, or None.
    """

    id: str
    created: int
    model: str
    usual: Usual = USUAL
    keep: Callable[[dict[str, Any]], None] | None = None

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Source(NamedTuple):
    """Data for a reply, in addition to the body of the request.

    Attributes:
        head: first fields of every object of the reply.
        tokenizer: converter of token ids to bytes.
        requests: engine requests, one for each choice of each prompt, ordered by prompt.
        reader: separates reasoning and calls in the text from content.
    """

    head: ReplyHead
    tokenizer: Spells
    requests: Sequence[Request]
    reader: ReplyReader


class Progress:
    """Progress of the choices of a stream, and the usage that its events report.

    Args:
        body: body of the request, with its options for usage.
        source: data for the reply.

    Attributes:
        at_end: True if a last event has the usage of all choices.
        always: True if every event has the usage of its choice.
        tokens: number of generated tokens so far, by place of the choice.
    """

    def __init__(self, body: Generation, source: Source) -> None:
        asked, requests = body.counted, source.requests
        self.at_end = bool(asked.include_usage) or source.head.usual.always_usage
        self.always = self.at_end and (bool(asked.continuous_usage_stats) or source.head.usual.always_usage)
        self._prompts = [len(request.prompt_ids) for request in requests]
        self._silent = {"usage": None} if self.at_end else {}
        self.tokens: dict[int, int] = {}

    def count(self, event: dict[str, Any], place: int, tokens: int) -> None:
        """Add the number of tokens of an event, and add the field `usage` to the event if its stream has one."""
        self.tokens[place] = self.tokens.get(place, 0) + tokens
        event |= self.usage(place) if self.always else self._silent

    def usage(self, place: int) -> dict[str, Any]:
        """Field `usage` of one choice so far: numbers, null if only the last event has numbers, or no field."""
        if not self.always:
            return self._silent
        return {"usage": usage(self._prompts[place], self.tokens.get(place, 0))}


def parts(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """Split the last chunk of a choice into one with its text and tokens, and an empty one with the finish reason.

    Clients stop reading at the finish reason, and would miss text in its chunk.
    """
    nothing = replace(
        chunk, text="", token_ids=[], origins=[], rejected=[], logprobs=None, steps=None if chunk.steps is None else []
    )
    return replace(chunk, completion=None), nothing


def end(choice: dict[str, Any], completion: Completion | None, calls: Sequence[Any] = ()) -> dict[str, Any]:
    """Set `finish_reason` of a choice, and vLLM's `stop_reason`: the stop string or token id that ended the choice.

    A reply whose calls are cut off has the finish reason "length", like other text.
    """
    if completion is None:
        choice["finish_reason"] = None
    else:
        called = calls and completion.finish_reason == "stop"
        choice["finish_reason"] = "tool_calls" if called else completion.finish_reason
        choice["stop_reason"] = completion.stop_reason
    return choice
