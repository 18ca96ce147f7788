"""Bodies of POST /v1/messages, Anthropic's form of a conversation, and of POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from sametoken.errors import RequestError
from sametoken.options.json_types import Stops
from sametoken.options.sampling import SamplingParams
from sametoken.server.chat_schema import MOST_TOOLS, Effort, FunctionTitle, TemplateOptions, effort_options
from sametoken.server.fields import Body, History, view
from sametoken.server.schema import Speculative, sampling_values
from sametoken.server.text_request import Call, ChatTalk, TextBody, TextRequest, ToolUse, Turn

ROLES_OF_BLOCKS = {
    "text": ("user", "assistant"),
    "thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
}  # roles whose turns may have a block, by its type
UNREADABLE = ("image", "document", "search_result", "server_tool_use", "web_search_tool_result")


class ContentBlock(History):
    """Fields of every content block."""

    cache_control: dict[str, Any] | None = None
    """no effect: the prefix cache finds a prompt by its tokens."""


class TextBlock(ContentBlock):
    """A piece of text."""

    type: Literal["text"]
    """always this."""
    text: str
    """the text."""
    citations: list[Any] | None = None
    """citations of an earlier reply; the model reads the text alone."""


class ThinkingBlock(ContentBlock):
    """Thinking of the assistant before its text, for chat templates that accept thinking."""

    type: Literal["thinking"]
    """always this."""
    thinking: str
    """the text."""
    signature: str | None = None
    """no effect."""


class ToolUseBlock(ContentBlock):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    """always this."""
    id: str
    """id that the result of the call refers to."""
    name: str
    """name of the tool."""
    input: dict[str, Any]
    """the arguments."""
    caller: dict[str, Any] | None = None
    """caller in an earlier reply; no effect: the model makes all calls."""


def _spoken(given: object) -> object:
    """Content as a list of blocks; blocks of images and documents are refused by their type."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    for block in given if isinstance(given, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in UNREADABLE:
            raise ValueError(f"blocks of type {kind!r} are not supported; expected text, tool_use or tool_result")
    return given


