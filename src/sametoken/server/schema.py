"""Bodies of requests: OpenAI's fields for text, vLLM's common extras, and ours (`speculative`, `prediction`).

Nothing is ignored silently: what changes nothing is listed in `inert`; a field that is unknown or cannot be honoured is
refused by name. Ranges of sampling parameters are checked by `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from sametoken.server.fields import (
    NO_LIMIT,
    Biases,
    Body,
    Forms,
    Logprobs,
    Off,
    Prompts,
    Schema,
    Spoken,
    Stops,
    TokenIds,
    Words,
)
from sametoken.server.inert import Inert
from sametoken.speculation.params import SamplingParams

MOST_CHOICES = 128
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StreamOptions(Body):
    """What a stream says besides text.

    Attributes:
        include_usage: end with a chunk that has `usage` and no choices.
        continuous_usage_stats: have `usage` in every chunk.
        include_obfuscation: only false; chunks are not padded.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Off = False


class Speculative(Body):
    """How this request is drafted, which changes its speed and never a token.

    Attributes:
        enabled: false decodes without drafts.
        method: a drafter of this server (`/server_info` lists them), `auto` for all of them, chosen every step, or
            `none`; left out, the server's own.
        max_draft_len: longest guess in tokens, at most the server's; left out, the server's.
        adaptive: true lets the engine choose each step's length, 0 included; false always drafts `max_draft_len`; left
            out, the server's.
        report: add `speculative` to every choice, and to every chunk of a stream.
    """

    enabled: bool = True
    method: str | None = None
    max_draft_len: Annotated[int, Field(ge=0)] | None = None
    adaptive: bool | None = None
    report: bool = False


class Prediction(Body):
    """OpenAI's Predicted Outputs: the reply that is expected, which is drafted from.

    Attributes:
        type: always this.
        content: the text, for example the file that is to be edited.
    """

    type: Literal["content"]
    content: Spoken


class JsonSchema(Body):
    """A schema as OpenAI words it.

    Attributes:
        name, description: for people.
        schema_: the JSON schema; left out, any JSON.
        strict: nothing follows from it: a form is always kept.
    """

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


_DETAILS = ("json_schema", "regex", "grammar")


def _own_detail(kind: str) -> JsonDict:
    """A type goes with the detail of its name and no other."""
    absent: JsonDict = {"type": "null"}
    details: JsonDict = {name: {"not": absent} if name == kind else absent for name in _DETAILS}
    return {"required": [kind], "properties": {"type": {"const": kind}, **details}}


_BARE: JsonDict = {"type": {"enum": ["text", "json_object"]}, **{name: {"type": "null"} for name in _DETAILS}}
_OWN_DETAIL: JsonDict = {"oneOf": [{"properties": _BARE}, *map(_own_detail, _DETAILS)]}


