"""Types of whole replies, for the OpenAPI document; the parts that they share are in `replies`.

Replies are made key by key without these classes; tests validate every reply with them, including unknown keys.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from sametoken.server.measured import RequestMetrics
from sametoken.server.replies import ChatLogprob, ChatLogprobs, SpeculationReport, TextLogprobs, Usage

FinishReason = Literal["stop", "length", "abort"]
PromptLogprobs = list[dict[str, "PromptLogprob"] | None]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(TypedDict):
    """One completion of a prompt; `stop_reason` is the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    speculative: NotRequired[SpeculationReport]


class CompletionReply(TypedDict):
    """The reply of POST /v1/completions; choices by prompt, then by number."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: NotRequired[RequestMetrics]


class CalledFunction(TypedDict):
    """Name and arguments of a called function; `arguments` is JSON text."""

    name: str
    arguments: str


class MadeCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: NotRequired[list[MadeCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None
    speculative: NotRequired[SpeculationReport]


class ChatReply(TypedDict):
    """The reply of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: NotRequired[RequestMetrics]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class BatchChatChoice(ChatChoice):
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class ChatBatchReply(TypedDict):
    """The reply of POST /v1/chat/completions/batch: choice i continues conversation i; `usage` is for all."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[BatchChatChoice]
    usage: Usage


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """Reasoning of the model, never summarised."""

    type: Literal["reasoning"]
    id: str
    status: Literal["completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    status: Literal["completed", "incomplete"]
    name: str
    arguments: str


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseFailure(TypedDict):
    """Reason for the failure of a response that was made in the background."""

    code: str
    message: str


class DeletedReply(TypedDict):
    """The reply of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class RawMessage(TypedDict):
    """Tokens of the prompt or of the reply, and their text with the marks between turns."""

    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[int]


class ResponsesReply(TypedDict):
    """The reply of POST /v1/responses, with the settings of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "queued", "in_progress", "cancelled", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    parallel_tool_calls: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    background: bool
    store: bool
    previous_response_id: str | None
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] | None
    top_logprobs: int | None
    user: str | None
    input_messages: NotRequired[list[RawMessage]]
    output_messages: NotRequired[list[RawMessage]]
    speculative: NotRequired[SpeculationReport]


class MessageText(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class MessageThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(TypedDict):
    """Numbers of tokens; `input_tokens` leaves out prompt tokens that were cached or are newly kept in the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessagesReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    speculative: NotRequired[SpeculationReport]


class CountReply(TypedDict):
    input_tokens: int


class TokenizeReply(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(TypedDict):
    prompt: str
    content: NotRequired[str]


class TokenizerInfoReply(TypedDict):
    """Sizes, the default chat template, and special tokens by role; further keys as in tokenizer_config.json."""

    vocab_size: int
    model_max_length: int
    chat_template: str | None


class EmbeddingItem(TypedDict):
    """Embedding of one text: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(TypedDict):
    object: Literal["list"]
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


class ModelReply(TypedDict):
    """A name of the model; `created` is the start of the server in Unix seconds, and `root` the model's path or Hub id
    on the command line. `parent` is null, because there are no adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelsReply(TypedDict):
    object: Literal["list"]
    data: list[ModelReply]


class StatusReply(TypedDict):
    status: Literal["ok", "stopping", "starting"]


class LoadReply(TypedDict):
    server_load: int


class VersionReply(TypedDict):
    version: str
    sametoken: str


class Offers(TypedDict):
    """Drafting methods and limits that requests can use."""

    method: str
    methods: list[str]
    max_draft_len: int
    max_seq_len: int
    chat: bool


class ServerInfoReply(TypedDict):
    """Resolved configuration, which has more keys than these, options of requests, and load."""

    model: str
    offers: Offers
    load: dict[str, float | str]
