"""The body of POST /v1/responses, OpenAI's newer form of a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, WithJsonSchema, model_validator

from sametoken.errors import RequestError
from sametoken.options.json_types import Logprobs
from sametoken.server.chat_schema import (
    MOST_TOOLS,
    Effort,
    FunctionName,
    FunctionTitle,
    TemplateOptions,
    effort_options,
)
from sametoken.server.fields import NO_LIMIT, Body, History, Limit, Spoken
from sametoken.server.schema import Generation
from sametoken.server.text_request import Call, ChatTalk, ToolUse, Turn

LOGPROBS = "message.output_text.logprobs"


class InputMessage(History):
    """One turn of a conversation; a message of an earlier response may be sent back unchanged."""

    type: Literal["message"] = "message"
    """may be left out."""
    role: Literal["system", "developer", "user", "assistant"]
    """role of the turn."""
    content: Spoken
    """text, or parts of type `input_text` or `output_text`."""

    def turn(self) -> Turn:
        return Turn(self.role, self.content)


class ReasoningPiece(History):
    """A piece of thinking."""

    type: Literal["reasoning_text", "summary_text"]
    """kind of the piece."""
    text: str
    """text of the reasoning."""


class InputReasoning(History):
    """Reasoning of an earlier response, for chat templates that accept reasoning."""

    type: Literal["reasoning"]
    """always this."""
    content: list[ReasoningPiece] | None = None
    """pieces of text."""
    summary: list[ReasoningPiece] | None = None
    """pieces of text, used if `content` is left out."""

    def turn(self) -> Turn:
        return Turn("assistant", thought="\n".join(piece.text for piece in self.content or self.summary or ()))


class InputCall(History):
    """A call that an earlier response made."""

    type: Literal["function_call"]
    """always this."""
    call_id: str
    """id that the output of the call refers to."""
    name: str
    """name of the function."""
    arguments: str
    """the arguments, as text in JSON."""

    def turn(self) -> Turn:
        return Turn("assistant", calls=[Call(self.call_id, self.name, self.arguments)])


class InputOutput(History):
    """Result of a function call."""

    type: Literal["function_call_output"]
    """always this."""
    call_id: str
    """id of the call."""
    output: Spoken
    """text."""

    def turn(self) -> Turn:
        return Turn("tool", self.output, tool_call_id=self.call_id)


def _joined(turns: Iterable[Turn]) -> list[Turn]:
    """Turns in which consecutive reasoning, text and calls of the assistant are joined to one message."""
    found: list[Turn] = []
    for turn in turns:
        before = found[-1] if found and found[-1].role == turn.role == "assistant" else None
        if before is not None and turn.calls:
            before.calls += turn.calls
        elif before is not None and before.content is None and not before.calls:  # `before` has reasoning alone
            before.content = turn.content
            before.thought = before.thought if turn.thought is None else turn.thought
        elif turn.thought != "":
            found.append(turn)
    return found


def _items(given: object) -> object:
    """Input as a list of items: a text becomes the user's message, and an item without a type is a message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list):
        return [{"type": "message", **item} if isinstance(item, dict) else item for item in given]
    raise ValueError("expected text or a list of items")


Item = Annotated[InputMessage | InputReasoning | InputCall | InputOutput, Field(discriminator="type")]
Items = Annotated[
    list[Item],
    Field(min_length=1),
    BeforeValidator(_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}),
]


def turns_of(output: list[dict[str, Any]]) -> list[Turn]:
    """Turns of the output items of a response."""
    items: list[Item] = TypeAdapter(Items).validate_python(output)
    return _joined(item.turn() for item in items)


class TextFormat(Body):
    """The grammar that the reply follows; unlike in `response_format`, its fields are not nested."""

    type: Literal["text", "json_object", "json_schema"]
    """kind of grammar."""
    name: str | None = None
    """for people; no effect."""
    description: str | None = None
    """for people; no effect."""
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)
    """the JSON schema; without it: any JSON."""
    strict: bool | None = None
    """no effect: the output always follows the schema."""

    def form(self) -> dict[str, Any] | None:
        """Grammar by the keys of `StructuredOutputs`; None for text without a grammar."""
        known = {"text": None, "json_object": {"json_object": True}, "json_schema": {"json": self.schema_ or {}}}
        return known[self.type]


class TextOptions(Body):
    """Format of the reply's text."""

    format: TextFormat | None = None
    """the grammar that the reply follows."""


