"""Bodies of requests that hold conversations: messages, tools, and what /v1/chat/completions takes besides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from sametoken.options.json_types import Logprobs
from sametoken.options.sampling import SamplingParams
from sametoken.server.fields import NO_LIMIT, Body, Limit, Off, Spoken
from sametoken.server.inert import InertOfCall, InertOfFunction, InertOfMessage
from sametoken.server.reasoning import Splitter
from sametoken.server.schema import Generation
from sametoken.server.speech import Rendered, ReplyReader
from sametoken.server.tools import call_grammar

MOST_TOOLS = 128
EXCLUSIVE = "continue_final_message and add_generation_prompt exclude each other; set one of them"
# What the server tells templates itself.
_RENDERED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


def _own(options: dict[str, Any]) -> dict[str, Any]:
    if clash := _RENDERED & options.keys():
        raise ValueError(f"expected no {', '.join(sorted(clash))}, which the server sets")
    return options


TemplateOptions = Annotated[
    dict[str, Any],
    AfterValidator(_own),
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": sorted(_RENDERED)}}}),
]
ROLES = {"developer": "system", "function": "tool"}  # by what templates call them
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of Qwen's templates, of newer ones, of gpt-oss
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FunctionTitle = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionCall(InertOfFunction):
    """What was called."""

    name: str
    """of the function."""
    arguments: str
    """JSON as text."""


class ToolCall(InertOfCall):
    """A call that the assistant made earlier in the conversation."""

    id: str
    """which a message of role `tool` answers to."""
    type: Literal["function"] | None = "function"
    """always this."""
    function: FunctionCall
    """what was called."""


SAYS = ("content", "refusal", "reasoning_content", "reasoning", "tool_calls", "function_call")  # one of them is there
_SAYS_SOMETHING: JsonDict = {
    "anyOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in SAYS]
}
_ONE_TEXT: JsonDict = {
    "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("prompt", "messages")]
}


class ChatMessage(InertOfMessage):
    """One turn; what an earlier reply returned may be sent back as it came."""

    model_config = ConfigDict(json_schema_extra=_SAYS_SOMETHING)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """who speaks; `developer` is `system` to the template, `function` (OpenAI's older word) is `tool`."""
    content: Spoken | None = None
    """text, or parts of type `text`; null only where another field says something."""
    refusal: str | None = None
    """what the assistant said instead of `content`."""
    reasoning_content: str | None = None
    """what the assistant thought before it spoke, for templates that have a place for it."""
    reasoning: str | None = None
    """the same as vLLM calls it."""
    name: str | None = None
    """of the speaker, where the template has a place for it."""
    tool_calls: list[ToolCall] | None = None
    """what the assistant called."""
    function_call: FunctionCall | None = None
    """the same in OpenAI's older form, one call without an id."""
    tool_call_id: str | None = None
    """the call that a message of role `tool` answers."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if all(getattr(self, name) in (None, []) for name in SAYS):
            raise ValueError(f"a message of {self.role} has no content; expected text")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: arguments as objects, thinking under every name that templates know it by."""
        calls = [call.function for call in self.tool_calls or ()]
        ids = [call.id for call in self.tool_calls or ()]
        if self.function_call is not None and not calls:
            calls, ids = [self.function_call], [""]
        said: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": self.content}
        if said["content"] is None and not calls:
            said["content"] = self.refusal or ""
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        said |= dict.fromkeys(THOUGHTS, thought)
        said |= {"name": self.name, "tool_call_id": self.tool_call_id}
        if calls:
            said["tool_calls"] = [
                {
                    "id": id_,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _object(call.arguments)},
                }
                for id_, call in zip(ids, calls, strict=True)
            ]
        return {name: value for name, value in said.items() if value is not None}


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class Function(Body):
    """A function that the model may call."""

    name: FunctionTitle
    """letters, digits, `_`, `.` and `-`, at most 64."""
    description: str | None = None
    """what it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """nothing follows from it: a call that is asked for keeps its schema."""


class Tool(Body):
    """A function, in OpenAI's wrapping."""

    type: Literal["function"]
    """always this."""
    function: Function
    """the function."""


class FunctionName(Body):
    """One of the functions."""

    name: str
    """the one that must be called."""


