"""vLLM's `--speculative-config` as data, and its JSON read.

Source: `SpeculativeConfig` of vLLM 0.6 to 0.33.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sametoken.dialects.rules import NoEffect, Only, Sets, Table, Translation, translate
from sametoken.errors import ConfigError

OPTION = "--speculative-config"
METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "draft_model": "draft_target",
    "suffix": "suffix",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
}
NO_METHODS = {
    "mtp": "prediction layers inside the target are not supported",
    "mlp_speculator": "such heads are not supported",
    "custom_class": "implement sametoken.drafters.base.Drafter",
    "extract_hidden_states": "hidden states are dumped by sametoken prepare",
    "dflash": "block diffusion drafts are not supported",
    "dspark": "block diffusion drafts are not supported",
}
INHERITED = "the draft is computed as the target is; leave it out"
LOSSY = "only the exact rule is offered, which accepts what the target draws; leave it out"
CACHE_IS_SHARED = "no page of the prefix cache is given up for drafts"


def method(stated: Any) -> str:
    """Our method.

    Raises:
        ValueError: there is none.
    """
    known = f"expected one of {', '.join(METHODS)}"
    if not isinstance(stated, str) or stated not in METHODS:
        name = "mtp" if str(stated).endswith("_mtp") else stated
        raise ValueError(f"{NO_METHODS[name]}; {known}" if isinstance(name, str) and name in NO_METHODS else known)
    return METHODS[stated]


def schedule(stated: Any) -> dict[int, int]:
    """[[first, last, K], ...] as {last: K}.

    Raises:
        ValueError: ranges do not follow each other from batch size 1 on.
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


COMMON: Table = {
    "method": Sets("method", method),
    "model": Sets("draft"),
    "num_speculative_tokens": Sets("max_draft_len"),
    "revision": Sets("draft_revision"),
    "num_speculative_tokens_per_batch_size": Sets("draft_len_schedule", schedule),
    "disable_by_batch_size": Sets("max_concurrency"),
    "draft_tensor_parallel_size": Only(
        (1,), "tensor parallelism is not implemented yet: the draft runs in one process; set it to 1"
    ),
    "enforce_eager": NoEffect(bool, "drafts are captured with the target's step; --enforce-eager turns both off"),
    "quantization": Only((), "round a draft model's weights with --draft-quantization int8"),
    "draft_lm_head_quantization": Only((), INHERITED),
    "moe_backend": Only(("auto",), INHERITED),
    "attention_backend": Only(("auto",), INHERITED),
    "kv_cache_dtype": Only(("auto",), INHERITED),
    "code_revision": NoEffect(str, "code from a checkpoint is never run"),
    "draft_load_config": Only((), "weights are loaded from the draft's files; leave it out"),
    "max_model_len": NoEffect(int, "a draft goes on to the end of the target's context"),
    "index_share_for_mtp_iteration": NoEffect(bool, "it is for MTP"),
    "disable_padded_drafter_batch": NoEffect(bool, "it changes how a batch is laid out, not what is drafted"),
    "disable_eagle_block_drop": NoEffect(bool, CACHE_IS_SHARED),
    "disable_lookahead_block_hashes": NoEffect(bool, CACHE_IS_SHARED),
    "use_local_argmax_reduction": NoEffect(bool, "the model runs in one process"),
    "use_heterogeneous_vocab": Only((False,), "a draft must have the target's tokenizer"),
    "parallel_drafting": Only((False,), "parallel drafts are not supported"),
    "speculative_token_tree": Only((), "set --tree-top-k and --max-total-draft-tokens"),
    "rejection_sample_method": Only(("standard",), LOSSY),
    "acceptance_method": Only(("rejection_sampler",), LOSSY),
    "synthetic_acceptance_rates": Only((), LOSSY),
    "synthetic_acceptance_length": Only((), LOSSY),
    "fly_window_size": Only((), LOSSY),
    "fly_entropy_threshold": Only((), LOSSY),
    "fly_entropy_top_k": Only((), LOSSY),
    "draft_sample_method": NoEffect(str, "a draft is drawn with the noise that the target draws with"),
    "enable_adaptive_verification": Only((False,), "every draft token is verified; --adaptive chooses the length"),
    "dspark_draft_topk": Only((), "block diffusion drafts are not supported"),
    "xpress_topc": Only((), "block diffusion drafts are not supported"),
}
NGRAM: Table = {
    "prompt_lookup_max": Sets("max_matching_ngram_size"),
    "prompt_lookup_min": Sets("min_matching_ngram_size"),
}
SUFFIX: Table = {
    name: Sets(name)
    for name in (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    )
}
OF_METHODS: dict[str, Table] = {"ngram": NGRAM, "suffix": SUFFIX}


def read_json(text: str) -> Translation:
    """What the value of `--speculative-config` says.

    Raises:
        ConfigError: it is not JSON, or a key or value is not possible here.
    """
    try:
        stated = json.loads(text, object_pairs_hook=_once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ConfigError(f"{OPTION} is not JSON: {error}; expected for example " + '{"method": "ngram"}') from error
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{OPTION} {text}: expected an object, for example " + '{"method": "ngram"}')
    if stated.get("method") is None and stated.get("model") is None:
        raise ConfigError(f"{OPTION} {text}: expected method, or model with the draft; got neither")
    named = stated.get("method")
    ours = METHODS.get(named) if isinstance(named, str) else None
    company = {key: f"is for method {other}" for other, table in OF_METHODS.items() for key in table}
    return translate(stated, {**COMMON, **OF_METHODS.get(ours or "", {})}, f"{OPTION} ", company)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{OPTION}: the key {name!r} stands twice; leave one of them out")
    return dict(pairs)
