"""Bodies of requests: OpenAI's fields for text, vLLM's common extras, and ours (`speculative`, `prediction`).

Nothing is ignored silently: what changes nothing is listed in `inert`; a field that is unknown or cannot be honoured is
refused by name. Ranges of sampling parameters are checked by `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from sametoken.options.json_types import Choices, Logprobs, Text
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.server.fields import NO_LIMIT, Body, Off, Prompts, Schema, Spoken, view
from sametoken.server.inert import Inert
from sametoken.server.reasoning import Splitter
from sametoken.server.speech import Rendered, ReplyReader

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StreamOptions(Body):
    """What a stream says besides text."""

    include_usage: bool = False
    """end with a chunk that has `usage` and no choices."""
    continuous_usage_stats: bool = False
    """have `usage` in every chunk."""
    include_obfuscation: Off = False
    """only false; chunks are not padded."""


Drafted: Any = view("Drafted", RequestSpeculation, nullable=False)
Sampled: Any = view("Sampled", SamplingParams)


class Speculative(Drafted):  # type: ignore[misc]
    """How this request is drafted, which changes its speed and never a token."""

    report: bool = False
    """add `speculative` to every choice, and to every chunk of a stream."""


class Prediction(Body):
    """OpenAI's Predicted Outputs: the reply that is expected, which is drafted from."""

    type: Literal["content"]
    """always this."""
    content: Spoken
    """the text, for example the file that is to be edited."""


class JsonSchema(Body):
    """A schema as OpenAI words it."""

    name: str
    """for people."""
    description: str | None = None
    """for people."""
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    """the JSON schema; left out, any JSON."""
    strict: bool | None = None
    """nothing follows from it: a form is always kept."""


_DETAILS = ("json_schema", "regex", "grammar")


def _own_detail(kind: str) -> JsonDict:
    """A type goes with the detail of its name and no other."""
    absent: JsonDict = {"type": "null"}
    details: JsonDict = {name: {"not": absent} if name == kind else absent for name in _DETAILS}
    return {"required": [kind], "properties": {"type": {"const": kind}, **details}}


_BARE: JsonDict = {"type": {"enum": ["text", "json_object"]}, **{name: {"type": "null"} for name in _DETAILS}}
_OWN_DETAIL: JsonDict = {"oneOf": [{"properties": _BARE}, *map(_own_detail, _DETAILS)]}


class ResponseFormat(Body):
    """The form of the reply: OpenAI's three types, and two of ours."""

    model_config = ConfigDict(json_schema_extra=_OWN_DETAIL)
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    """which form; `regex` and `grammar` are not OpenAI's."""
    json_schema: JsonSchema | None = None
    """of type `json_schema`."""
    regex: str | None = None
    """of type `regex`: what the whole reply matches."""
    grammar: str | None = None
    """of type `grammar`: a context-free one in Lark's notation."""

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


class Generation(Inert, Sampled):  # type: ignore[misc]
    """What every request for text may ask."""

    model: str | None = None
    """a name that `/v1/models` lists; left out, the one that is served."""
    stream: bool | None = None
    """send server-sent events, in the end `[DONE]`."""
    stream_options: StreamOptions | None = None
    """only for `stream`."""
    speculative: Speculative | None = None
    """how this request is drafted."""
    prediction: Prediction | None = None
    """the reply that is expected; excludes `speculative.method`."""
    response_format: ResponseFormat | None = None
    """the form of the reply."""
    guided_json: Schema | None = None
    """the same as older releases of vLLM word it."""
    guided_regex: str | None = None
    """the same as older releases of vLLM word it."""
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    """the same as older releases of vLLM word it."""
    guided_grammar: str | None = None
    """the same as older releases of vLLM word it."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """keep so many tokens of the prompt; -1 keeps what fits the context beside `max_tokens`."""
    truncation_side: Literal["left", "right"] | None = None
    """which end is cut off: `left`, as if left out, keeps the last tokens, `right` the first."""
    add_special_tokens: bool | None = None
    """to the prompt, such as BOS; left out, true for a text and false for a conversation."""
    return_token_ids: bool | None = None
    """add `token_ids` to every choice and chunk, and `prompt_token_ids`."""
    return_tokens_as_token_ids: Off | None = None
    """only false."""
    use_beam_search: Off | None = None
    """only false."""
    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = None
    """becomes a part of the reply's id."""

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

    def chosen(self, recommended: Mapping[str, Any], **own: Any) -> dict[str, Any]:
        """The values of the sampling parameters.

        Args:
            recommended: the model's values for what the request leaves out.
            own: those that an endpoint words its own way.
        """
        shared = {name: getattr(self, name) for name in Sampled.model_fields}
        shared["structured_outputs"] = self.form()
        chosen = {name: value for name, value in {**shared, **own}.items() if value is not None or name == "max_tokens"}
        speculative = {} if self.speculative is None else self.speculative.model_dump(exclude={"report"})
        if self.prediction is not None and self.prediction.content:
            speculative["prediction"] = self.prediction.content
        if speculative:
            chosen["speculative"] = speculative
        return {**recommended, **chosen}


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    prompt: Prompts
    """text, texts, token ids or lists of them; each is completed `n` times."""
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    """tokens to emit at most, within the context, 16 if left out; -1 is no limit; 0 is only for `echo`, to score a
    text."""
    best_of: Choices | None = None
    """draw so many and return the `n` of highest log-probability; not for `stream`."""
    echo: bool | None = None
    """put the prompt before the text; with `logprobs` it is scored too."""
    logprobs: Logprobs | None = None
    """alternatives reported per token; 0 is the chosen token only, None is off."""
    suffix: None = None
    """only null; text cannot be inserted."""

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

    def reader(self, opening: Callable[[], Splitter] | None) -> ReplyReader:
        """What reads the replies to this request: text alone."""
        return ReplyReader(opening=opening)

    def to_sampling(self, recommended: Mapping[str, Any], made: Rendered) -> SamplingParams:
        """The sampling parameters; see `ChatRequest`. Of the prompt nothing is needed."""
        scored = 0 if self.drawn > self.choices else None  # best_of ranks by log-probability
        echoed = self.logprobs if self.echo else None
        values = self.chosen(
            recommended,
            n=self.drawn,
            max_tokens=self.reply_tokens,
            logprobs=self.logprobs if self.logprobs is not None else scored,
            prompt_logprobs=self.prompt_logprobs if echoed is None else max(echoed, self.prompt_logprobs or 0),
        )
        return SamplingParams.from_mapping(values)
