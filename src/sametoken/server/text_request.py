"""The form of a text request that all APIs share: bodies make it, and `prompts` converts it to engine requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import PrivateAttr

from sametoken.engine.llm_requests import Prompt
from sametoken.errors import RequestError
from sametoken.options.sampling import SamplingParams
from sametoken.server.fields import Body
from sametoken.server.threads import SideWork

ROLES = {"developer": "system", "function": "tool"}  # roles in chat templates, for other names of them
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of Qwen's templates, of newer ones, of gpt-oss
# Sampling parameters that beam search supports; others change scores, but beams are ranked by the model's own scores.
SEARCHED = (
    "n", "max_tokens", "logprobs", "stop_token_ids", "ignore_eos", "seed", "cache_salt", "temperature", "top_p",
    "top_k", "min_p", "skip_special_tokens", "speculative", "include_stop_str_in_output",
)  # fmt: skip
Function = Mapping[str, Any]  # name, description and parameters (a JSON schema)


class Pieces(NamedTuple):
    """Prompt of texts and token ids in sequence; a begin token is added before the first part alone."""

    parts: tuple[str | int, ...]


class Infill(NamedTuple):
    """Prompt for a gap in a text.

    Attributes:
        prefix: text before the gap.
        suffix: text after the gap.
        begun: beginning of the text in the gap, which is given.
        files: name and text of other files.
    """

    prefix: str
    suffix: str
    begun: str = ""
    files: tuple[tuple[str, str], ...] = ()


class Call(NamedTuple):
    """Call that the assistant made; `arguments` is an object, or JSON as text."""

    id: str
    name: str
    arguments: Any


@dataclass(slots=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role: role in the conversation.
        content: text, or None.
        thought: the assistant's reasoning before the text, or None.
        calls: calls of the assistant.
        name: name of the speaker.
        tool_call_id: id of the call whose result this message is.
    """

    role: str
    content: str | None = None
    thought: str | None = None
    calls: list[Call] = field(default_factory=list)
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Message for chat templates: arguments as objects, and the reasoning under all names that templates use."""
        content = "" if self.content is None and not self.calls else self.content
        message: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": content}
        message |= dict.fromkeys(THOUGHTS, self.thought)
        message |= {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.calls:
            message["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": _object(arguments)}}
                for id_, name, arguments in self.calls
            ]
        return {name: value for name, value in message.items() if value is not None}


def _object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return arguments


class ToolUse(NamedTuple):
    """Functions that a reply may call.

    Attributes:
        offered: functions that the model may call.
        required: functions of which one must be called; empty if no call is required.
        several: True if a reply may have more than one call.
    """

    offered: Sequence[Function] = ()
    required: Sequence[Function] = ()
    several: bool = True

    @classmethod
    def of(cls, tools: Sequence[Function], choice: str | None, named: str | None, several: bool | None) -> ToolUse:
        """Return the tool use that the fields of a body define together.

        Args:
            tools: functions in the body.
            choice: "auto", "none", "required", or None.
            named: name of the function that must be called; None for any.
            several: True if more than one call is allowed; None for the default.

        Raises:
            RequestError: the fields contradict each other.
        """
        if not tools and (named is not None or choice not in (None, "none")):
            advice = "leave it out or give tools"
            raise RequestError("only for a request with tools", field="tool_choice", advice=advice)
        if named is not None:
            must = [each for each in tools if each["name"] == named]
            if not must:
                raise RequestError(f"got {named!r}, which is not among the tools", field="tool_choice")
            return cls(tools, must, several=False)
        offered = () if choice == "none" else tools
        return cls(offered, offered if choice == "required" else (), several is not False)


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTalk:
    """Input of a chat template.

    Attributes:
        turns: messages, the oldest first.
        options: variables of the template.
        begins: True if the prompt ends with the header of a reply.
        continues: True if the reply continues the last turn.
        tools: functions for the template and for the reply.
        shows_thinking: True if the reply has the reasoning.
        most_thinking: largest number of reasoning tokens; None for no limit.
    """

    turns: Sequence[Turn]
    options: Mapping[str, Any] = field(default_factory=dict)
    begins: bool = True
    continues: bool = False
    tools: ToolUse = NO_TOOLS
    shows_thinking: bool = True
    most_thinking: int | None = None


class BeamSearch(NamedTuple):
    """Options of beam search; `length_penalty` is the power of the output's length by which its score is divided."""

    length_penalty: float

    @classmethod
    def of(cls, length_penalty: float | None, values: Mapping[str, Any], fields: Mapping[str, str]) -> BeamSearch:
        """Beam search of a request with `values` and `fields`, see `TextRequest`.

        Raises:
            RequestError: a sampling parameter is set that beam search does not support.
        """
        usual = SamplingParams()
        for name, value in values.items():
            if name not in SEARCHED and value is not None and value != getattr(usual, name):
                advice = "leave one of them out"
                raise RequestError("excludes use_beam_search", field=fields.get(name, name), advice=advice)
        return cls(1.0 if length_penalty is None else length_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One request for text.

    Attributes:
        values: sampling parameters of the request, by the keys of `SamplingParams.from_mapping`.
        fields: names of the body's fields, by the names in the engine's errors; "prompt" is the field of the prompts.
        prompts: prompts; empty if there is a conversation.
        conversation: conversation to continue, or None.
        special_tokens: True if tokens such as BOS are added to texts.
        keep: number of tokens of each prompt to keep; None keeps all, -1 as many as fit the context with the reply.
        keeps_first: True if `keep` applies to the first tokens, False for the last ones.
        id: id from the client, a part of the reply's id.
        user: name of the user, for the log.
        biases: numbers that are added to logits, by token id, or by a text for all of its tokens.
        forbids_end: True if end tokens may not be drawn.
        beams: options of beam search; None for sampling.
    """

    values: Mapping[str, Any]
    fields: Mapping[str, str]
    prompts: Sequence[Prompt | Pieces | Infill] = ()
    conversation: ChatTalk | None = None
    special_tokens: bool = False
    keep: int | None = None
    keeps_first: bool = False
    id: str | None = None
    user: str | None = None
    biases: Mapping[int | str, float] = field(default_factory=dict)
    forbids_end: bool = False
    beams: BeamSearch | None = None

    def with_biases(self, biases: Mapping[int | str, float], *, forbids_end: bool) -> TextRequest:
        """Copy of the request with these biases."""
        return replace(self, biases=biases, forbids_end=forbids_end)

    def with_prompts(self, prompts: Sequence[Prompt | Pieces | Infill]) -> TextRequest:
        """Copy of the request with these prompts."""
        return replace(self, prompts=prompts)

    @property
    def sequences(self) -> int:
        """Number of sequences of the request in the engine."""
        return max(1, len(self.prompts)) * int(self.values.get("n", 1))

    @property
    def work(self) -> SideWork | None:
        """Kind of work of unknown duration that the request needs: a grammar or a chat template; None if neither."""
        talk, form = self.conversation, self.values.get("structured_outputs")
        if (form is not None and not form.get("json_object")) or (talk is not None and talk.tools.required):
            return SideWork.GRAMMAR
        return None if talk is None and form is None else SideWork.TEMPLATE

    def cut(self, ids: list[int], context: int) -> list[int]:
        """Tokens of a prompt to keep; `context` is the maximum number of tokens of prompt and reply together."""
        if self.keep is None:
            return ids
        reply = self.values["max_tokens"]
        keep = max(1, context - (reply or 1)) if self.keep == -1 else self.keep
        return ids[:keep] if self.keeps_first else ids[max(0, len(ids) - keep) :]


class TextBody(Body):
    """Base class of bodies for text; validation makes the text request too."""

    _request: TextRequest = PrivateAttr()

    @property
    def request(self) -> TextRequest:
        """Text request that the body defines."""
        return self._request
