"""Bodies of requests: OpenAI's fields for text, vLLM's common extras, and ours (`speculative`, `prediction`).

No field is ignored silently: fields without effect are listed in `inert`; a field that is unknown or cannot be honoured
is refused by name. Ranges of sampling parameters are checked by `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from sametoken.errors import RequestError
from sametoken.options.declaration import declared
from sametoken.options.json_types import Choices, Text
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.server.fields import NO_LIMIT, WHOLE, Alternatives, Body, Off, Prompts, Schema, Spoken, view
from sametoken.server.inert import Inert
from sametoken.server.text_request import BeamSearch, ChatTalk, Infill, TextBody, TextRequest

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
SAMPLED = declared(SamplingParams).keys() - {"speculative"}
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StreamOptions(Body):
    """Contents of a stream besides text."""

    include_usage: bool | None = False
    """end with a chunk that has `usage` and no choices."""
    continuous_usage_stats: bool | None = False
    """have the `usage` of its choice in every chunk; only with `include_usage`."""
    include_obfuscation: Off = False
    """only false; chunks are not padded."""


Drafted: Any = view("Drafted", RequestSpeculation, defaults=True)
Sampled: Any = view("Sampled", SamplingParams)


class Speculative(Drafted):  # type: ignore[misc]
    """Drafting options of a request, which change its speed and never a token."""

    report: bool | None = False
    """add `speculative` to every choice, and to every chunk of a stream (/v1/messages: to `message_delta`)."""

    @property
    def reports(self) -> bool:
        """True if the reply has a report, of which the trees of the forwards are a part."""
        return bool(self.report or self.steps)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """Drop fields that are null."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class Prediction(Body):
    """OpenAI's Predicted Outputs: the expected reply, whose tokens are the guesses."""

    type: Literal["content"]
    """always this."""
    content: Spoken
    """the text, for example the file that is to be edited."""


class JsonSchema(Body):
    """A JSON schema in OpenAI's form."""

    name: str
    """for people; no effect."""
    description: str | None = None
    """for people; no effect."""
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    """the JSON schema; without it: any JSON."""
    strict: bool | None = None
    """no effect: the output always follows the schema."""


_FORMS: dict[str, tuple[set[str], ...]] = {
    "text": (set(),),
    "json_object": (set(),),
    "json_schema": ({"json_schema"},),
    "regex": ({"regex"},),
    "grammar": ({"grammar"},),
    "structural_tag": ({"format"}, {"structures", "triggers"}),
}  # sets of fields of which a type needs one
_DETAILS = sorted({name for ways in _FORMS.values() for names in ways for name in names})


def _way(kind: str, names: set[str]) -> JsonDict:
    """JSON schema of a type with exactly the fields of these names."""
    absent: JsonDict = {"type": "null"}
    details: JsonDict = {name: {"not": absent} if name in names else absent for name in _DETAILS}
    required: list[JsonValue] = [*sorted(names)]
    return {"required": required, "properties": {"type": {"const": kind}, **details}}


_WAYS: JsonDict = {"oneOf": [_way(kind, names) for kind, ways in _FORMS.items() for names in ways]}


