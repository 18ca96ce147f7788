"""What a request may ask of sampling and of speculation, checked when it is made. Names and defaults are vLLM's.

Nothing here is accepted and ignored: a value that cannot be honoured is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sametoken.errors import RequestError, unknown_name
from sametoken.speculation.structure import StructuredOutputs

# The parameters that a model may recommend in its generation_config.json, as vLLM reads it.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """How one request may be drafted. It changes speed, never tokens.

    Attributes:
        enabled: false decodes this request without drafts.
        method: a drafter's name; None leaves the choice to the engine, which also knows the valid names.
        max_draft_len: most guesses on a path, >= 0; None is the engine's.
        adaptive: true lets the engine choose the length up to `max_draft_len`, 0 included; false drafts that many
            whenever there is room; None is the engine's setting.
        prediction: the output that is expected, wholly or in part, whose tokens are the guesses; None is none.

    Raises:
        RequestError: a field has the wrong type or range.
    """

    enabled: bool = True
    method: str | None = None
    max_draft_len: int | None = None
    adaptive: bool | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        _flag("speculative", self.enabled, ".enabled")
        if self.method is not None and not isinstance(self.method, str):
            raise _refusal("speculative", self.method, "a drafter's name or None", ".method")
        _optional_integer("speculative", self.max_draft_len, 0, ".max_draft_len")
        if self.adaptive is not None:
            _flag("speculative", self.adaptive, ".adaptive")
        if self.prediction is not None and not (isinstance(self.prediction, str) and self.prediction):
            raise _refusal("speculative", self.prediction, "text or None", ".prediction")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    Attributes:
        n: completions per prompt; each derives its own seed.
        temperature: 0 is greedy: the highest score, the lowest id among equals.
        top_p: keep the smallest set of most probable tokens with at least this mass; 1 is off.
        top_k: keep exactly this many most probable tokens, lower ids first among equals; 0 or -1 is off.
        min_p: keep tokens with at least this fraction of the highest probability; 0 is off.
        repetition_penalty: divides positive and multiplies negative scores of tokens in prompt or output; 1 is off.
        presence_penalty: subtracted from the scores of tokens in the output, -2 .. 2.
        frequency_penalty: subtracted once per occurrence in the output, -2 .. 2.
        logit_bias: added to the score of each token id, -100 .. 100.
        allowed_token_ids: the only tokens that may be drawn, its end among them if the text is to end; None is all.
            Excludes min_tokens and bad_words.
        bad_words: strings whose tokens may not be completed, wherever they begin, the prompt included.
        max_tokens: tokens to emit at most; None is up to the context.
        min_tokens: end tokens are banned before this many tokens.
        stop: strings that end the request; one string or several.
        stop_token_ids: tokens that end the request, besides the model's own.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on past the model's own end tokens.
        seed: any integer, taken modulo 2**64; None lets the engine choose.
        logprobs: alternatives reported per token; 0 is the chosen token only, None is off.
        prompt_logprobs: the same for the prompt.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the form that the output must have; excludes min_tokens and bad_words.
        speculative: this request's speculation; None is the engine's default.

    Raises:
        RequestError: a field has the wrong type or range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    speculative: RequestSpeculation | None = None

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_lengths()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        if self.speculative is not None and not isinstance(self.speculative, RequestSpeculation):
            raise _refusal("speculative", self.speculative, "a RequestSpeculation or None")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise _refusal("structured_outputs", self.structured_outputs, "a StructuredOutputs or None")
        limited = "structured_outputs" if self.structured_outputs is not None else "allowed_token_ids"
        if getattr(self, limited) is not None and (self.min_tokens or self.bad_words):
            raise RequestError(
                "may leave one token only, which min_tokens or bad_words might forbid",
                field=limited,
                advice="leave these out",
            )
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise _refusal("allowed_token_ids", allowed, "at least one token id")
            object.__setattr__(self, "allowed_token_ids", allowed)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (
            ("stop", _strings("stop", () if stop is None else stop)),
            ("bad_words", _strings("bad_words", self.bad_words)),
            ("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", _biases("logit_bias", self.logit_bias)),
        ):
            object.__setattr__(self, name, value)

    def _check_distribution(self) -> None:
        _number("temperature", self.temperature, "a finite number >= 0", low=0.0)
        _number("top_p", self.top_p, "a number in (0, 1]", low=math.ulp(0.0), high=1.0)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, "a number in [0, 1]", low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, "a finite number > 0", low=math.ulp(0.0))
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), "a number in [-2, 2]", low=-2.0, high=2.0)

    def _check_lengths(self) -> None:
        _integer("n", self.n, 1)
        _optional_integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.seed is not None and not _is_integer(self.seed):
            raise _refusal("seed", self.seed, "an integer or None")
        for name in ("logprobs", "prompt_logprobs"):
            _optional_integer(name, getattr(self, name), 0)

    @property
    def greedy(self) -> bool:
        """Whether the token with the highest score is taken, without noise."""
        return self.temperature == 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from what JSON can say: `logit_bias` keys may be digits, `speculative` a mapping.

        Raises:
            RequestError: a key is unknown or a value is refused.
        """
        chosen = dict(_known("sampling parameter", values, cls))
        if isinstance(chosen.get("logit_bias"), Mapping):
            chosen["logit_bias"] = {_spoken_id(key): value for key, value in chosen["logit_bias"].items()}
        if isinstance(chosen.get("speculative"), Mapping):
            chosen["speculative"] = RequestSpeculation(
                **_known("speculative parameter", chosen["speculative"], RequestSpeculation)
            )
        if isinstance(chosen.get("structured_outputs"), Mapping):
            chosen["structured_outputs"] = StructuredOutputs(
                **_known("structured output", chosen["structured_outputs"], StructuredOutputs)
            )
        return cls(**chosen)


