"""Bodies of llama-server's requests: what it takes besides OpenAI's fields, and its own /completion and /infill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Self

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from sametoken.errors import RequestError
from sametoken.server.chat_schema import ChatRequest, TokenizeRequest
from sametoken.server.fields import Body, Schema
from sametoken.server.schema import CompletionRequest, Generation
from sametoken.server.text_request import ChatTalk, Infill, Pieces

RANDOM_SEEDS = (-1, 2**32 - 1)  # llama-server's words for a seed that the server chooses
MOST_GBNF = 2**17  # characters
TEXT, MEDIA = "prompt_string", "multimodal_data"
MOST_PROMPTS = 1024
# Samplers that are not here, with the values that turn them off.
OFF: dict[str, tuple[float, ...]] = {
    "typical_p": (1,), "typ_p": (1,), "top_n_sigma": (-1, 0), "xtc_probability": (0,), "dynatemp_range": (0,),
    "dry_multiplier": (0,), "mirostat": (0,), "adaptive_target": (-1,),
}  # fmt: skip
SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "typical_p", "top_p", "min_p", "xtc", "temperature", "temp",
    "infill", "adaptive_p",
)  # fmt: skip


def lark_of(gbnf: str) -> str:
    """llama.cpp's grammar notation as Lark's.

    Raises:
        RequestError: it is no such grammar.
    """
    if len(gbnf) > MOST_GBNF:
        raise RequestError(f"got {len(gbnf)} characters, expected at most {MOST_GBNF}", field="grammar")
    try:
        lark: str = gbnf_to_lark(gbnf)
    except Exception as error:  # the library raises bare ones
        words = str(error) or "it is nested too deep"
        raise RequestError(f"no grammar in GBNF: {words}", field="grammar", advice="correct it") from error
    return lark


def _prompt(given: object) -> object:
    """A prompt as text, token ids, or pieces of both."""
    if isinstance(given, dict):
        if given.get(MEDIA):
            raise ValueError("expected no multimodal_data: this model reads text only")
        given = given.get(TEXT)
    if isinstance(given, str):
        return given
    pieces = isinstance(given, list) and given and all(type(each) in (str, int) for each in given)
    if not pieces or any(isinstance(each, int) and each < 0 for each in given):  # type: ignore[attr-defined]
        raise ValueError(f"expected text, token ids, or a list of both, or an object with {TEXT}")
    return Pieces(tuple(given))  # type: ignore[arg-type]


def _llama_prompts(given: object) -> object:
    """One prompt or several: a list whose members are lists, objects, or nothing but texts."""
    if not isinstance(given, list):
        return [_prompt(given)]
    if not 0 < len(given) <= MOST_PROMPTS and not all(isinstance(each, int) for each in given):
        raise ValueError(f"expected 1 to {MOST_PROMPTS} prompts")
    several = any(isinstance(each, list | dict) for each in given) or all(isinstance(each, str) for each in given)
    return [_prompt(each) for each in given] if several else [_prompt(given)]


def _biases(given: object) -> object:
    """llama-server's forms of biases: a list of [token or text, bias or false], or an object."""
    if isinstance(given, dict):
        given = [[key, value] for key, value in given.items()]
    if not isinstance(given, list):
        raise ValueError("expected a list of pairs, or an object")  # noqa: TRY004 - pydantic takes no other
    found: dict[int | str, float] = {}
    for pair in given:
        if isinstance(pair, dict) and {"id", "bias"} <= pair.keys():  # one of OpenAI's entries, as replies have them
            pair = [pair["id"], pair["bias"]]
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int | str):
            raise ValueError("expected pairs of a token id or a text and a number or false")
        key, bias = pair
        if not (bias is False or (isinstance(bias, int | float) and not isinstance(bias, bool))):
            raise ValueError("expected a number, or false for never")
        value = -100.0 if bias is False else max(-100.0, min(100.0, float(bias)))
        found[int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key] = value
    return found


Anything = Annotated[Any, WithJsonSchema({})]
LlamaBias = Annotated[dict[Any, float], BeforeValidator(_biases), WithJsonSchema({"type": ["array", "object"]})]
LlamaPrompts = Annotated[
    list[Any], BeforeValidator(_llama_prompts), WithJsonSchema({"type": ["string", "array", "object"]})
]


def _seed(given: int) -> int | None:
    return None if given in RANDOM_SEEDS else given


LlamaSeed = Annotated[int, AfterValidator(_seed)]


