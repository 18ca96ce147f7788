"""Request bodies with conversations: messages, tools, and the other fields of /v1/chat/completions and /tokenize."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from sametoken.errors import RequestError
from sametoken.options.json_types import Text
from sametoken.server.fields import NO_LIMIT, Alternatives, Body, History, Limit, Spoken
from sametoken.server.schema import Generation
from sametoken.server.text_request import Call, ChatTalk, ToolUse, Turn

MOST_TOOLS = 128
# Variables of chat templates that the server itself sets.
_RENDERED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
Documents = list[dict[str, Any]]


def _own(options: dict[str, Any]) -> dict[str, Any]:
    if clash := _RENDERED & options.keys():
        raise ValueError(f"expected no {', '.join(sorted(clash))}, which the server sets")
    return options


TemplateOptions = Annotated[
    dict[str, Any],
    AfterValidator(_own),
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": sorted(_RENDERED)}}}),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FunctionTitle = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionCall(History):
    """Name and arguments of a called function."""

    name: str
    """name of the function."""
    arguments: str
    """the arguments, as text in JSON."""


class ToolCall(History):
    """A call that the assistant made earlier in the conversation."""

    id: str
    """id that the answer, a message of role `tool`, refers to."""
    type: Literal["function"] | None = "function"
    """always this."""
    function: FunctionCall
    """name and arguments of the function."""


# Fields with the content of a message, of which at least one is required in other roles than the assistant's.
CONTENT_FIELDS = ("content", "refusal", "reasoning_content", "reasoning", "tool_calls", "function_call")
_ANY_CONTENT: JsonDict = {
    "if": {"not": {"properties": {"role": {"const": "assistant"}}}},
    "then": {
        "anyOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in CONTENT_FIELDS]
    },
}
_ONE_TEXT: JsonDict = {
    "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("prompt", "messages")]
}


class ChatMessage(History):
    """One turn of a conversation; a message of an earlier reply may be sent back unchanged, with further fields."""

    model_config = ConfigDict(json_schema_extra=_ANY_CONTENT)
    role: Text
    """role of the turn, one that the chat template supports. The template receives `developer` as `system`, and
    `function` (OpenAI's older name) as `tool`."""
    content: Spoken | None = None
    """text, or parts of type `text`; null only if another field has content, or in the assistant's empty reply."""
    refusal: str | None = None
    """text of the assistant's refusal, instead of `content`."""
    reasoning_content: str | None = None
    """the assistant's reasoning before its answer, for templates that have a place for it."""
    reasoning: str | None = None
    """the same under vLLM's name."""
    name: str | None = None
    """name of the speaker, for templates that have a place for it."""
    tool_calls: list[ToolCall] | None = None
    """the assistant's calls."""
    function_call: FunctionCall | None = None
    """the same in OpenAI's older form, one call without an id."""
    tool_call_id: str | None = None
    """for role `tool`: id of the call that this message answers."""

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.role != "assistant" and all(getattr(self, name) in (None, []) for name in CONTENT_FIELDS):
            raise ValueError(f"a message of {self.role} has no content; expected text")
        return self

    def turn(self) -> Turn:
        """Turn of this message, in the form that all APIs share."""
        calls = [Call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        if self.function_call is not None and not calls:
            calls = [Call("", self.function_call.name, self.function_call.arguments)]
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        content = self.refusal or "" if self.content is None and not calls else self.content
        return Turn(self.role, content, thought, calls, self.name, self.tool_call_id)


def conversation(body: ChatRequest | TokenizeRequest, options: dict[str, Any], **more: Any) -> ChatTalk:
    """Conversation of a body.

    Args:
        options: variables of the chat template, to which those of the body are added.
        more: further fields of `ChatTalk`.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError("excludes add_generation_prompt", field="continue_final_message", advice="set one of them")
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    turns = [message.turn() for message in body.messages or ()]
    options |= body.chat_template_kwargs or {}
    options |= {} if body.documents is None else {"documents": body.documents}
    options |= {} if body.chat_template is None else {"chat_template": body.chat_template}
    return ChatTalk(turns=turns, options=options, begins=begins, continues=continues, **more)


class Function(Body):
    """A function that the model may call."""

    name: FunctionTitle
    """name of the function: letters, digits, `_`, `.` and `-`, at most 64."""
    description: str | None = None
    """what the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """no effect: a required call always follows its schema."""


class Tool(Body):
    """A function, in OpenAI's wrapping."""

    type: Literal["function"]
    """always this."""
    function: Function
    """the function."""


class FunctionName(Body):
    """One of the functions."""

    name: str
    """name of the function that must be called."""


class NamedTool(Body):
    """A function by name."""

    type: Literal["function"]
    """always this."""
    function: FunctionName
    """the function."""


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """the conversation so far; the model's chat template turns it into a prompt."""
    max_tokens: Limit | None = None
    """number of tokens to generate at most; without it, or -1: as many as the context holds."""
    max_completion_tokens: Limit | None = None
    """the same under OpenAI's newer name."""
    logprobs: bool | None = None
    """report log-probabilities of the reply's tokens."""
    top_logprobs: Alternatives | None = None
    """number of alternatives that are reported per token, -1 for the whole vocabulary; only with `logprobs`."""
    chat_template_kwargs: TemplateOptions | None = None
    """values for the chat template, such as `enable_thinking`."""
    chat_template: Text | None = None
    """a chat template in the place of the model's; only where the server has --trust-request-chat-template."""
    documents: Documents | None = None
    """texts for templates that have a place for them."""
    reasoning_effort: Effort | None = None
    """passed to the chat template, with `enable_thinking`: false for `none`, else true."""
    include_reasoning: bool | None = None
    """false leaves the model's reasoning out of the reply."""
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """number of reasoning tokens, at most; then the mark that ends the reasoning is inserted. -1, or a model that does
    not mark its reasoning: no limit."""
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)] | None = None
    """functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`auto`: the model decides (the default); `none`: no call; `required`: the reply is one or more calls; a function
    by name: the reply is one call of it."""
    parallel_tool_calls: bool | None = None
    """false allows one call only."""
    add_generation_prompt: bool | None = None
    """end the prompt with the header of a reply; without it: true, unless `continue_final_message` is true."""
    continue_final_message: bool | None = None
    """continue the last message instead of answering it; the reply has what the model adds."""
    echo: bool | None = None
    """begin the reply with the text of the last message, if that is the assistant's."""
    modalities: list[Literal["text"]] | None = None
    """only text."""

    @property
    def echoed(self) -> str:
        """Text at the beginning of the reply: the last assistant message if `echo` is set, else ""."""
        last = self.messages[-1]
        return last.content or "" if self.echo and last.role == "assistant" else ""

    @property
    def own(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("only for logprobs: true", field="top_logprobs", advice="leave it out or set both")
        most, older = self.max_completion_tokens, self.max_tokens
        if most is not None and older is not None and most != older:
            words = f"got {most}, which differs from max_tokens {older}"
            raise RequestError(words, field="max_completion_tokens", advice="leave one of them out")
        tokens = most or older
        return {
            "max_tokens": None if tokens == NO_LIMIT else tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    @property
    def renamed(self) -> dict[str, str]:
        limit = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"prompt": "messages", "logprobs": "top_logprobs", **limit}

    @property
    def talk(self) -> ChatTalk:
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        choice = None if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools or ()]
        tools = ToolUse.of(functions, choice, named, self.parallel_tool_calls)
        options, shows = effort_options(self.reasoning_effort), self.include_reasoning is not False
        most = None if self.thinking_token_budget == NO_LIMIT else self.thinking_token_budget
        return conversation(self, options, tools=tools, shows_thinking=shows, most_thinking=most)