class ResponseFormat(Body):
    """The grammar that the reply follows: OpenAI's three types, vLLM's `structural_tag`, and two of ours."""

    model_config = ConfigDict(json_schema_extra=_WAYS)
    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    """kind of grammar; `regex`, `grammar` and `structural_tag` are not OpenAI's."""
    json_schema: JsonSchema | None = None
    """for type `json_schema`: the schema."""
    regex: str | None = None
    """for type `regex`: a regular expression that the whole reply matches."""
    grammar: str | None = None
    """for type `grammar`: a context-free grammar in Lark's notation or in GBNF."""

    format: dict[str, Any] | None = None
    """for type `structural_tag`: free text with parts of a required form, in the words of xgrammar."""
    structures: list[dict[str, Any]] | None = None
    """for type `structural_tag` without `format`: parts, each with `begin`, `schema` and `end`."""
    triggers: list[str] | None = None
    """for type `structural_tag` without `format`: texts with which a part begins."""

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name in _DETAILS if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _own(self) -> Self:
        ways = _FORMS[self.type]
        if (given := self._given).keys() not in ways:
            expected = " or ".join(" and ".join(sorted(names)) or "none" for names in ways)
            raise ValueError(f"got {' and '.join(given) or 'no details'}, expected for type {self.type}: {expected}")
        return self

    def asked(self) -> dict[str, Any] | None:
        """Grammar by the keys of `StructuredOutputs`; None for text without a grammar."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return {"json_object": True}
            case "json_schema":
                return {"json": self.json_schema.schema_ if self.json_schema is not None else {}}
            case "structural_tag":
                return {"structural_tag": self._given}
            case _:
                return self._given


class Generation(TextBody, Inert, Sampled):  # type: ignore[misc]
    """Fields of every request for text."""

    model: str | None = None
    """a name that `/v1/models` lists; without it: the model that is served."""
    stream: bool | None = None
    """send the reply as server-sent events, with `[DONE]` at the end."""
    stream_options: StreamOptions | None = None
    """contents of a stream besides text; only with `stream`."""
    speculative: Speculative | None = None
    """drafting of this request."""
    prediction: Prediction | None = None
    """the expected reply; excludes `speculative.method`."""
    response_format: ResponseFormat | None = None
    """the grammar that the reply follows."""
    guided_json: Schema | None = None
    """the same under the name of older releases of vLLM."""
    guided_regex: str | None = None
    """the same under the name of older releases of vLLM."""
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    """the same under the name of older releases of vLLM."""
    guided_grammar: str | None = None
    """the same under the name of older releases of vLLM."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """number of prompt tokens to keep; -1 keeps as many as fit into the context together with `max_tokens`."""
    truncation_side: Literal["left", "right"] | None = None
    """end of the prompt that is cut off: `left` keeps the last tokens, `right` the first; without it: `left`."""
    add_special_tokens: bool | None = None
    """add special tokens such as BOS to the prompt; without it: true for a text and false for a conversation."""
    return_token_ids: bool | None = None
    """add `token_ids` to every choice and chunk, and `prompt_token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """write the tokens of log-probabilities as `token_id:N`, so that tokens that are parts of a character differ."""
    prompt_logprobs: Alternatives | None = None
    """number of alternatives that are reported per prompt token; 0 is the token alone, -1 the whole vocabulary."""
    use_beam_search: bool | None = None
    """search for the `n` likeliest outputs, best first, in place of drawing them; not with `stream`, a grammar,
    penalties or biases. `temperature` has no effect."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    """power of the number of tokens by which a search divides the log-probability of an output; without it: 1."""
    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = None
    """a name that becomes a part of the reply's id."""

    @property
    def forms(self) -> dict[str, Any]:
        """Grammars of the output by the body's field, each by the keys of `StructuredOutputs`."""
        given = {name: value for name in FORMS if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            if name == "response_format":
                given[name] = value.asked()
            elif name.startswith("guided_"):
                given[name] = {name.removeprefix("guided_"): value}
        return given

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def counted(self) -> StreamOptions:
        """Usage options of a stream's chunks."""
        return self.stream_options or StreamOptions()

    @property
    def reports(self) -> bool:
        return self.speculative is not None and self.speculative.reports

    @property
    def own(self) -> dict[str, Any]:
        """Sampling parameters that the body has under other names or with other types."""
        return {}

    @property
    def renamed(self) -> dict[str, str]:
        """The body's own names of fields, by the names in the engine's errors."""
        return {}

    @property
    def talk(self) -> ChatTalk | None:
        """Conversation to continue; None if the prompt is text."""
        return None

    @model_validator(mode="after")
    def _ask(self) -> Self:
        """Make the text request that the body defines."""
        talk, forms = self.talk, self.forms
        required = talk is not None and talk.tools.required
        form = None if required else next(iter(forms.values()), None)  # a required call has its own grammar
        if self.stream_options is not None and not self.stream:
            raise RequestError("only for stream: true", field="stream_options", advice="leave it out or stream")
        if len(forms) > 1:
            first, *others = forms
            words = f"sets the grammar that {' and '.join(others)} also set{'s' if len(others) == 1 else ''}"
            raise RequestError(words, field=first, advice="leave all but one of them out")
        fields = {name: name for name in type(self).model_fields} | self.renamed
        fields["structured_outputs"] = "tools" if required else next(iter(forms), "structured_outputs")
        values = sampling_values(self, structured_outputs=form, **self.own)
        least, most = values.get("min_tokens", 0), values["max_tokens"]
        if most is not None and least > most:
            words = f"got {least}, expected at most {fields['max_tokens']}, which is {most}"
            raise RequestError(words, field="min_tokens", advice="change it or leave it out for the default")
        self._request = TextRequest(
            values=values,
            fields=fields,
            prompts=getattr(self, "prompt", ()),
            conversation=talk,
            special_tokens=talk is None if self.add_special_tokens is None else self.add_special_tokens,
            keep=self.truncate_prompt_tokens,
            keeps_first=self.truncation_side == "right",
            id=self.request_id,
            user=self.user,
            beams=self._beams(values, fields),
        )
        return self

    def _beams(self, values: Mapping[str, Any], fields: Mapping[str, str]) -> BeamSearch | None:
        """Beam search that the body requests; None for sampling."""
        if not self.use_beam_search:
            return None
        if self.stream:
            raise RequestError("excludes use_beam_search", field="stream", advice="leave one of them out")
        return BeamSearch.of(self.length_penalty, values, fields)


def sampling_values(body: Body, **own: Any) -> dict[str, Any]:
    """Sampling parameters that a body sets, by the keys of `SamplingParams.from_mapping`.

    Args:
        body: body with `speculative`, and optionally `prediction`.
        own: parameters that the body has under other names or with other types.
    """
    given = {name: getattr(body, name) for name in type(body).model_fields if name in SAMPLED} | own
    values = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    asked, expected = getattr(body, "speculative", None), getattr(body, "prediction", None)
    speculative = {} if asked is None else asked.model_dump(exclude={"report"})
    if expected is not None and expected.content:
        speculative["prediction"] = expected.content
    return {**values, "speculative": speculative} if speculative else values


def _no_embeds(given: Any) -> Any:
    if given is not None:
        words = "and a prompt of text or token ids (Either prompt or prompt_embeds must be provided and non-empty.)"
        raise ValueError(f"expected null {words}")
    return given


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    prompt_embeds: Annotated[Any, AfterValidator(_no_embeds), WithJsonSchema({"type": "null"})] = None
    """only null: a prompt is text or token ids."""
    prompt: Prompts
    """text, texts, token ids or lists of them; each is completed `n` times."""
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    """number of tokens to generate at most; without it: 16. -1 is no limit but the context. 0 is only for `echo`, to
    score a text."""
    best_of: Choices | None = None
    """number of completions to draw; the `n` with the highest log-probability are returned. Not with `stream`."""
    echo: bool | None = None
    """put the prompt before the text; with `logprobs` the prompt is scored too."""
    logprobs: Alternatives | None = None
    """number of alternatives that are reported per token; 0 is the chosen token alone, -1 the whole vocabulary, null is
    off."""
    suffix: str | None = None
    """text after the completion, for models whose vocabulary has marks for a gap in a text. Not with `echo` or token
    ids."""

    @model_validator(mode="after")
    def _gap(self) -> Self:
        """Convert each prompt to one for a gap if `suffix` is set."""
        if self.suffix:
            if self.echo or not all(isinstance(prompt, str) for prompt in self.prompt):
                raise RequestError("excludes echo and token ids", field="suffix", advice="leave one of them out")
            self._request = self._request.with_prompts([Infill(prompt, self.suffix) for prompt in self.prompt])
        return self

    @property
    def drawn(self) -> int:
        """Number of completions to draw for each prompt."""
        return max(self.choices, self.best_of or 1)

    @property
    def own(self) -> dict[str, Any]:
        if self.best_of is not None and self.best_of < self.choices:
            words = f"got {self.best_of}, less than n {self.choices}"
            raise RequestError(words, field="best_of", advice="raise it or leave it out")
        if self.stream and self.drawn > self.choices:
            words = "a stream cannot choose among finished completions"
            raise RequestError(words, field="best_of", advice="leave best_of or stream out")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            words = "got 0, which is only for echo: true without stream; expected at least 1"
            raise RequestError(words, field="max_tokens")
        most = {None: COMPLETION_TOKENS, NO_LIMIT: None, 0: 1}.get(self.max_tokens, self.max_tokens)
        scored = 0 if self.drawn > self.choices else None  # best_of ranks by log-probability
        counts = [count for count in (self.logprobs if self.echo else None, self.prompt_logprobs) if count is not None]
        return {
            "n": self.drawn,
            "max_tokens": most,
            "logprobs": self.logprobs if self.logprobs is not None else scored,
            "prompt_logprobs": WHOLE if WHOLE in counts else max(counts, default=None),
        }
