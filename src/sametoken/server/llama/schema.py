"""Bodies of llama-server's requests: its additions to OpenAI's fields, and its own /completion and /infill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator

from sametoken.errors import RequestError
from sametoken.options.declaration import declared
from sametoken.options.shaping import Shaping
from sametoken.server.chat_schema import ChatRequest, TokenizeRequest
from sametoken.server.fields import NO_LIMIT, Body, Schema
from sametoken.server.llama.forms import (
    LlamaBias,
    LlamaPrompts,
    LlamaSeed,
    lark_of,
    one_prompt,
    predicted,
)
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.schema import CompletionRequest, Generation
from sametoken.server.text_request import ChatTalk, Infill

# Options of samplers that are not implemented, with the permitted values, which turn them off.
OFF: dict[str, tuple[float, ...]] = {"mirostat": (0,), "adaptive_target": (-1,)}
SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "typical_p", "top_p", "min_p", "xtc", "temperature", "temp",
    "infill", "adaptive_p",
)  # fmt: skip


class ShapingFields(Body):
    """Fields of `options.shaping.Shaping`, and an older name of one."""

    typical_p: float | None = None
    """keep the tokens whose information is nearest to the expected one, up to this probability; 1 is off."""
    typ_p: float | None = None
    """`typical_p` under its older name."""
    top_n_sigma: float | None = None
    """keep the tokens whose score is at most so many standard deviations below the highest one; -1 is off."""
    xtc_probability: float | None = None
    """chance that of the tokens above `xtc_threshold` the least probable alone is kept; 0 is off."""
    xtc_threshold: float | None = None
    """probability from which `xtc_probability` counts a token."""
    dynatemp_range: float | None = None
    """how far the temperature moves with the uncertainty; 0 is off."""
    dynatemp_exponent: float | None = None
    """power of the uncertainty that moves the temperature."""
    repeat_last_n: int | None = None
    """number of newest tokens that penalties count; 0 counts none, -1 all."""
    dry_multiplier: float | None = None
    """number that is subtracted from the score of a token that would make a repeated sequence longer; 0 is off."""
    dry_base: float | None = None
    """factor of that for each token of the sequence beyond `dry_allowed_length`."""
    dry_allowed_length: int | None = None
    """length of repeated sequences that costs nothing."""
    dry_penalty_last_n: int | None = None
    """number of newest tokens that are searched for repeats; 0 is off, -1 is all."""
    dry_sequence_breakers: list[str] | None = None
    """texts at which a repeated sequence ends."""

    @property
    def shaping(self) -> dict[str, Any]:
        """Shaping parameters that are set, by the keys of `SamplingParams.from_mapping`."""
        given = {name: getattr(self, name) for name in declared(Shaping)}
        if given["typical_p"] is None:
            given["typical_p"] = self.typ_p
        return {name: value for name, value in given.items() if value is not None}


class Telemetry(Body):
    """Options for timings and progress in the reply, and for the slot of the request."""

    timings_per_token: bool | None = None
    """have `timings` in every chunk."""
    return_progress: bool | None = None
    """have `prompt_progress` while the prompt of a stream is read."""
    id_slot: int | None = None
    """name for the sequence in /slots; -1 and without it: its place in the batch."""
    verbose: bool | None = None
    """add `__verbose`, the reply in the form of /completion."""


class LlamaFields(Telemetry, ShapingFields, Generation):
    """Fields of llama-server's text requests beyond OpenAI's; unknown fields are ignored, as in llama-server."""

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
    """names of samplers, or their letters; their order here is fixed, so that it has no effect."""
    mirostat: int | None = None
    """only 0, which is off."""
    adaptive_target: float | None = None
    """only -1, which is off."""

    @model_validator(mode="before")
    @classmethod
    def _own_format(cls, given: Any) -> Any:
        """Convert llama-server's forms of `response_format` to OpenAI's, and drop an empty list of tools.

        llama-server accepts a schema with the type `json_object`, and a schema without a name.
        """
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
        listed = self.samplers if isinstance(self.samplers, list) else ()  # a text has their letters
        if unknown := [name for name in listed if name not in SAMPLERS]:
            raise RequestError(f"no sampler {unknown[0]!r}", field="samplers", advice="leave it out")
        found = {**super().own, "logit_bias": None}
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.temperature is not None:
            found["temperature"] = max(0.0, self.temperature)
        if self.top_k is not None:
            found["top_k"] = max(0, self.top_k)
        if shaping := self.shaping:
            found["shaping"] = shaping
        return found

    @model_validator(mode="after")
    def _bias(self) -> Self:
        """Add the logit biases, whose tokens the tokenizer looks up later, to the request."""
        self._request = self._request.with_biases(self.logit_bias or {}, forbids_end=bool(self.ignore_eos))
        return self


class LlamaChatRequest(LlamaFields, ChatRequest):
    """The body of POST /chat/completions."""

    model_config = ConfigDict(extra="ignore")
    reasoning_budget_tokens: Annotated[int, Field(ge=-1)] | None = None
    """`thinking_token_budget` under llama.cpp's name."""
    thinking_budget_tokens: Annotated[int, Field(ge=-1)] | None = None
    """the same under another name of llama.cpp's."""

    @property
    def talk(self) -> ChatTalk:
        """Conversation with llama-server's variables of chat templates: today's date, and the functions as JSON.

        The reply continues a last turn of the assistant, unless the request sets `continue_final_message` or
        `add_generation_prompt`.
        """
        now = datetime.now()
        today = {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
        talk = super().talk
        listed = [{"type": "function", "function": each} for each in talk.tools.offered]
        functions = {"functions": json.dumps(listed, indent=2) if listed else ""}
        talk = replace(talk, options={**today, **functions, **talk.options}, most_thinking=self._most(talk))
        roles = [turn.role for turn in talk.turns]
        if self.continue_final_message is not None or self.add_generation_prompt or roles[-1] != "assistant":
            return talk
        if roles[-2:] == ["assistant", "assistant"]:
            raise RequestError("two turns of the assistant end it", field="messages", advice="leave one of them out")
        return replace(talk, begins=False, continues=True)

    def _most(self, talk: ChatTalk) -> int | None:
        """Most tokens of reasoning; None if the request sets no limit."""
        budget = self.thinking_budget_tokens if self.reasoning_budget_tokens is None else self.reasoning_budget_tokens
        return talk.most_thinking if budget in (None, NO_LIMIT) else budget

    @property
    def own(self) -> dict[str, Any]:
        found = super().own
        return {**found, "max_tokens": predicted(self.n_predict, found["max_tokens"])}


class LlamaCompletionRequest(LlamaFields, CompletionRequest):
    """The body of POST /v1/completions for clients of llama-server."""

    model_config = ConfigDict(extra="ignore")

    @property
    def own(self) -> dict[str, Any]:
        found = super().own
        given = self.n_predict is not None or self.max_tokens is None
        return {**found, "max_tokens": predicted(self.n_predict, None)} if given else found


class LlamaResponsesRequest(Telemetry, ResponsesRequest):
    """The body of POST /responses."""

    model_config = ConfigDict(extra="ignore")


class NativeRequest(LlamaFields):
    """The body of POST /completion."""

    prompt: LlamaPrompts
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
        found = {**super().own, "max_tokens": predicted(most, None)}
        if self.n_probs:
            found["logprobs"] = self.n_probs
        if self.n_cmpl is not None:
            found["n"] = self.n_cmpl
        return found


class ExtraFile(Body):
    """Another file of the project, as context for the model."""

    model_config = ConfigDict(extra="ignore")
    filename: str | None = None
    """name of the file."""
    text: str
    """its text."""


class InfillRequest(NativeRequest):
    """The body of POST /infill: the texts before and after the gap, and other files."""

    prompt: LlamaPrompts = Field(default_factory=lambda: [""])
    """beginning of the gap's first line, which is given."""
    input_prefix: str = ""
    """text before the gap."""
    input_suffix: str = ""
    """text after the gap."""
    input_extra: list[ExtraFile] | None = None
    """other files of the project."""

    @model_validator(mode="after")
    def _gap(self) -> Self:
        """Make the request's prompt from the texts around the gap."""
        (begun,) = self.prompt if len(self.prompt) == 1 else (None,)
        if not isinstance(begun, str):
            raise RequestError("expected one text", field="prompt", advice="send the beginning of the gap's first line")
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
            one_prompt(self.content)
        return self


class ApplyTemplateRequest(LlamaChatRequest):
    """The body of POST /apply-template."""


def nested(reply: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Fields of a reply by name; a / in a name separates the keys of nested objects, and is kept in the result."""
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