def effort_options(effort: str | None) -> dict[str, Any]:
    """Variables of a chat template for a reasoning effort; none if no effort is given."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt, or messages as /v1/chat/completions would render them."""

    model_config = ConfigDict(json_schema_extra=_ONE_TEXT)
    model: str | None = None
    """a name that `/v1/models` lists; without it: the model that is served."""
    prompt: str | None = None
    """text."""
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    """a conversation, instead of `prompt`."""
    add_special_tokens: bool | None = None
    """add special tokens such as BOS; without it: true for a prompt and false for a conversation."""
    add_generation_prompt: bool | None = None
    """end a conversation with the header of a reply; without it: true, unless `continue_final_message` is true."""
    continue_final_message: bool | None = None
    """leave the last message open."""
    return_token_strs: bool = False
    """return the text of every token too."""
    chat_template_kwargs: TemplateOptions | None = None
    """values for the chat template."""
    chat_template: Text | None = None
    """a chat template in the place of the model's; only where the server has --trust-request-chat-template."""
    documents: Documents | None = None
    """texts for templates that have a place for them."""
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    """functions that the model may call, for the chat template."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        assert self.talk
        return self

    @property
    def talk(self) -> ChatTalk:
        """Conversation of `messages`; without turns if the body has a prompt."""
        tools = ToolUse([tool.function.model_dump(exclude_none=True) for tool in self.tools or ()])
        return conversation(self, {}, tools=tools)


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    """a name that `/v1/models` lists; without it: the model that is served."""
    tokens: list[Annotated[int, Field(ge=0)]]
    """ids."""