Texts = Annotated[list[TextBlock], BeforeValidator(_spoken, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(ContentBlock):
    """Result of a tool call."""

    type: Literal["tool_result"]
    """always this."""
    tool_use_id: str
    """id of the call."""
    content: Texts | None = None
    """text or blocks of text."""
    is_error: bool | None = None
    """no effect; describe the error in the content."""


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
Blocks = Annotated[list[AnyBlock], BeforeValidator(_spoken, json_schema_input_type=str | list[AnyBlock])]


class ConversationMessage(History):
    """One turn of a conversation; the content of an earlier reply may be sent back unchanged."""

    role: Literal["user", "assistant"]
    """role of the turn."""
    content: Blocks
    """text or blocks."""

    @model_validator(mode="after")
    def _has_blocks_of_role(self) -> Self:
        if wrong := [block.type for block in self.content if self.role not in ROLES_OF_BLOCKS[block.type]]:
            raise ValueError(f"a turn of the {self.role} has no blocks of type {wrong[0]!r}; leave it out")
        return self

    def turns(self) -> Iterator[Turn]:
        """Turns of this message in the form that all APIs share: results of calls first, then text and new calls."""
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield Turn("tool", _text(block.content or ()), tool_call_id=block.tool_use_id)
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        thought = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [Call(block.id, block.name, block.input) for block in self.content if isinstance(block, ToolUseBlock)]
        if texts or thought or calls:
            yield Turn(self.role, _text(texts) if texts else None, "\n".join(thought) if thought else None, calls)


def _text(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


class ToolDefinition(ContentBlock):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    """`custom` (the default); tools that a server runs are not supported."""
    name: FunctionTitle
    """name of the tool: letters, digits, `_`, `.` and `-`, at most 64."""
    description: str | None = None
    """description of the tool, for the model."""
    input_schema: dict[str, Any]
    """JSON schema of its input."""
    strict: bool | None = None
    """no effect: a required call always follows its schema."""
    eager_input_streaming: bool | None = None
    """no effect: input is always streamed as it is generated."""

    def function(self) -> dict[str, Any]:
        """Function of this tool in the form that all APIs share."""
        fields = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {key: value for key, value in fields.items() if value is not None}


class ToolChoice(Body):
    """Mode of tool calls: optional, required, or none."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto`: the model decides; `any`: the reply is one or more calls; `tool`: the reply is one call of `name`;
    `none`: no call."""
    name: str | None = None
    """for type `tool`: name of the tool."""
    disable_parallel_tool_use: bool | None = None
    """true allows one call only."""


class Thinking(Body):
    """Thinking of the model before its reply, for chat templates that have a switch."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`enabled` and `adaptive` turn thinking on, `disabled` turns it off."""
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    """no effect; `max_tokens` limits thinking and reply together."""
    display: str | None = None
    """no effect: thinking is always part of the reply."""


class OutputFormat(Body):
    """Format of the reply's text."""

    type: Literal["json_schema"]
    """always this."""
    schema_: dict[str, Any] = Field(alias="schema")
    """the JSON schema that the text follows."""


class OutputConfig(Body):
    """Effort and format of the reply."""

    effort: Effort | None = None
    """passed to the chat template, as `reasoning_effort` of /v1/chat/completions."""
    format: OutputFormat | None = None
    """format of the text; a required call has the schema of its tool instead."""


class Metadata(Body):
    """The caller."""

    user_id: str | None = None
    """no effect."""


class CountRequest(TextBody):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    """a name that `/v1/models` lists; without it: the model that is served."""
    messages: Annotated[list[ConversationMessage], Field(min_length=1)]
    """the conversation; the reply continues a last turn of the assistant."""
    system: Texts | None = None
    """text or blocks of text, before the conversation."""
    tools: Annotated[list[ToolDefinition], Field(max_length=MOST_TOOLS)] | None = None
    """tools that the model may call."""
    tool_choice: ToolChoice | None = None
    """mode of tool calls; without it: `auto`."""
    thinking: Thinking | None = None
    """switch for thinking before the reply."""
    output_config: OutputConfig | None = None
    """effort and format of the reply."""
    chat_template_kwargs: TemplateOptions | None = None
    """values for the chat template."""

    @model_validator(mode="after")
    def _ask(self) -> Self:
        """Make the text request that the body defines."""
        if any(isinstance(block, ToolUseBlock) for block in self.messages[-1].content):
            words = "the last turn calls a tool"
            raise RequestError(words, field="messages", advice="send its tool_result in a turn of the user")
        turns = [turn for message in self.messages for turn in message.turns()]
        if self.system:
            turns.insert(0, Turn("system", _text(self.system)))
        if not turns:
            raise RequestError("has no content", field="messages", advice="give a turn with text")
        continues = turns[-1].role == "assistant"
        effort = None if self.output_config is None else self.output_config.effort
        options = effort_options(effort) | (self.chat_template_kwargs or {})
        if self.thinking is not None:
            options.setdefault("enable_thinking", self.thinking.type != "disabled")
        talk = ChatTalk(turns=turns, options=options, begins=not continues, continues=continues, tools=self._tool_use())
        fields = {name: name for name in type(self).model_fields}
        form = None if talk.tools.required or self.output_config is None else self.output_config.format
        fields |= {"prompt": "messages", "stop": "stop_sequences"}
        fields["structured_outputs"] = "tools" if form is None else "output_config.format"
        values = self._values(None if form is None else {"json": form.schema_})
        self._request = TextRequest(values=values, fields=fields, conversation=talk)
        return self

    def _tool_use(self) -> ToolUse:
        functions, choice = [tool.function() for tool in self.tools or ()], self.tool_choice
        if choice is None or not functions:
            if choice is not None and (choice.type in ("any", "tool") or choice.disable_parallel_tool_use):
                raise RequestError("only for a request with tools", field="tool_choice", advice="leave it out")
            return ToolUse(functions)
        kind = {"any": "required", "tool": None}.get(choice.type, choice.type)
        named = (choice.name or "") if choice.type == "tool" else None
        return ToolUse.of(functions, kind, named, False if choice.disable_parallel_tool_use else None)

    def _values(self, form: dict[str, Any] | None) -> dict[str, Any]:
        """Sampling parameters that the body sets; `form` is the grammar of the reply."""
        return {}


Sampled: Any = view("MessagesSampled", SamplingParams, "temperature", "top_p", "top_k", "seed")


class MessagesRequest(CountRequest, Sampled):  # type: ignore[misc]
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    """number of tokens to generate, at most; the context is a further limit."""
    metadata: Metadata | None = None
    """data about the caller, without effect."""
    stop_sequences: Stops = None
    """texts that end the reply."""
    stream: bool | None = None
    """send the reply as server-sent events."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """no effect: there is one tier."""
    speculative: Speculative | None = None
    """drafting of this request, which changes no token."""
    container: None = None
    """only null: there are no containers."""
    inference_geo: None = None
    """only null: there is one place of inference."""

    def _values(self, form: dict[str, Any] | None) -> dict[str, Any]:
        return sampling_values(self, stop=self.stop_sequences, structured_outputs=form)