class NamedTool(Body):
    """A function by name."""

    type: Literal["function"]
    """always this."""
    function: FunctionName
    """the function."""


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """the conversation so far, put as the model's chat template has it."""
    max_tokens: Limit | None = None
    """tokens to emit at most; left out, -1 or more, up to the end of the context."""
    max_completion_tokens: Limit | None = None
    """the same by its newer name."""
    logprobs: bool | None = None
    """have log-probabilities of the reply's tokens."""
    top_logprobs: Logprobs | None = None
    """alternatives per token; only for `logprobs`."""
    chat_template_kwargs: TemplateOptions | None = None
    """values for the chat template, such as `enable_thinking`."""
    reasoning_effort: Effort | None = None
    """for the chat template, which is told `enable_thinking` too: false for `none`, else true."""
    include_reasoning: bool | None = None
    """false leaves out of the reply what the model thought."""
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    """functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`auto` if left out; `none`; `required` keeps the reply to calls, a function by name to one of it."""
    parallel_tool_calls: bool | None = None
    """false keeps the reply to one call."""
    add_generation_prompt: bool | None = None
    """end the prompt with the beginning of the reply; true if left out, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """go on with the last message instead of answering it; the reply is what is added."""
    echo: Off | None = None
    """only false."""
    modalities: list[Literal["text"]] | None = None
    """only text."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs: true; leave it out or set both")
        most, older = self.max_completion_tokens, self.max_tokens
        if most is not None and older is not None and most != older:
            raise ValueError(f"max_completion_tokens {most} and max_tokens {older} differ; leave one of them out")
        if self.tools is None and (self.tool_choice not in (None, "none") or self.parallel_tool_calls is not None):
            raise ValueError("tool_choice and parallel_tool_calls are only for a request with tools")
        if isinstance(self.tool_choice, NamedTool) and not self.required:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.required and Generation.form(self) is not None:
            raise ValueError("a reply that must be a call has a form already; leave response_format out")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(EXCLUSIVE)
        return self

    @property
    def reply_tokens(self) -> int | None:
        """Tokens to emit at most; None is up to the end of the context."""
        tokens = self.max_completion_tokens or self.max_tokens
        return None if tokens == NO_LIMIT else tokens

    @property
    def offered(self) -> list[Function]:
        """The functions that the model is told of."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def required(self) -> list[Function]:
        """The functions of which one must be called."""
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in self.offered if function.name == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []

    @property
    def several(self) -> bool:
        """Whether a reply may make more than one call."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    def reader(self, opening: Callable[[], Splitter] | None) -> ReplyReader:
        """What reads the replies to this request; `opening` makes what tells thinking from the rest."""
        names = {function.name for function in self.offered}
        return ReplyReader(names, self.several, opening, self.include_reasoning is not False)

    def to_sampling(self, recommended: Mapping[str, Any], made: Rendered) -> SamplingParams:
        """The sampling parameters.

        Args:
            recommended: the model's values for what the request leaves out.
            made: the prompt of this request.
        """
        form = self.form()
        functions = [each.model_dump() for each in self.required]
        if functions:
            form = {"grammar": call_grammar(functions, made.tags_calls, self.several)}
        values = self.chosen(
            recommended,
            structured_outputs=None if form is None else {**form, **made.waits},
            skip_special_tokens=False if made.shows_marks else self.skip_special_tokens,
            max_tokens=self.reply_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
        return SamplingParams.from_mapping(values)


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt, or messages as /v1/chat/completions would render them."""

    model_config = ConfigDict(json_schema_extra=_ONE_TEXT)
    model: str | None = None
    """a name that `/v1/models` lists; left out, the one that is served."""
    prompt: str | None = None
    """text."""
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    """a conversation, instead of `prompt`."""
    add_special_tokens: bool | None = None
    """such as BOS; left out, true for a prompt and false for a conversation."""
    add_generation_prompt: bool | None = None
    """end a conversation with the beginning of the reply; true if left out, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """leave the last message open."""
    return_token_strs: bool = False
    """say the text of every token too."""
    chat_template_kwargs: TemplateOptions | None = None
    """values for the chat template."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(EXCLUSIVE)
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    """a name that `/v1/models` lists; left out, the one that is served."""
    tokens: list[Annotated[int, Field(ge=0)]]
    """ids."""
