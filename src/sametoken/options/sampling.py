"""Options of a request: sampling, the grammar of the output, and drafting. Names are vLLM's.

No value is accepted and ignored: one that cannot be honoured is refused with the name of its option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema

from sametoken.errors import RequestError, unknown_name
from sametoken.options import json_types
from sametoken.options.declaration import STRICT, Count, Declared, Positive, Shown, declared, refusal, refusing
from sametoken.options.json_types import MOST_BIAS
from sametoken.options.shaping import Shaping

_TAG = {"anyOf": [{"type": "object"}, {"type": "string", "contentMediaType": "application/json"}]}
_SOME_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _strings(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    # A string is itself a sequence of strings: bad_words="no" would ban the letters n and o.
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise refusal(f"{info.field_name}", value, "a list of strings")
    if not all(isinstance(item, str) and item for item in value):
        raise refusal(f"{info.field_name}", value, "strings that are not empty")
    return tuple(value)


def _stops(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    return _strings((value,) if isinstance(value, str) else () if value is None else value, info)


def _choices(value: Any) -> Any:
    listed = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    if value is not None and not (listed and all(isinstance(text, str) and text for text in value)):
        raise refusal("structured_outputs", value, "texts that are not empty", ".choice")
    return value


def _tag(value: Any) -> Any:
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError) as error:
            words = f"got no JSON ({error}), expected a structural tag as JSON"
            raise RequestError(words, field="structured_outputs", place=".structural_tag") from error
    if read is not None and not isinstance(read, Mapping):
        raise refusal("structured_outputs", value, "a structural tag: an object, or its JSON", ".structural_tag")
    return read


def _token_ids(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise refusal(f"{info.field_name}", value, "a list of token ids")
    if not all(_is_integer(item) and item >= 0 for item in value):
        raise refusal(f"{info.field_name}", value, "token ids >= 0")
    return tuple(value)


def _some_token_ids(value: Any, info: ValidationInfo) -> tuple[int, ...] | None:
    ids = None if value is None else _token_ids(value, info)
    if ids == ():
        raise refusal(f"{info.field_name}", ids, "at least one token id")
    return ids


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refusal("logit_bias", value, "a mapping of token ids to numbers, or None")
    wrong = [token for token in value if not (_is_integer(token) and token >= 0)]
    if wrong:
        raise refusal("logit_bias", wrong if len(wrong) > 1 else wrong[0], "a token id >= 0", " key")
    for token, bias in value.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (number and -MOST_BIAS <= bias <= MOST_BIAS):  # a NaN fails both comparisons
            raise refusal("logit_bias", bias, f"a number in [-{MOST_BIAS}, {MOST_BIAS}]", f"[{token}]")
    return {token: float(bias) for token, bias in value.items()}


@refusing("structured_outputs")
@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class StructuredOutputs:
    """The grammar that an output follows; give exactly one field. Names are vLLM's.

    Raises:
        RequestError: a field has the wrong type, or none or several are given.
    """

    json: Annotated[Mapping[str, Any] | bool | None, Shown(words="a JSON schema")] = None
    """a JSON schema."""
    json_object: bool = False
    """any JSON object."""
    regex: Annotated[str | None, Shown(words="a regular expression")] = None
    """a regular expression that the whole output matches."""
    choice: Annotated[Sequence[str] | None, PlainValidator(_choices), WithJsonSchema(_SOME_TEXTS)] = None
    """texts of which the output is one."""
    grammar: Annotated[str | None, Shown(words="a grammar in Lark's notation or in GBNF")] = None
    """a context-free grammar in Lark's notation, or in GBNF, which vLLM's grammars are in."""
    structural_tag: Annotated[Mapping[str, Any] | str | None, PlainValidator(_tag), WithJsonSchema(_TAG)] = None
    """free text in which marks begin parts of a required form, in the words of xgrammar: an object with `format`, or
    with `structures` and `triggers`; or its JSON."""
    after: Annotated[str | None, Shown(http=None)] = None
    """regular expression of the text after which the grammar applies, for example the mark that ends a model's
    reasoning; the mark must end with ">". Without it: the grammar applies from the first token."""
    opens: Annotated[str | None, Shown(http=None)] = None
    """text; if the output begins with it, the grammar waits for `after`, otherwise it applies at once. Without it: the
    grammar always waits for `after`."""

    def __post_init__(self) -> None:
        given = [name for name in _forms() if getattr(self, name) is not (False if name == "json_object" else None)]
        if len(given) != 1:
            names = ", ".join(given) or "nothing"
            raise RequestError(f"got {names}, expected one of {', '.join(_forms())}", field="structured_outputs")


class _FormsSchema:
    """JSON schema of `structured_outputs` in request bodies, which has a property for each kind of grammar."""

    @staticmethod
    def __get_pydantic_json_schema__(schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        properties = {}
        for name, option in _forms().items():
            schema_of_option = TypeAdapter(option.hint).json_schema()
            members = schema_of_option.get("anyOf", [schema_of_option])
            kinds = [each for each in members if each != {"type": "null"}]
            properties[name] = {"anyOf": kinds} if len(kinds) > 1 else kinds[0]
        return {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": 1}


def _forms() -> dict[str, Declared]:
    return {name: option for name, option in declared(StructuredOutputs).items() if option.shown.http is not None}


def _known_forms(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in _forms():
            raise ValueError(unknown_name("grammar", name, _forms()))
    return given


Forms = Annotated[dict[str, Any], AfterValidator(_known_forms), _FormsSchema]


@refusing("speculative")
@dataclass(frozen=True, slots=True, config=STRICT)
class RequestSpeculation:
    """Drafting of one request. It changes speed, never tokens.

    Raises:
        RequestError: a field has the wrong type or range.
    """

    enabled: bool = True
    """false decodes this request without drafts."""
    method: Annotated[str | None, Shown(words="a drafter's name")] = None
    """a drafter of the engine (a server's `/server_info` lists them), `auto` (the engine chooses among them in
    every step), or `none`; without it: the engine's setting."""
    max_draft_len: Count | None = None
    """number of guesses on the longest path of a draft, at most; without it: the engine's setting."""
    adaptive: bool | None = None
    """true: the engine chooses the draft length for every step, from 0 to `max_draft_len`; false: every draft has
    `max_draft_len` tokens where there is room; without it: the engine's setting."""
    prediction: Annotated[Annotated[str, Field(min_length=1)] | None, Shown(http=None)] = None
    """text that the output is expected to repeat, all of it or a part; its tokens are the guesses. Without it: none."""
    steps: bool = False
    """report the tree of guesses of every forward, with the target's probability of each guess. It takes a little time
    in every step, and on a GPU such a request takes no part in captured steps."""


