"""Conversion of Dynamo's requests to sampling parameters, and of chunks to Dynamo's format; pure functions.

Dynamo's frontend applies the chat template, tokenizes, detokenizes, and finds stop strings; a worker gets token ids
only. A migrated request has as its prompt the client's prompt and the tokens of another worker, without a boundary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import TokenLogprob
from sametoken.errors import RequestError
from sametoken.options.sampling import SamplingParams, StructuredOutputs

SAME = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p")
FORMS = ("json", "regex", "choice", "grammar")
# Unsupported keys by group of the request, with the values that have no effect. Several choices are unsupported because
# Dynamo's frontend cuts all of them at the end of the first one that ends.
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "sampling_options": {"n": (1,), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1, 1.0)},
    "stop_conditions": {"max_thinking_tokens": ()},
    "output_options": {"prompt_logprobs": ()},
}
MEDIA = ("multi_modal_data", "prompt_embeds", "prefill_result", "encoder_result")  # for other roles of a worker


def sampling_of(
    request: Mapping[str, Any], recommended: Mapping[str, Any], eos: Sequence[int], key: str
) -> SamplingParams:
    """Sampling parameters of a request, with its stop conditions.

    Args:
        request: request of the frontend; a key with the value None is absent.
        recommended: the model's recommended values, for absent keys.
        eos: end tokens of the model.
        key: id of the request, which a migration preserves. A request without a seed gets one from this id, so that
            the noise stays equal after a migration.

    Raises:
        RequestError: a key is unsupported, or a value is refused.
    """
    groups: dict[str, dict[str, Any]] = {
        name: {key: value for key, value in (request.get(name) or {}).items() if value is not None}
        for name in ("sampling_options", "stop_conditions", "output_options")
    }
    _refuse(request, groups)
    asked, stops = groups["sampling_options"], groups["stop_conditions"]
    ignore_eos = stops.get("ignore_eos", False)
    stop_ids = {token for name in _lists(stops) for token in stops[name]} - (set(eos) if ignore_eos else set())
    seed = asked.get("seed")
    given = {name: _shortest(asked[name]) for name in SAME if name in asked}
    return SamplingParams(
        **{**recommended, **given},
        max_tokens=stops.get("max_tokens"),
        min_tokens=stops.get("min_tokens", 0),
        stop_token_ids=sorted(stop_ids),
        ignore_eos=ignore_eos,
        seed=seed_of(key) if seed is None else seed,
        logprobs=groups["output_options"].get("logprobs"),
        structured_outputs=_form(asked.get("guided_decoding")),
    )


def seed_of(key: str) -> int:
    """Seed of a request without one, from its id."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


def chunk_of(chunk: Chunk) -> dict[str, Any]:
    """Chunk in the format of the frontend, with several tokens if draft tokens were accepted.

    It has no token counts: those of the frontend also include the tokens before a migration.
    """
    said: dict[str, Any] = {"token_ids": chunk.token_ids, "index": chunk.choice}
    if chunk.logprobs and chunk.token_ids:
        said["log_probs"] = [each.logprob for each in chunk.logprobs]
        if any(each.top for each in chunk.logprobs):
            said["top_logprobs"] = [_top(each) for each in chunk.logprobs]
    if chunk.completion is not None:
        said["finish_reason"] = _reason(chunk.completion)
    return said


def _reason(completion: Completion) -> str:
    if completion.finish_reason == "stop":
        return "eos" if completion.stop_reason is None else "stop"
    return "cancelled" if completion.finish_reason == "abort" else completion.finish_reason


def _top(said: TokenLogprob) -> list[dict[str, Any]]:
    """Alternatives of a token, without texts, which the frontend adds."""
    best = [
        {"rank": rank, "token_id": token, "token": None, "logprob": value}
        for rank, (token, value) in enumerate(said.top, start=1)
    ]
    if said.token_id in (each["token_id"] for each in best):
        return best
    return [{"rank": said.rank, "token_id": said.token_id, "token": None, "logprob": said.logprob}, *best]


def _refuse(request: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> None:
    for name in MEDIA:
        if request.get(name):
            raise RequestError("served models read token ids only; leave it out", field=name)
    for group, keys in REFUSED.items():
        for name, harmless in keys.items():
            if name in groups[group] and groups[group][name] not in harmless:
                words = f"got {groups[group][name]!r}, which this worker does not support"
                raise RequestError(words, field=name, advice="leave it out")


def _lists(stops: Mapping[str, Any]) -> list[str]:
    return [name for name in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden") if name in stops]


def _form(guided: Mapping[str, Any] | None) -> StructuredOutputs | None:
    """Grammar of the output; None if it is free."""
    given = {name: value for name, value in (guided or {}).items() if value is not None and name != "backend"}
    for name in given:
        if name not in FORMS:
            expected = f"one of {', '.join(FORMS)}"
            raise RequestError(f"got {name}, expected {expected}", field="guided_decoding", advice="leave it out")
    return StructuredOutputs(**given) if given else None


def _shortest(value: Any) -> Any:
    """Shortest decimal number with an equal float32; Dynamo transports 0.7 as 0.699999988079071.

    With this number the tokens equal those of `sametoken serve`.
    """
    if not isinstance(value, float):
        return value
    stored = struct.pack("f", value)
    return next(
        (each for digits in range(1, 10) if struct.pack("f", each := float(f"{value:.{digits}g}")) == stored), value
    )