def _known(
    kind: str, values: Mapping[str, Any], owner: type[SamplingParams | RequestSpeculation | StructuredOutputs]
) -> Mapping[str, Any]:
    names = [field.name for field in fields(owner)]
    for key in values:
        if key not in names:
            raise RequestError(unknown_name(kind, str(key), names))
    return values


def _spoken_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def _refusal(name: str, got: object, expected: str, place: str = "") -> RequestError:
    advice = "change it or leave it out for the default"
    return RequestError(f"got {got!r}, expected {expected}", field=name, place=place, advice=advice)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(name: str, value: object, low: int) -> None:
    if not (_is_integer(value) and value >= low):  # type: ignore[operator]
        raise _refusal(name, value, f"an integer >= {low}")


def _optional_integer(name: str, value: object, low: int, place: str = "") -> None:
    if value is not None and not (_is_integer(value) and value >= low):  # type: ignore[operator]
        raise _refusal(name, value, f"an integer >= {low} or None", place)


def _number(name: str, value: object, expected: str, *, low: float, high: float | None = None, place: str = "") -> None:
    # A NaN fails both comparisons, so it is refused without being named; isfinite would overflow on huge integers.
    ceiling = float.fromhex("0x1.fffffffffffffp+1023") if high is None else high
    if not (_is_number(value) and low <= value <= ceiling):  # type: ignore[operator]
        raise _refusal(name, value, expected, place)


def _flag(name: str, value: object, place: str = "") -> None:
    if not isinstance(value, bool):
        raise _refusal(name, value, "true or false", place)


def _strings(name: str, value: object) -> tuple[str, ...]:
    # A string is itself a sequence of strings: bad_words="no" would ban the letters n and o.
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _refusal(name, value, "a list of strings")
    if not all(isinstance(item, str) and item for item in value):
        raise _refusal(name, value, "strings that are not empty")
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _refusal(name, value, "a list of token ids")
    if not all(_is_integer(item) and item >= 0 for item in value):
        raise _refusal(name, value, "token ids >= 0")
    return tuple(value)


def _biases(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refusal(name, value, "a mapping of token ids to numbers, or None")
    for token, bias in value.items():
        if not (_is_integer(token) and token >= 0):
            raise _refusal(name, token, "a token id >= 0", " key")
        _number(name, bias, "a number in [-100, 100]", low=-100.0, high=100.0, place=f"[{token}]")
    return {token: float(bias) for token, bias in value.items()}