class ResponseFormat(Body):
    """The form of the reply: OpenAI's three types, and two of ours.

    Attributes:
        type: which form; `regex` and `grammar` are not OpenAI's.
        json_schema: of type `json_schema`.
        regex: of type `regex`: what the whole reply matches.
        grammar: of type `grammar`: a context-free one in Lark's notation.
    """

    model_config = ConfigDict(json_schema_extra=_OWN_DETAIL)
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _own(self) -> Self:
        given = {name for name in _DETAILS if getattr(self, name) is not None}
        if given != {self.type}.intersection(_DETAILS):
            raise ValueError(f"a response_format of type {self.type} goes with {self.type} and nothing else")
        return self

    def asked(self) -> dict[str, Any] | None:
        """As `StructuredOutputs` has it."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return {"json_object": True}
            case "json_schema":
                return {"json": self.json_schema.schema_ if self.json_schema is not None else {}}
            case _:
                return {self.type: getattr(self, self.type)}


class Generation(Inert):
    """What every request for text may ask.

    Attributes:
        model: a name that `/v1/models` lists; left out, the one that is served.
        stream: send server-sent events, in the end `[DONE]`.
        stream_options: only for `stream`.
        prompt_logprobs: alternatives reported per token of the prompt; left out, none.
        speculative: how this request is drafted.
        prediction: the reply that is expected; excludes `speculative.method`.
        response_format: the form of the reply.
        structured_outputs: the same as vLLM words it: one of `json`, `json_object`, `regex`, `choice`, `grammar`.
        guided_json, guided_regex, guided_choice, guided_grammar: the same as older releases of vLLM word it.
        truncate_prompt_tokens: keep so many tokens of the prompt; -1 keeps what fits the context beside `max_tokens`.
        truncation_side: which end is cut off: `left`, as if left out, keeps the last tokens, `right` the first.
        add_special_tokens: to the prompt, such as BOS; left out, true for a text and false for a conversation.
        return_token_ids: add `token_ids` to every choice and chunk, and `prompt_token_ids`.
        return_tokens_as_token_ids, use_beam_search: only false.
        request_id: becomes a part of the reply's id.
    """

    same_as = SamplingParams
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    bad_words: Words | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stops
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    prompt_logprobs: Logprobs | None = None
    skip_special_tokens: bool | None = None
    speculative: Speculative | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Forms | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: Off | None = None
    use_beam_search: Off | None = None
    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = None

    @model_validator(mode="after")
    def _agree_in_general(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true; leave it out or stream")
        if len(self.forms) > 1:
            raise ValueError(f"{' and '.join(self.forms)} say the same thing; leave all but one of them out")
        return self

    @property
    def forms(self) -> tuple[str, ...]:
        """The fields that say which form the output must have."""
        return tuple(name for name in FORMS if getattr(self, name) is not None)

    def form(self) -> dict[str, Any] | None:
        """The form that the output must have."""
        given = {name.removeprefix("guided_"): getattr(self, name) for name in self.forms}
        if self.response_format is not None:
            return self.response_format.asked()
        return given.get("structured_outputs", given or None)

    def cut(self, ids: list[int], context: int, reply: int | None) -> list[int]:
        """What `truncate_prompt_tokens` keeps of a prompt.

        Args:
            ids: of the prompt. `context`: tokens that prompt and reply may have together.
            reply: tokens that are asked for, None if that was not said.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return ids
        most = max(1, context - (reply or 1)) if most == -1 else most  # a longer reply is cut to the context
        return ids[:most] if self.truncation_side == "right" else ids[max(0, len(ids) - most) :]

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def counted(self) -> StreamOptions:
        """What the chunks of a stream say about usage."""
        return self.stream_options or StreamOptions()

    @property
    def reports(self) -> bool:
        return self.speculative is not None and self.speculative.report

    def sampling(self, recommended: Mapping[str, Any], **own: Any) -> SamplingParams:
        """The sampling parameters.

        Args:
            recommended: the model's values for what the request leaves out.
            own: those that an endpoint words its own way.

        Raises:
            RequestError: a value is out of range.
        """
        shared = {name: getattr(self, name) for name in _SHARED}
        shared["structured_outputs"] = self.form()
        chosen = {name: value for name, value in {**shared, **own}.items() if value is not None or name == "max_tokens"}
        speculative = {} if self.speculative is None else self.speculative.model_dump(exclude={"report"})
        if self.prediction is not None and self.prediction.content:
            speculative["prediction"] = self.prediction.content
        if speculative:
            chosen["speculative"] = speculative
        return SamplingParams.from_mapping({**recommended, **chosen})


_SHARED = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "seed", "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip


class CompletionRequest(Generation):
    """The body of POST /v1/completions.

    Attributes:
        prompt: text, texts, token ids or lists of them; each is completed `n` times.
        max_tokens: tokens to emit at most, within the context, 16 if left out; -1 is no limit; 0 is only for `echo`,
            to score a text.
        best_of: draw so many and return the `n` of highest log-probability; not for `stream`.
        echo: put the prompt before the text; with `logprobs` it is scored too.
        suffix: only null; text cannot be inserted.
    """

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            raise ValueError(f"best_of {self.best_of} is less than n {self.choices}; raise it or leave it out")
        if self.stream and self.drawn > self.choices:
            raise ValueError("best_of chooses among finished completions, which a stream cannot; leave one of them out")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise ValueError("max_tokens 0 is only for echo: true without stream; expected at least 1")
        return self

    @property
    def drawn(self) -> int:
        """Completions to draw for each prompt."""
        return max(self.choices, self.best_of or 1)

    @property
    def reply_tokens(self) -> int | None:
        """Tokens to emit at most; None is up to the end of the context."""
        if self.max_tokens == NO_LIMIT:
            return None
        return COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    def to_sampling(self, recommended: Mapping[str, Any]) -> SamplingParams:
        scored = 0 if self.drawn > self.choices else None  # best_of ranks by log-probability
        echoed = self.logprobs if self.echo else None
        return self.sampling(
            recommended,
            n=self.drawn,
            max_tokens=self.reply_tokens,
            logprobs=self.logprobs if self.logprobs is not None else scored,
            prompt_logprobs=self.prompt_logprobs if echoed is None else max(echoed, self.prompt_logprobs or 0),
        )