class LlamaFields(Generation):
    """What llama-server's requests for text have besides OpenAI's fields; unknown fields are ignored, as there."""

    model_config = ConfigDict(extra="ignore")
    n_predict: Annotated[int, Field(ge=-2)] | None = None
    """number of tokens to generate at most; -1 and -2: as many as the context holds."""
    temperature: float | None = None
    """randomness of the draw; 0 and less is greedy."""
    top_k: int | None = None
    """keep this many of the most probable tokens; 0 and less is off."""
    seed: LlamaSeed | None = None
    """the same seed gives the same tokens; -1: the server chooses one."""
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    """`repetition_penalty` under llama.cpp's name; the whole text counts, whatever `repeat_last_n` is."""
    logit_bias: LlamaBias | None = None
    """pairs of a token id or a text and a number; false is never."""
    grammar: str | None = None
    """a grammar in GBNF."""
    json_schema: Schema | None = None
    """the JSON schema that the reply follows."""
    samplers: list[str] | str | None = None
    """names of samplers; their order here is fixed, so that it has no effect."""
    timings_per_token: bool | None = None
    """have `timings` in every chunk."""
    return_progress: bool | None = None
    """have `prompt_progress` before the first token of a stream."""
    verbose: bool | None = None
    """add `__verbose`, the reply in the form of /completion."""
    typical_p: float | None = None
    """only 1, which is off."""
    typ_p: float | None = None
    """only 1, which is off."""
    top_n_sigma: float | None = None
    """only -1, which is off."""
    xtc_probability: float | None = None
    """only 0, which is off."""
    dynatemp_range: float | None = None
    """only 0, which is off."""
    dry_multiplier: float | None = None
    """only 0, which is off."""
    mirostat: int | None = None
    """only 0, which is off."""
    adaptive_target: float | None = None
    """only -1, which is off."""

    @model_validator(mode="before")
    @classmethod
    def _own_format(cls, given: Any) -> Any:
        """A schema may stand beside the type `json_object` and needs no name; no tools are as good as none."""
        if isinstance(given, dict) and given.get("tools") == []:
            given = {name: value for name, value in given.items() if name != "tools"}
        asked = given.get("response_format") if isinstance(given, dict) else None
        if not isinstance(asked, dict) or asked.get("type") not in ("json_object", "json_schema"):
            return given
        stated = asked.get("json_schema") if asked["type"] == "json_schema" else asked
        if not isinstance(stated, dict) or "schema" not in stated:
            return given
        named = (
            {"name": "reply", **stated}
            if asked["type"] == "json_schema"
            else {"name": "reply", "schema": stated["schema"]}
        )
        return {**given, "response_format": {"type": "json_schema", "json_schema": named}}

    @property
    def forms(self) -> dict[str, Any]:
        given = super().forms
        if self.grammar:
            given["grammar"] = {"grammar": lark_of(self.grammar)}
        if self.json_schema is not None:
            given["json_schema"] = {"json": self.json_schema}
        return given

    @property
    def own(self) -> dict[str, Any]:
        for name, values in OFF.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                words = f"got {value}, expected {values[0]}: this sampler is not implemented"
                raise RequestError(words, field=name, advice="leave it out")
        listed = self.samplers.split(";") if isinstance(self.samplers, str) else self.samplers or ()
        if unknown := [name for name in listed if name and name not in SAMPLERS]:
            raise RequestError(f"no sampler {unknown[0]!r}", field="samplers", advice="leave it out")
        found = {**super().own, "logit_bias": None}
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.temperature is not None:
            found["temperature"] = max(0.0, self.temperature)
        if self.top_k is not None:
            found["top_k"] = max(0, self.top_k)
        return found

    @model_validator(mode="after")
    def _bias(self) -> Self:
        """Gives the request the biases whose tokens the tokenizer has to find."""
        self._request = self._request.with_biases(self.logit_bias or {}, forbids_end=bool(self.ignore_eos))
        return self


def _predicted(n_predict: int | None, otherwise: int | None) -> int | None:
    """Most tokens of a reply; None for the context."""
    if n_predict is None:
        return otherwise
    return None if n_predict < 0 else max(1, n_predict)