@refusing("thought_bound")
@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ThoughtBound:
    """Limit of the reasoning tokens before an answer.

    Raises:
        RequestError: a field has the wrong type or range.
    """

    tokens: Count
    """number of tokens between the marks, at most."""
    opens: str
    """mark at the beginning of the reasoning."""
    closes: Annotated[str, Field(min_length=1)]
    """mark at the end of the reasoning."""
    begun: bool = False
    """true if the output begins within the reasoning; otherwise an output that does not begin with `opens` has no
    limit."""


@refusing()
@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SamplingParams:
    """Choice of tokens and end of a request.

    Raises:
        RequestError: a field has the wrong type or range.
    """

    n: Annotated[int, Field(ge=1), Shown(http=json_types.Choices)] = 1
    """number of completions per prompt; each has a seed of its own, which is derived from `seed`."""
    temperature: Annotated[float, Field(ge=0), Shown(recommended=True)] = 1.0
    """randomness of the draw. 0 is greedy: the token with the highest score is taken, of equal ones the lowest id."""
    top_p: Annotated[float, Field(gt=0, le=1), Shown(recommended=True)] = 1.0
    """keep the smallest set of most probable tokens whose probabilities add up to at least this; 1 is off."""
    top_k: Annotated[int, Field(ge=-1), Shown(recommended=True)] = 0
    """keep this many of the most probable tokens, of equal ones the lower ids; 0 or -1 is off."""
    min_p: Annotated[float, Field(ge=0, le=1), Shown(recommended=True)] = 0.0
    """keep the tokens whose probability is at least this share of the highest one; 0 is off."""
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6), Shown(recommended=True)] = 1.0
    """make tokens that are in the prompt or the output less probable: positive scores are divided by this, negative
    ones multiplied; 1 is off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """number that is subtracted once from the score of each token in the output, -2 .. 2."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """number that is subtracted from the score of a token for each time that it is in the output, -2 .. 2."""
    logit_bias: Annotated[Mapping[int, float] | None, PlainValidator(_biases), Shown(http=json_types.Biases)] = None
    """numbers that are added to the scores of tokens, by token id, -100 .. 100."""
    allowed_token_ids: Annotated[
        Sequence[int] | None, PlainValidator(_some_token_ids), Shown(http=json_types.SomeTokenIds)
    ] = None
    """ids of the only tokens that may be drawn. Include an end token if the text shall be able to end. Without it: all.
    Cannot be combined with min_tokens or bad_words."""
    bad_words: Annotated[Sequence[str], PlainValidator(_strings), Shown(("--bad-word",), http=json_types.Words)] = ()
    """strings that must not occur in the output, not even a string that begins in the prompt."""
    max_tokens: Annotated[Positive | None, Shown(http=None)] = 256
    """number of tokens to generate at most; None (Python only): as many as the context holds."""
    min_tokens: Count = 0
    """number of tokens that are generated before an end token may be drawn."""
    stop: Annotated[str | Sequence[str] | None, PlainValidator(_stops), Shown(http=json_types.Stops)] = ()
    """strings that end the request, one string or several."""
    stop_token_ids: Annotated[
        Sequence[int], PlainValidator(_token_ids), Shown(("--stop-token-id",), http=json_types.TokenIds)
    ] = ()
    """tokens that end the request, besides the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """keep the stop string in the text."""
    ignore_eos: bool = False
    """go on after the model's own end tokens."""
    seed: Annotated[int | None, Shown(http=json_types.Seed)] = None
    """any integer, taken modulo 2**64 (in a request -2**63 to 2**63 - 1); the same seed gives the same tokens; without
    it: the engine chooses one."""
    logprobs: Annotated[Count | None, Shown(http=None)] = None
    """number of alternatives that are reported per token; 0 is the chosen token alone; without it: nothing is
    reported."""
    logprob_token_ids: Annotated[
        Sequence[int] | None, PlainValidator(_some_token_ids), Shown(("--logprob-token-id",), http=json_types.ScoredIds)
    ] = None
    """ids of the tokens whose log-probabilities are reported in the place of the best alternatives, beside that of the
    token itself; only with `logprobs`."""
    prompt_logprobs: Annotated[Count | None, Shown(http=json_types.Logprobs)] = None
    """number of alternatives that are reported per token of the prompt; without it: nothing is reported."""
    cache_salt: Annotated[str | None, Shown(command_line=False, http=json_types.Text)] = None
    """text that limits the reuse of cached prompts, and of outputs for guesses, to requests with the same text. The
    time of a reply then reveals nothing about requests with another text. Without it: all requests of an API key share
    them."""
    skip_special_tokens: bool = True
    """leave special tokens out of the text."""
    structured_outputs: Annotated[StructuredOutputs | None, Shown(command_line=False, http=Forms)] = None
    """the grammar that the output follows, one of `json`, `json_object`, `regex`, `choice`, `grammar`,
    `structural_tag`. Cannot be combined with min_tokens or bad_words."""
    thought_bound: Annotated[ThoughtBound | None, Shown(command_line=False, http=None)] = None
    """limit of the reasoning; in a request thinking_token_budget. Without it: no limit."""
    shaping: Annotated[Shaping | None, Shown(command_line=False, http=None)] = None
    """llama.cpp's samplers; without it: none of them."""
    speculative: Annotated[RequestSpeculation | None, Shown(command_line=False, http=None)] = None
    """how this request is drafted; without it: the engine's setting."""

    def __post_init__(self) -> None:
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise RequestError("only with logprobs", field="logprob_token_ids", advice="ask for both or for none")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        limited = "structured_outputs" if self.structured_outputs is not None else "allowed_token_ids"
        if getattr(self, limited) is not None and (self.min_tokens or self.bad_words):
            raise RequestError(
                "cannot be combined with min_tokens or bad_words, which could ban the only allowed token",
                field=limited,
                advice="leave min_tokens and bad_words out",
            )

    @property
    def greedy(self) -> bool:
        """True if each token is the one with the highest logit, without noise."""
        return self.temperature == 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from values of JSON: keys of `logit_bias` may be strings of digits, nested options mappings.

        Raises:
            RequestError: a key is unknown or a value is refused.
        """
        chosen = dict(_known("sampling parameter", values, cls))
        if isinstance(chosen.get("logit_bias"), Mapping):
            chosen["logit_bias"] = {_int_of_digits(key): value for key, value in chosen["logit_bias"].items()}
        for name, (kind, owner) in NESTED.items():
            if isinstance(chosen.get(name), Mapping):
                chosen[name] = owner(**_known(kind, chosen[name], owner))
        return cls(**chosen)


def _known(kind: str, values: Mapping[str, Any], owner: type[Any]) -> Mapping[str, Any]:
    names = declared(owner)
    for key in values:
        if key not in names:
            raise RequestError(unknown_name(kind, str(key), names))
    return values


def _int_of_digits(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


# Parameters that are mappings in JSON, each with its name in errors and its class.
NESTED: Mapping[str, tuple[str, type[Any]]] = {
    "speculative": ("speculative parameter", RequestSpeculation),
    "structured_outputs": ("structured output", StructuredOutputs),
    "thought_bound": ("sampling parameter", ThoughtBound),
    "shaping": ("sampling parameter", Shaping),
}
# Parameters that a model's generation_config.json may set, as in vLLM.
RECOMMENDED = tuple(name for name, option in declared(SamplingParams).items() if option.shown.recommended)
