"""Conversion of a tokenizer to the metadata of a GGUF file: the reverse of `tokenizer`, and checked with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sametoken.checkpoint.gguf.tokenizer import CONTROL, UNKNOWN, USER_DEFINED, tokenizer_files
from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.tokenizer import BYTE_TOKEN, load_tokenizer
from sametoken.errors import CheckpointError, UnsupportedModelError

NORMAL, UNUSED, BYTE = 1, 5, 6
TOKENIZER = "tokenizer.ggml."
# Values of tokenizer.ggml.pre that split texts differently, the frequent ones first; a file must have one.
KINDS = (
    "llama-bpe", "qwen2", "gpt-2", "tekken", "smollm", "smaug-bpe", "falcon3", "gpt-4o", "deepseek-v3", "qwen35",
    "glm4",
)  # fmt: skip
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def vocabulary(directory: Path, size: int, texts: Sequence[str]) -> dict[str, Any]:
    """GGUF metadata of a checkpoint's tokenizer.

    Args:
        directory: checkpoint directory.
        size: rows of the embedding.
        texts: texts that the tokenizer of the metadata must split as the checkpoint's does.

    Raises:
        UnsupportedModelError: no kind of tokenizer in GGUF files splits the texts alike.
        CheckpointError: tokenizer.json is damaged.
    """
    content = read_json(directory / "tokenizer.json")
    model = (content or {}).get("model", {})
    if content is None or model.get("type") != "BPE":
        raise UnsupportedModelError(f"{directory}: GGUF files need a tokenizer.json of BPE")
    tokenizer = load_tokenizer(directory)
    info = tokenizer.info()
    common = _tokens(content, size)
    ids = {token: number for number, token in enumerate(common[f"{TOKENIZER}tokens"])}
    for key, name in NAMED.items():
        if info.get(key) in ids:
            common[f"{TOKENIZER}{name}_token_id"] = ids[info[key]]
    if isinstance(info["chat_template"], str):
        common["tokenizer.chat_template"] = info["chat_template"]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    with_bos, without = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    common[f"{TOKENIZER}add_bos_token"] = with_bos != without and with_bos[0] == common.get(f"{TOKENIZER}bos_token_id")
    expected = [(tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    for candidate in _candidates(common, merges, bool(model.get("byte_fallback"))):
        if _encoded(candidate, directory, texts) == expected:
            return candidate
    raise UnsupportedModelError(
        f"{directory}: no tokenizer that GGUF files can name splits texts as this one does; expected one of llama's or "
        f"of kind {', '.join(KINDS)}"
    )


def _tokens(content: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Tokens and their types; rows without a token get an unused one."""
    tokens = {number: token for token, number in content["model"]["vocab"].items()}
    types = {number: BYTE if BYTE_TOKEN.fullmatch(token) else NORMAL for number, token in tokens.items()}
    for added in content.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    unknown = content["model"].get("unk_token")
    if unknown is not None and unknown in tokens.values():
        types[next(number for number, token in tokens.items() if token == unknown)] = UNKNOWN
    if tokens and max(tokens) >= size:
        raise CheckpointError(f"tokenizer.json has token {max(tokens)}, the embedding of the model {size} rows")
    return {
        f"{TOKENIZER}tokens": [tokens.get(number, f"[PAD{number}]") for number in range(size)],
        f"{TOKENIZER}token_type": [types.get(number, UNUSED) for number in range(size)],
    }


def _candidates(common: Mapping[str, Any], merges: Sequence[str], pieces: bool) -> Iterator[dict[str, Any]]:
    if not pieces:
        for kind in KINDS:
            yield {**common, f"{TOKENIZER}model": "gpt2", f"{TOKENIZER}pre": kind, f"{TOKENIZER}merges": list(merges)}
        return
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    last = len(merges)
    scores = [-float(ranks.get(token, last)) for token in common[f"{TOKENIZER}tokens"]]
    for prefix in (True, False):
        spaced = {f"{TOKENIZER}add_space_prefix": prefix, f"{TOKENIZER}scores": scores}
        yield {**common, f"{TOKENIZER}model": "llama", f"{TOKENIZER}pre": "default", **spaced}


def _encoded(candidate: Mapping[str, Any], where: Path, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Ids of texts with and without special tokens, from the tokenizer of the metadata."""
    read = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(candidate, where)["tokenizer.json"]))
    return [(read.encode(text).ids, read.encode(text, add_special_tokens=False).ids) for text in texts]
