"""llama-server's replies: those of /completion and /infill, and its additions to OpenAI's replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sametoken import __version__
from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import Request, TokenLogprob
from sametoken.options.shaping import WHOLE, Shaping
from sametoken.server.llama.schema import NativeRequest, Telemetry, nested
from sametoken.server.llama.slots import Slots
from sametoken.server.llama.timings import PromptProgress, timings
from sametoken.server.words import Event, Source, Words

BUILD = f"b0-sametoken-{__version__}"  # in place of llama-server's build number; clients expect the "b"
STOPS = {"length": "limit", "abort": "none", "error": "none"}
# Names of samplers in the order of their application.
SAMPLER_NAMES = (
    "penalties", "dry", "top_n_sigma", "min_p", "top_k", "top_p", "typ_p", "xtc", "temperature",
)  # fmt: skip


def settings(request: Request) -> dict[str, Any]:
    """The parameters of a request as `generation_settings`."""
    params = request.params
    most, shaping = -1 if params.max_tokens is None else params.max_tokens, params.shaping or Shaping()
    bias = [{"token": token, "bias": None if value <= -100 else value} for token, value in _biases(request).items()]
    return {
        "seed": params.seed if params.seed is not None else -1,
        "temperature": params.temperature, "dynatemp_range": shaping.dynatemp_range,
        "dynatemp_exponent": shaping.dynatemp_exponent,
        "top_k": max(0, params.top_k), "top_p": params.top_p, "min_p": params.min_p, "top_n_sigma": shaping.top_n_sigma,
        "xtc_probability": shaping.xtc_probability, "xtc_threshold": shaping.xtc_threshold,
        "typical_p": shaping.typical_p,
        "repeat_last_n": WHOLE if shaping.repeat_last_n is None else shaping.repeat_last_n,
        "repeat_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty, "dry_multiplier": shaping.dry_multiplier,
        "dry_base": shaping.dry_base, "dry_allowed_length": shaping.dry_allowed_length,
        "dry_penalty_last_n": shaping.dry_penalty_last_n,
        "dry_sequence_breakers": list(shaping.dry_sequence_breakers), "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "adaptive_target": -1.0, "adaptive_decay": 0.9,
        "stop": list(params.stop or ()), "max_tokens": most, "n_predict": most, "n_keep": 0, "n_discard": 0,
        "ignore_eos": params.ignore_eos, "stream": False, "logit_bias": bias, "n_probs": params.logprobs or 0,
        "min_keep": 0, "grammar": "", "samplers": list(SAMPLER_NAMES), "speculative.types": request.method,
        "timings_per_token": False, "post_sampling_probs": False, "lora": [],
    }  # fmt: skip


def _biases(request: Request) -> Mapping[int, float]:
    return request.params.logit_bias or {}


class NativeWords(Words):
    """Replies of /completion and /infill.

    Args:
        body: body of the request.
        source: see `Source`.
        slots: record of the sequence in each slot.
    """

    def __init__(self, body: NativeRequest, source: Source, slots: Slots) -> None:
        slots.note(body.id_slot, source.requests)
        self._body, self._head = body, source.head
        self._tokenizer, self._requests = source.tokenizer, source.requests
        self._choices = source.requests[0].params.n
        self._begun: set[int] = set()
        self._slots = slots
        self._ids: dict[int, list[int]] = {}
        self._progress = PromptProgress(self._requests)
        self.reading = self._news if body.return_progress else None

    def first(self) -> list[Event]:
        """No events, because the first event has text."""
        return []

    def delta(self, chunk: Chunk) -> list[Event]:
        """Events of a chunk: progress of the prompt before the first text, the new text, and a summary at the end."""
        place = chunk.index * self._choices + chunk.choice
        request, events = self._requests[place], list[Event]()
        if self._body.return_progress and place not in self._begun:
            events += self._about_prompt(place, True)
        self._begun.add(place)
        self._ids.setdefault(place, []).extend(chunk.token_ids)
        if chunk.text or chunk.token_ids:
            parts = self._scored(chunk) if self._body.n_probs and chunk.logprobs else [{}]
            event = {**self._part(place, request), "content": chunk.text, "tokens": list(chunk.token_ids)}
            if self._body.timings_per_token:
                event["timings"] = timings(request)
            events += [{**event, **part} for part in parts]
        if chunk.completion is not None:
            events.append(self._whole(place, chunk.completion, streamed=True))
        return events

    def _scored(self, chunk: Chunk) -> list[dict[str, Any]]:
        """One event per token of a chunk; if the tokens' texts do not add up to the chunk's, the last has all text."""
        items = chunk.logprobs or []
        texts = [self._tokenizer.token_bytes(item.token_id).decode(errors="replace") for item in items]
        if "".join(texts) != chunk.text:
            texts = [*[""] * (len(items) - 1), chunk.text]
        return [
            {"content": text, "tokens": [item.token_id], "completion_probabilities": [self._probability(item)]}
            for text, item in zip(texts, items, strict=True)
        ]

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        """No events, because the last event of each choice is its summary."""
        return []

    def whole(self, completions: Sequence[Completion]) -> Any:
        """One object, or a list of objects if there are several prompts or choices."""
        found = [self._whole(place, completion) for place, completion in enumerate(completions)]
        return found[0] if len(found) == 1 else found

    def _part(self, place: int, request: Request) -> dict[str, Any]:
        return {
            "index": place, "content": "", "tokens": [], "stop": False, "id_slot": self._slots.of(request),
            "tokens_predicted": len(self._ids.get(place, ())), "tokens_evaluated": len(request.prompt_ids),
        }  # fmt: skip

    def _news(self) -> list[Event]:
        """Events about the prompts that are being read."""
        return [event for place in range(len(self._requests)) for event in self._about_prompt(place, False)]

    def _about_prompt(self, place: int, read: bool) -> list[Event]:
        request, events = self._requests[place], list[Event]()
        for state in self._progress.news(place, read):
            event = {**self._part(place, request), "prompt_progress": state}
            if self._body.timings_per_token:
                cost = timings(request)
                begun = state["processed"] > state["cache"]
                idle = {name: 0 if isinstance(value, int) else 0.0 for name, value in cost.items()}
                event["timings"] = {**cost, "predicted_n": 0, "predicted_ms": 0.0} if begun else idle
            events.append(event)
        return events

    def _whole(self, place: int, completion: Completion, streamed: bool = False) -> dict[str, Any]:
        body, request = self._body, self._requests[place]
        reply = native_reply(self._tokenizer, self._head.model, place, request, completion)
        if streamed:
            reply |= {"content": "", "tokens": []}
        elif not body.return_tokens:
            reply["tokens"] = []
        reply["id_slot"] = self._slots.of(request)
        reply["generation_settings"] |= {"stream": bool(body.stream), "n_probs": body.n_probs or 0}
        if body.n_probs and not streamed:
            reply["completion_probabilities"] = [self._probability(item) for item in completion.logprobs or ()]
        return nested(reply, body.response_fields) if body.response_fields else reply

    def _probability(self, item: TokenLogprob) -> dict[str, Any]:
        after, most = self._body.post_sampling_probs, self._body.n_probs or 0
        entry = self._entry(item.token_id, item.logprob, bool(after))
        top = [self._entry(token, value, bool(after)) for token, value in item.top[:most]]
        if after:
            top = [each for each in top if each["prob"] > 0]
        return {**entry, "top_probs" if after else "top_logprobs": top}

    def _entry(self, token: int, logprob: float, after: bool) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        entry = {"id": token, "token": data.decode(errors="replace"), "bytes": list(data)}
        value = max(logprob, -9999.0)
        return entry | ({"prob": math.exp(value)} if after else {"logprob": value})


def native_reply(tokenizer: Any, model: str, place: int, request: Request, completion: Completion) -> dict[str, Any]:
    """Whole reply in the form of /completion."""
    reason, stopped = completion.finish_reason, completion.stop_reason
    kind = STOPS.get(reason) or ("word" if isinstance(stopped, str) else "eos")
    most = request.params.max_tokens
    cut = reason == "length" and (most is None or len(completion.token_ids) < most)
    return {
        "index": place,
        "content": completion.text,
        "tokens": list(completion.token_ids),
        "id_slot": 0,
        "stop": True,
        "model": model,
        "tokens_predicted": len(completion.token_ids),
        "tokens_evaluated": len(request.prompt_ids),
        "generation_settings": settings(request),
        "prompt": b"".join(map(tokenizer.token_bytes, request.prompt_ids)).decode(errors="replace"),
        "has_new_line": "\n" in completion.text,
        "truncated": cut,
        "stop_type": kind,
        "stopping_word": stopped if isinstance(stopped, str) else "",
        "tokens_cached": len(request.prompt_ids) + len(completion.token_ids),
        "timings": timings(request),
    }


class LlamaWords(Words):
    """OpenAI's replies with llama-server's additions: the build, timings, progress, and the reply of /completion.

    Args:
        words: writer of OpenAI's reply.
        body: body of the request.
        source: see `Source`.
        slots: record of the sequence in each slot.
        verbose: default of the request's field `verbose`, which adds `__verbose` to the reply.
    """

    def __init__(self, words: Words, body: Any, source: Source, slots: Slots, verbose: bool) -> None:
        self._words, self._source, self._began = words, source, set[int]()
        self._opening: Event = {}
        fields = body if isinstance(body, Telemetry) else None
        self._each = bool(fields and fields.timings_per_token)
        self._progress = PromptProgress(source.requests) if fields and fields.return_progress else None
        self.reading = self._news if self._progress else None
        self._verbose = verbose if fields is None or fields.verbose is None else fields.verbose
        self._choices = source.requests[0].params.n
        slots.note(None if fields is None else fields.id_slot, source.requests)

    def first(self) -> list[Event]:
        """First events of OpenAI's reply, with content null in the delta that has the role."""
        events = [self._named(event) for event in self._words.first()]
        self._opening = events[-1] if events else {}
        return list(events)

    def delta(self, chunk: Chunk) -> list[Event]:
        """Events of a chunk; the last event of a choice has timings."""
        place = chunk.index * self._choices + chunk.choice
        request = self._source.requests[place]
        events = [self._named(event) for event in self._words.delta(chunk)]
        deltas = [event for event in events if str(event.get("type")).endswith(".delta")]  # of /responses
        if events and (self._each or chunk.completion is not None):
            for event in (*(deltas if self._each else ()), events[-1]):
                event["timings"] = timings(request)
        if chunk.completion is not None and self._verbose and events:
            events[-1]["__verbose"] = self._native(place, chunk.completion)
        if self._progress is not None and events and place not in self._began:
            self._began.add(place)
            opening = _without_text(self._opening if "type" in events[0] else events[0])
            events = [{**opening, "prompt_progress": state} for state in self._progress.news(place, True)] + events
        return list(events)

    def _news(self) -> list[Event]:
        """Events about the prompt that is being read; none if OpenAI's stream has no event before the first chunk."""
        if self._progress is None or not self._opening:
            return []
        opening = _without_text(self._opening)
        return [{**opening, "prompt_progress": state} for state in self._progress.news(0, False)]

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        """Events after the last chunk, with timings."""
        events = [self._named(event) for event in self._words.last(completions)]
        if events:
            events[-1]["timings"] = timings(self._source.requests[0])
        return list(events)

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """Whole reply; the additions are made in place, so that a stored response has them too."""
        reply = cast(dict[str, Any], self._words.whole(completions))
        reply |= self._named(reply)
        reply["timings"] = timings(self._source.requests[0])
        if self._verbose:
            reply["__verbose"] = self._native(0, completions[0])
        return reply

    def queued(self) -> dict[str, Any]:
        """Object of a response that waits in the queue."""
        return dict(cast(Any, self._words).queued())

    def _native(self, place: int, completion: Completion) -> dict[str, Any]:
        head, tokenizer, requests, _ = self._source
        return native_reply(tokenizer, head.model, place, requests[place], completion)

    @staticmethod
    def _named(event: Mapping[str, Any]) -> dict[str, Any]:
        named = dict(event)
        if str(named.get("object", "")).startswith(("chat.completion", "text_completion")):
            named["system_fingerprint"] = BUILD
        for choice in named.get("choices", ()):
            delta = choice.get("delta", {})
            if delta.get("role") == "assistant" and delta.get("content") == "":
                delta["content"] = None
        return named


def _without_text(event: Event) -> Event:
    """Copy of an event without text, usage and timings; an event of /responses has no sequence number then."""
    left_out = ("timings", "__verbose", "usage", "sequence_number")
    kept = {name: value for name, value in event.items() if name not in left_out}
    if "choices" in kept:
        kept["choices"] = [
            {"index": each["index"], "delta": {}, "finish_reason": None} if "delta" in each
            else {**each, "text": "", "finish_reason": None} for each in kept["choices"]
        ]  # fmt: skip
    return kept
