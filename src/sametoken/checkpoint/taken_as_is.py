"""Test for a `tokenizer.json` that transformers uses unchanged, so that it can be read without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sametoken.errors import CheckpointError, shown

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokens of fill-in-the-middle, which only settings have that were written from a GGUF file.
GAP = ("fim_pre_token", "fim_suf_token", "fim_mid_token", "fim_rep_token", "fim_sep_token", "fim_pad_token")

# (model_type, tokenizer_class) for which transformers uses tokenizer.json unchanged. For others, transformers rebuilds
# the tokenizer from the vocabulary and rules of its own for the family, which may differ from the file.
TAKEN_AS_IS = {
    ("llama", "PreTrainedTokenizer"),
    ("llama", "TokenizersBackend"),
    ("phi3", "PreTrainedTokenizer"),
    ("phi3", "TokenizersBackend"),
    ("phi3", "LlamaTokenizer"),
}
PLAIN_KEYS = {
    *NAMED, "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens",
    "backend", "chat_template", "clean_up_tokenization_spaces", "extra_special_tokens", "is_local", "legacy",
    "local_files_only", "model_input_names", "model_max_length", "name_or_path", "padding_side", "sp_model_kwargs",
    "spaces_between_special_tokens", "tokenizer_class", "truncation_side", "use_default_system_prompt",
}  # fmt: skip


def is_taken_as_is(
    directory: Path, config: Mapping[str, Any], settings: Mapping[str, Any], content: Mapping[str, Any]
) -> bool:
    """True if `AutoTokenizer` would use tokenizer.json and change nothing in it (transformers 5.23).

    False for malformed files, so that transformers reads them and raises the error.
    """
    try:
        return _is_unchanged(directory, config, settings, content)
    except (TypeError, ValueError, LookupError, AttributeError):
        return False


def _is_unchanged(
    directory: Path, config: Mapping[str, Any], settings: Mapping[str, Any], content: Mapping[str, Any]
) -> bool:
    kind = (config.get("model_type"), str(settings.get("tokenizer_class")).removesuffix("Fast"))
    if kind not in TAKEN_AS_IS or not settings.keys() <= PLAIN_KEYS or content.get("model", {}).get("type") != "BPE":
        return False
    added = content.get("added_tokens", [])
    stated = settings.get("added_tokens_decoder")
    if stated is None:
        # Without this key, transformers reads the older files.
        if any((directory / name).exists() for name in ("special_tokens_map.json", "added_tokens.json")):
            return False
    elif {int(index): token for index, token in stated.items()} != {
        token["id"]: {key: value for key, value in token.items() if key != "id"} for token in added
    }:
        return False
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    special = {token["content"] for token in added if token["special"]}
    named = [*extra, *(settings[key] for key in NAMED if settings.get(key))]
    return isinstance(extra, list) and all(spelling(token) in special for token in named)


def spelling(token: object) -> str:
    """Spelling of a special token, which configurations state as a text or as an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        return text
    raise CheckpointError(
        f"tokenizer_config.json names a special token {shown(token)}, expected a text or an object with its content"
    )