class FlatTool(Body):
    """A function that the model may call; unlike in /v1/chat/completions, its fields are not nested."""

    type: Literal["function"]
    """always this."""
    name: FunctionTitle
    """name of the function: letters, digits, `_`, `.` and `-`, at most 64."""
    description: str | None = None
    """what the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """no effect: a required call always follows its schema."""


class Reasoning(Body):
    """Options of the model's reasoning."""

    effort: Effort | None = None
    """passed to the chat template, as `reasoning_effort` of /v1/chat/completions."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """no effect: reasoning is never summarised; an item of type `reasoning` has all of it."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """no effect: reasoning is never summarised; an item of type `reasoning` has all of it."""


class FlatNamedTool(FunctionName):
    """A function by name."""

    type: Literal["function"]
    """always this."""


class ResponsesRequest(Generation):
    """The body of POST /v1/responses."""

    input: Items
    """text of the user, or a list of items: messages, reasoning, calls and their outputs."""
    n: None = None
    """only null: /v1/responses does not have it."""
    prompt_logprobs: None = None
    """only null: /v1/responses does not have it."""
    stream_options: None = None
    """only null: /v1/responses does not have it."""
    response_format: None = None
    """only null: /v1/responses does not have it."""
    return_token_ids: None = None
    """only null: /v1/responses does not have it."""
    previous_response_id: str | None = None
    """id of an earlier response, whose conversation `input` continues; its instructions are not taken over."""
    conversation: None = None
    """only null: send the id of the previous response as `previous_response_id`."""
    store: bool | None = None
    """false: the response is not kept, so that nothing can refer to it."""
    reasoning: Reasoning | None = None
    """options of the model's reasoning."""
    chat_template_kwargs: TemplateOptions | None = None
    """values for the chat template, such as `enable_thinking`."""
    instructions: str | None = None
    """system text before the input."""
    max_output_tokens: Limit | None = None
    """number of tokens to generate at most; without it: as many as the context holds."""
    text: TextOptions | None = None
    """the grammar that the reply follows."""
    tools: Annotated[list[FlatTool], Field(max_length=MOST_TOOLS)] | None = None
    """functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    """`auto`: the model decides (the default); `none`: no call; `required`: the reply is one or more calls; a function
    by name: the reply is one call of it."""
    parallel_tool_calls: bool | None = None
    """false allows one call only."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """additions to the reply: log-probabilities of its tokens. `reasoning.encrypted_content` has no effect: items of
    type `reasoning` have their text, and may be sent back unchanged."""
    top_logprobs: Logprobs | None = None
    """number of alternatives that are reported per token."""
    truncation: Literal["disabled"] | None = None
    """only `disabled`: an input that is longer than the context is an error."""
    enable_response_messages: bool | None = None
    """add `input_messages` and `output_messages`: prompt and reply as raw text and token ids."""
    background: bool | None = None
    """reply at once with the status `queued`; GET /v1/responses/ID returns the current state. Not with `stream`."""

    @model_validator(mode="after")
    def _kept(self) -> Self:
        if self.background and self.store is False:
            words = "background can only be used when `store` is true"
            raise RequestError(words, field="background", advice="leave one of them out")
        if self.background and self.stream:
            raise RequestError("excludes stream", field="background", advice="leave one of them out")
        return self

    @property
    def scored(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def forms(self) -> dict[str, Any]:
        asked = self.text.format if self.text is not None else None
        return super().forms | ({} if asked is None else {"text.format": asked.form()})

    @property
    def own(self) -> dict[str, Any]:
        return {
            "max_tokens": None if self.max_output_tokens == NO_LIMIT else self.max_output_tokens,
            "logprobs": (self.top_logprobs or 0) if self.scored else None,
        }

    @property
    def renamed(self) -> dict[str, str]:
        return {"prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}

    @property
    def talk(self) -> ChatTalk:
        turns = _joined(item.turn() for item in self.input)
        if self.instructions is not None:
            turns.insert(0, Turn("system", self.instructions))
        if not turns:
            raise RequestError("has no text", field="input", advice="give a message")
        named = self.tool_choice.name if isinstance(self.tool_choice, FlatNamedTool) else None
        choice = None if isinstance(self.tool_choice, FlatNamedTool) else self.tool_choice
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools or ()]
        if not functions and choice == "auto":
            choice = None
        options = effort_options(self.reasoning.effort if self.reasoning is not None else None)
        return ChatTalk(
            turns=turns,
            options=options | (self.chat_template_kwargs or {}),
            tools=ToolUse.of(functions, choice, named, self.parallel_tool_calls),
        )
