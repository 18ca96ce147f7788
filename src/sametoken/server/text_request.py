"""A request for text in one form for all APIs: every body makes it, `prompts` reads it."""

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

ROLES = {"developer": "system", "function": "tool"}  # by what templates call them
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of Qwen's templates, of newer ones, of gpt-oss
# Sampling parameters that go with a beam search; others would have to change the scores, which are those of the model.
SEARCHED = (
    "n", "max_tokens", "logprobs", "stop_token_ids", "ignore_eos", "seed", "cache_salt", "temperature", "top_p",
    "top_k", "min_p", "skip_special_tokens", "speculative", "include_stop_str_in_output",
)  # fmt: skip
Function = Mapping[str, Any]  # name, description and parameters (a JSON schema)


class Pieces(NamedTuple):
    """A prompt of texts and token ids, one after the other; only the first one may get a begin token."""

    parts: tuple[str | int, ...]


class Infill(NamedTuple):
    """A prompt for a gap in a text.

    Attributes:
        prefix, suffix: what stands before and after the gap. `begun`: the beginning of what fills it.
        files: other files, each with its name.
    """

    prefix: str
    suffix: str
    begun: str = ""
    files: tuple[tuple[str, str], ...] = ()


class Call(NamedTuple):
    """A call that the assistant made; `arguments` is an object, or JSON as text."""

    id: str
    name: str
    arguments: Any


@dataclass(slots=True)
class Turn:
    """One message of a conversation.

    Attributes:
        content: what is said, None where there is none. `thought`: what the assistant thought before it spoke.
        name: of the speaker. `tool_call_id`: the call that this answers.
    """

    role: str
    content: str | None = None
    thought: str | None = None
    calls: list[Call] = field(default_factory=list)
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: arguments as objects, thinking under every name that templates know it by."""
        content = "" if self.content is None and not self.calls else self.content
        said: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": content}
        said |= dict.fromkeys(THOUGHTS, self.thought)
        said |= {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.calls:
            said["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": _object(arguments)}}
                for id_, name, arguments in self.calls
            ]
        return {name: value for name, value in said.items() if value is not None}


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
        offered: functions that the model may call. `required`: those of which one must be called.
        several: whether a reply may make more than one call.
    """

    offered: Sequence[Function] = ()
    required: Sequence[Function] = ()
    several: bool = True

    @classmethod
    def of(cls, tools: Sequence[Function], choice: str | None, named: str | None, several: bool | None) -> ToolUse:
        """Return the tool use that the fields of a body define together.

        Args:
            choice: "auto", "none", "required", or None. `named`: the function that must be called, None for any.
            several: whether more than one call may be made, None where that was not said.

        Raises:
            RequestError: together the fields make no sense.
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
        options: variables of the template.
        begins: whether the prompt ends with the beginning of a reply.
        continues: whether the reply goes on with the last turn.
        shows_thinking: whether the thinking stands in the reply.
        most_thinking: tokens of it, None for as many as the model likes.
    """

    turns: Sequence[Turn]
    options: Mapping[str, Any] = field(default_factory=dict)
    begins: bool = True
    continues: bool = False
    tools: ToolUse = NO_TOOLS
    shows_thinking: bool = True
    most_thinking: int | None = None


class BeamSearch(NamedTuple):
    """Search for the likeliest outputs in place of a draw; `length_penalty` is the power of their length in a rank."""

    length_penalty: float

    @classmethod
    def of(cls, length_penalty: float | None, values: Mapping[str, Any], fields: Mapping[str, str]) -> BeamSearch:
        """The search of a request with `values` and `fields`, see `TextRequest`.

        Raises:
            RequestError: a parameter is set that no beam follows; names the first one.
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
        values: what it sets of `SamplingParams`, by the keys of `from_mapping`.
        fields: what the client calls each field that an error may name; "prompt" is what prompts are made from.
        prompts: texts or token ids; none where there is a conversation.
        special_tokens: whether tokens such as BOS are added to texts.
        keep: tokens of each prompt that are kept, the last ones or, with `keeps_first`, the first ones; None keeps all,
            -1 what fits the context beside the reply.
        id: the client's, a part of the reply's. `user`: who asks, for the log.
        biases: numbers that are added to the scores of tokens, by id, or by a text for all of its tokens.
        forbids_end: whether no token that ends a reply may be drawn.
        beams: search for the n likeliest outputs; None for draws.
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
        """The request with these biases."""
        return replace(self, biases=biases, forbids_end=forbids_end)

    def with_prompts(self, prompts: Sequence[Prompt | Pieces | Infill]) -> TextRequest:
        """The request with these prompts."""
        return replace(self, prompts=prompts)

    @property
    def sequences(self) -> int:
        """Sequences that the engine has to hold."""
        return max(1, len(self.prompts)) * int(self.values.get("n", 1))

    @property
    def work(self) -> SideWork | None:
        """Side work of unknown duration that the request needs: a grammar or a chat template; None if neither."""
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
    """A body that asks for text; to parse it makes the request too."""

    _request: TextRequest = PrivateAttr()

    @property
    def request(self) -> TextRequest:
        """Text request that the body defines."""
        return self._request