class LlamaChatRequest(LlamaFields, ChatRequest):
    """The body of POST /chat/completions."""

    model_config = ConfigDict(extra="ignore")

    @property
    def talk(self) -> ChatTalk:
        """The conversation, with today's date for the template.

        A last turn of the assistant is gone on with, unless the request says otherwise.
        """
        now = datetime.now()
        today = {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
        talk = super().talk
        talk = replace(talk, options={**today, **talk.options})
        roles = [turn.role for turn in talk.turns]
        if self.continue_final_message is not None or self.add_generation_prompt or roles[-1] != "assistant":
            return talk
        if roles[-2:] == ["assistant", "assistant"]:
            raise RequestError("two turns of the assistant end it", field="messages", advice="leave one of them out")
        return replace(talk, begins=False, continues=True)

    @property
    def own(self) -> dict[str, Any]:
        found = super().own
        return {**found, "max_tokens": _predicted(self.n_predict, found["max_tokens"])}


class LlamaCompletionRequest(LlamaFields, CompletionRequest):
    """The body of POST /v1/completions for clients of llama-server."""

    model_config = ConfigDict(extra="ignore")

    @property
    def own(self) -> dict[str, Any]:
        found = super().own
        given = self.n_predict is not None or self.max_tokens is None
        return {**found, "max_tokens": _predicted(self.n_predict, None)} if given else found


class NativeRequest(LlamaFields):
    """The body of POST /completion."""

    prompt: LlamaPrompts = Field(default_factory=list)
    """text, token ids, a list of both, an object with `prompt_string`, or a list of such prompts."""
    max_tokens: int | None = None
    """`n_predict` under OpenAI's name."""
    n_probs: Annotated[int, Field(ge=0, le=1000)] | None = None
    """number of alternatives that are reported per token."""
    post_sampling_probs: bool | None = None
    """report probabilities instead of log-probabilities; those of the model, before truncation."""
    return_tokens: bool | None = None
    """have the token ids in the reply."""
    response_fields: list[str] | None = None
    """names of the only fields that the reply has; a / goes into an object."""
    n_cmpl: Annotated[int, Field(ge=1)] | None = None
    """`n` under llama.cpp's name."""

    @property
    def own(self) -> dict[str, Any]:
        most = self.n_predict if self.n_predict is not None else self.max_tokens
        found = {**super().own, "max_tokens": _predicted(most, None)}
        if self.n_probs:
            found["logprobs"] = self.n_probs
        if self.n_cmpl is not None:
            found["n"] = self.n_cmpl
        return found


class ExtraFile(Body):
    """A file that the model may look at."""

    model_config = ConfigDict(extra="ignore")
    filename: str | None = None
    """name of the file."""
    text: str
    """its text."""


class InfillRequest(NativeRequest):
    """The body of POST /infill: what stands before and after the gap, and other files."""

    prompt: LlamaPrompts = Field(default_factory=lambda: [""])
    """what already stands in the gap's first line."""
    input_prefix: str = ""
    """text before the gap."""
    input_suffix: str = ""
    """text after the gap."""
    input_extra: list[ExtraFile] | None = None
    """other files of the project."""

    @model_validator(mode="after")
    def _gap(self) -> Self:
        """Makes the one prompt."""
        (begun,) = self.prompt if len(self.prompt) == 1 else (None,)
        if not isinstance(begun, str):
            raise RequestError("expected one text", field="prompt", advice="send what stands in the gap's first line")
        files = tuple((each.filename or "tmp", each.text) for each in self.input_extra or ())
        self._request = self._request.with_prompts([Infill(self.input_prefix, self.input_suffix, begun, files)])
        return self


class LlamaTokenizeRequest(TokenizeRequest):
    """The body of POST /tokenize: llama-server's `content`, or vLLM's fields."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    content: Annotated[Any, WithJsonSchema({"type": ["string", "array"]})] = None
    """text, or a list of texts and token ids."""
    add_special: bool = False
    """add special tokens such as BOS."""
    parse_special: bool = True
    """only true: marks in the text become special tokens."""
    with_pieces: bool = False
    """have the text of every token: a string, or a list of bytes where it is not whole characters."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.content is None:
            if (self.prompt is None) == (self.messages is None):
                raise ValueError("expected content, prompt or messages")
            assert self.talk
        elif self.content and not isinstance(self.content, str):
            _prompt(self.content)
        return self


class ApplyTemplateRequest(LlamaChatRequest):
    """The body of POST /apply-template."""


def nested(reply: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Those fields of a reply, under their whole names; a / in a name goes into an object."""
    return dict(_nested(reply, names))


def _nested(reply: Mapping[str, Any], names: list[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        found: Any = reply
        for part in name.split("/"):
            if not isinstance(found, Mapping) or part not in found:
                break
            found = found[part]
        else:
            yield name, found
