"""Keys of vLLM's `--speculative-config` as data, and the readers of its JSON and of `--hf-overrides`.

Source: `SpeculativeConfig` of vLLM 0.6 to 0.33.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from sametoken import kinds
from sametoken.dialects.rules import Sets, Table, Translation, table, translate
from sametoken.dialects.trtllm import DIFFUSION, NO_DECODING_TYPES, NO_PART, ONE_PROCESS
from sametoken.errors import ConfigError
from sametoken.options.rope import read_rope_scaling
from sametoken.options.serving import elsewhere

OPTION = "--speculative-config"
METHODS = {name: ours for name, (ours, *_) in kinds.aliases("vllm").items()}
NO_METHODS = {
    **{name: NO_DECODING_TYPES[name] for name in ("pard", "dflash", "dspark")},
    "mlp_speculator": "such heads are not supported",
    "custom_class": "implement sametoken.drafters.base.Drafter",
    "extract_hidden_states": NO_DECODING_TYPES["savestate"],
}
LACKING = ("pard", "dflash", "dspark", "mlp_speculator")  # those that make drafts of the model's own tokens
# Keys of --hf-overrides: those with RoPE in them, those of RoPE at the top level, and those without effect on texts.
WITH_ROPE = ("rope_scaling", "rope_parameters")
OF_ROPE = ("rope_theta", "max_position_embeddings", "original_max_position_embeddings")
INNER = "text_config"  # keys of the text part of a model that reads images
IDLE = ("max_model_len", "mrope_section", "mrope_interleaved")


def without_part(stated: Any) -> str | None:
    """Reason why this engine makes no drafts of one of vLLM's methods; None for other values."""
    if not isinstance(stated, str):
        return None
    return NO_METHODS[stated] if stated in LACKING else None


def method(stated: Any) -> str:
    """Our method for one of vLLM's.

    Raises:
        ValueError: no method of ours corresponds to it.
    """
    known = f"expected one of {', '.join(METHODS)}"
    name = plain_method(stated)
    if name not in METHODS:
        raise ValueError(f"{NO_METHODS[name]}; {known}" if name in NO_METHODS else known)
    return METHODS[name]


def plain_method(stated: Any) -> str:
    """Name of a method without the family of a prediction block: older releases have one name for each family."""
    plain = stated.rpartition("_")[2] if isinstance(stated, str) else ""
    return plain if kinds.inside(METHODS.get(plain)) else stated if isinstance(stated, str) else ""


def schedule(stated: Any) -> dict[int, int]:
    """Draft length K by largest batch size, from vLLM's [[first batch size, last batch size, K], ...].

    Raises:
        ValueError: the ranges leave a gap, overlap, or do not begin at batch size 1.
    """
    table, expected = {}, 1
    for entry in stated if isinstance(stated, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 3 or not all(type(number) is int for number in entry):
            raise ValueError("expected [[first batch size, last, tokens], ...]")
        first, last, length = entry
        if first != expected or last < first:
            raise ValueError(f"expected ranges one after another from 1 on; {entry} should begin at {expected}")
        table[last], expected = length, last + 1
    return table


COMMON = table(
    elsewhere("vllm"),
    {
        "drafts are part of the target's CUDA graph; --enforce-eager turns graphs off": "enforce_eager:bool",
        "code from a checkpoint is never run": "code_revision:str",
        "drafts are made up to the end of the target's context": "max_model_len:int",
        NO_PART: "index_share_for_mtp_iteration:bool disable_padded_drafter_batch:bool "
            "disable_eagle_block_drop:bool disable_lookahead_block_hashes:bool",
        ONE_PROCESS: "use_local_argmax_reduction:bool",
        "a draft is drawn with the target's noise": "draft_sample_method:str",
    },
    {
        "round a draft model's weights with --draft-quantization int8": "quantization",
        "the draft has the same setting as the target; leave it out":
            "draft_lm_head_quantization moe_backend=auto attention_backend=auto kv_cache_dtype=auto",
        "weights are loaded from the draft's files; leave it out": "draft_load_config",
        "a draft must have the target's tokenizer": "use_heterogeneous_vocab=false",
        NO_METHODS["pard"]: "parallel_drafting=false",
        "set --tree-top-k and --max-total-draft-tokens": "speculative_token_tree",
        "only exact acceptance is supported: a guess must equal the token that the target draws; leave it out":
            "rejection_sample_method=standard acceptance_method=rejection_sampler synthetic_acceptance_rates "
            "synthetic_acceptance_length fly_window_size fly_entropy_threshold fly_entropy_top_k",
        "every draft token is verified; --adaptive chooses the length": "enable_adaptive_verification=false",
        DIFFUSION: "dspark_draft_topk xpress_topc",
    },
    method=Sets("method", method),
    num_speculative_tokens_per_batch_size=Sets("draft_len_schedule", schedule),
)  # fmt: skip
# Keys that belong to one method, by our name of the method.
OF_METHODS: dict[str, Table] = {
    ours: table(keys, {}, {}) for name, ours in METHODS.items() if (keys := elsewhere("vllm", name))
}


def overrides(stated: Any) -> dict[str, Any] | None:
    """RoPE of the target from keys of config.json, those of `rope_parameters` and those of the top level.

    Raises:
        ValueError: it is no JSON object, or a key is none of RoPE and the context; the message names the key.
    """
    if isinstance(stated, str):
        try:
            stated = json.loads(stated)
        except (ValueError, RecursionError):
            stated = None
    if not isinstance(stated, Mapping):
        raise ValueError("expected a JSON object with keys of config.json")  # noqa: TRY004 - of an option
    found: dict[str, Any] = {}
    for name, value in stated.items():
        if name == INNER:
            found |= overrides(value) or {}
        elif name in WITH_ROPE:
            inner = read_rope_scaling(value) if isinstance(value, str) else value
            if inner is not None and not isinstance(inner, Mapping):
                raise ValueError(f"{name} is {json.dumps(inner)}, expected a JSON object")
            found |= {key: each for key, each in (inner or {}).items() if key not in IDLE}
        elif name in OF_ROPE:
            found[name] = value
        elif name not in IDLE:
            expected = ", ".join((*WITH_ROPE, *OF_ROPE))
            raise ValueError(f"{name} is the checkpoint's own, expected some of {expected}; leave {name} out")
    return read_rope_scaling(found)


def read_json(text: str, origin: str = OPTION) -> Translation:
    """Translate the value of `--speculative-config`.

    Args:
        origin: name of the option for messages.

    Raises:
        ConfigError: it is not JSON, or a key or value is not possible here.
    """
    try:
        stated = json.loads(text, object_pairs_hook=partial(_once, origin))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ConfigError(f"{origin} is not JSON: {error}; expected for example " + '{"method": "ngram"}') from error
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{origin} {text}: expected an object, for example " + '{"method": "ngram"}')
    if stated.get("method") is None and stated.get("model") is None:
        raise ConfigError(f"{origin} {text}: expected method, or model with the draft; got neither")
    ours = METHODS.get(plain_method(stated.get("method")))
    company = {key: f"is for method {other}" for other, table in OF_METHODS.items() for key in table}
    return translate(stated, {**COMMON, **OF_METHODS.get(ours or "", {})}, f"{origin} ", company)


def _once(origin: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{origin}: the key {name!r} occurs twice; leave one of them out")
    return dict(pairs)
