"""The body of POST /v1/messages, Anthropic's form of a conversation, and of POST /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from sametoken.server.chat_schema import MOST_TOOLS, ChatRequest, FunctionTitle, TemplateOptions
from sametoken.server.fields import Body, Stops
from sametoken.server.schema import Speculative

Turn = dict[str, Any]  # as a message of /v1/chat/completions
SPEAKERS = {
    "text": ("user", "assistant"),
    "thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
}  # whose turns have which blocks
UNREADABLE = ("image", "document", "search_result", "server_tool_use", "web_search_tool_result")


class Block(Body):
    """What every block has.

    Attributes:
        cache_control: nothing follows from it: the prefix cache finds a prompt by its tokens.
    """

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """A piece of text.

    Attributes:
        type: always this.
        text: the text.
        citations: of an earlier reply; text is all that the model reads.
    """

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(Block):
    """What the assistant thought before it spoke, for templates that have a place for it.

    Attributes:
        type: always this.
        thinking: the text.
        signature: nothing follows from it.
    """

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """A call that the assistant made.

    Attributes:
        type: always this.
        id: which its result answers to.
        name: of the tool.
        input: the arguments.
        caller: of an earlier reply; the model itself calls.
    """

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def _spoken(given: object) -> object:
    """Text, or blocks of text, as blocks that can be read; images and documents are refused by name."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    for block in given if isinstance(given, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in UNREADABLE:
            raise ValueError(f"blocks of type {kind!r} are not supported; expected text, tool_use or tool_result")
    return given


Texts = Annotated[list[TextBlock], BeforeValidator(_spoken, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Block):
    """What a call returned.

    Attributes:
        type: always this.
        tool_use_id: the call.
        content: text or blocks of text.
        is_error: nothing follows from it; say it in the content.
    """

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
Blocks = Annotated[list[AnyBlock], BeforeValidator(_spoken, json_schema_input_type=str | list[AnyBlock])]


class Message(Body):
    """One turn; content that an earlier reply returned may be sent back as it came.

    Attributes:
        role: who speaks.
        content: text or blocks.
    """

    role: Literal["user", "assistant"]
    content: Blocks

    @model_validator(mode="after")
    def _speaks_for_itself(self) -> Self:
        if wrong := [block.type for block in self.content if self.role not in SPEAKERS[block.type]]:
            raise ValueError(f"a turn of the {self.role} has no blocks of type {wrong[0]!r}; leave it out")
        return self

    def turns(self) -> Iterator[Turn]:
        """The same for /v1/chat/completions: results of calls first, then what is said."""
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or ())}
        said: Turn = {"role": self.role}
        if texts := [block for block in self.content if isinstance(block, TextBlock)]:
            said["content"] = _text(texts)
        if thought := [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]:
            said["reasoning_content"] = "\n".join(thought)
        if calls := [_call(block) for block in self.content if isinstance(block, ToolUseBlock)]:
            said["tool_calls"] = calls
        if len(said) > 1:
            yield said


def _text(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


class Tool(Block):
    """A tool that the model may call.

    Attributes:
        type: `custom` if left out; tools that a server runs are not offered.
        name: letters, digits, `_`, `.` and `-`, at most 64.
        description: what it does, for the model.
        input_schema: JSON schema of its input.
        strict: nothing follows from it: a call that is asked for keeps its schema.
        eager_input_streaming: nothing follows from it: input is always streamed as it is written.
    """

    type: Literal["custom"] | None = None
    name: FunctionTitle
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None

    def nested(self) -> dict[str, Any]:
        """As /v1/chat/completions has it."""
        said = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


class ToolChoice(Body):
    """Whether tools are called.

    Attributes:
        type: `auto`; `any` keeps the reply to calls, `tool` to one of `name`; `none`.
        name: of the tool, for type `tool`.
        disable_parallel_tool_use: one call at most.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def forces(self) -> bool:
        return self.type in ("any", "tool")

    def chosen(self) -> Any:
        """As /v1/chat/completions has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(Body):
    """Whether the model thinks before it speaks, for chat templates that have a switch.

    Attributes:
        type: `enabled` and `adaptive` let it think, `disabled` does not.
        budget_tokens: no budget is kept; `max_tokens` bounds thinking and reply together.
        display: nothing follows from it: thinking is shown.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Metadata(Body):
    """Who asks.

    Attributes:
        user_id: changes no token.
    """

    user_id: str | None = None


class CountRequest(Body):
    """The body of POST /v1/messages/count_tokens.

    Attributes:
        model: a name that `/v1/models` lists; left out, the one that is served.
        messages: the conversation; where the last turn is the assistant's, the reply goes on with it.
        system: text or blocks of text, before the conversation.
        tools: that the model may call.
        tool_choice: `auto` if left out.
        thinking: whether the model thinks before it speaks.
        chat_template_kwargs: values for the chat template.
    """

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _can_go_on(self) -> Self:
        if any(isinstance(block, ToolUseBlock) for block in self.messages[-1].content):
            raise ValueError("messages: the last turn calls a tool; send its tool_result in a turn of the user")
        return self

    def to_chat(self) -> ChatRequest:
        """The same request to /v1/chat/completions.

        Raises:
            pydantic.ValidationError: together the fields make no sense.
        """
        turns = [turn for message in self.messages for turn in message.turns()]
        if self.system:
            turns.insert(0, {"role": "system", "content": _text(self.system)})
        choice = self.tool_choice
        goes_on = bool(turns) and turns[-1]["role"] == "assistant"
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            options.setdefault("enable_thinking", self.thinking.type != "disabled")
        given = {
            "messages": turns,
            "chat_template_kwargs": options or None,
            "tools": [tool.nested() for tool in self.tools] if self.tools else None,
            "tool_choice": choice.chosen() if choice is not None and (self.tools or choice.forces) else None,
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "continue_final_message": goes_on,
            "add_generation_prompt": not goes_on,
            **self._sampling(),
        }
        return ChatRequest.model_validate({key: value for key, value in given.items() if value is not None})

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages.

    Attributes:
        max_tokens: tokens to emit at most, within the context.
        metadata: who asks.
        stop_sequences: texts that end the reply.
        stream: answer with events as tokens come.
        temperature, top_p, top_k: as for /v1/chat/completions.
        seed: as for /v1/chat/completions; Anthropic has none.
        service_tier: there is one tier.
        speculative: how this request is drafted; it changes no token.
        container, inference_geo: only null; there is one place.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    metadata: Metadata | None = None
    stop_sequences: Stops = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speculative: Speculative | None = None
    container: None = None
    inference_geo: None = None

    def _sampling(self) -> dict[str, Any]:
        same = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "speculative"})
        return {**same, "stop": self.stop_sequences}
