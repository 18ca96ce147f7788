"""Conversion of the tokenizer in a GGUF file's metadata to tokenizer.json and the settings of a checkpoint.

Sources: llama.cpp's llama-vocab.cpp (splitting, end tokens) and transformers' conversion of SentencePiece models
(merges from scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sametoken.checkpoint.gguf.container import AGAIN
from sametoken.checkpoint.gguf.splitting import BEGUN, NORMALISED, SPLITS, WHOLE_WORDS
from sametoken.checkpoint.taken_as_is import GAP
from sametoken.errors import CheckpointError, UnsupportedModelError, shown

# Tokens that end a text in llama.cpp if they are control tokens of the vocabulary.
END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "</s>")
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
# Names of tokens in files -> keys of the settings; of two names for one key, the later counts.
NAMES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "prefix": "fim_pre_token",
    "suffix": "fim_suf_token", "middle": "fim_mid_token", **{key.removesuffix("_token"): key for key in GAP},
}  # fmt: skip
TOKEN_TYPES = range(7)  # undefined, normal, unknown, control, user defined, unused, byte
NO_TOKEN = (-1, 2**32 - 1)  # ids that mean none
SPACE = "\u2581"
BYTES = 512  # most tokens of a vocabulary without merges: single bytes and control tokens


def tokenizer_files(metadata: Mapping[str, Any], where: object) -> dict[str, dict[str, Any]]:
    """Contents of tokenizer.json, tokenizer_config.json and generation_config.json, from a file's metadata.

    Args:
        metadata: metadata of the file.
        where: the file, for errors.

    Raises:
        UnsupportedModelError: the kind of tokenizer is not implemented.
        CheckpointError: lists of the metadata do not fit each other.
    """
    facts = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens = _texts(facts, "tokens", where)
    types = _types(facts, tokens, where)
    if not isinstance(pre := facts.get("pre"), str | None):
        raise CheckpointError(f"{where}: tokenizer.ggml.pre is {shown(pre)}, expected a text")
    model = facts.get("model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{where}: a tokenizer of kind {shown(model)} is not supported, expected gpt2 or llama"
        )
    for name in (key.removesuffix("_token_id") for key in facts if key.endswith("_token_id")):
        _token(facts, name, tokens, where)
    bos, eos = _token(facts, "bos", tokens, where), _token(facts, "eos", tokens, where)
    content = _byte_pairs(facts, tokens, where) if model == "gpt2" else _pieces(facts, tokens, types, where)
    content["added_tokens"] = [
        _added(i, token, kind) for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]  # fmt: skip
    begins = bos if facts.get("add_bos_token", model == "llama" or pre in BEGUN) else None
    content["post_processor"] = _around(begins, eos if facts.get("add_eos_token", False) else None, tokens)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in NAMES.items():
        index = _token(facts, name, tokens, where)
        if index is not None:
            settings[key] = tokens[index]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    special = {token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL}
    ids = [eos, *(_token(facts, name, tokens, where) for name in ("eot", "eom"))]
    ids += [tokens.index(end) for end in END_TOKENS if end in special]
    end_ids = list(dict.fromkeys(index for index in ids if index is not None))
    return {
        "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, **content},
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": end_ids},
    }


def _list(facts: Mapping[str, Any], key: str, where: object) -> list[Any]:
    value = facts.get(key)
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: tokenizer.ggml.{key} is {shown(value)}, expected a list")
    return value


def _types(facts: Mapping[str, Any], tokens: Sequence[str], where: object) -> list[int]:
    """Type of each token."""
    types = _list(facts, "token_type", where) if facts.get("token_type") else [1] * len(tokens)
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise CheckpointError(
            f"{where}: {len(tokens)} tokens with {len(types)} types, expected unique tokens, one each; {AGAIN}"
        )
    if other := set(types).difference(TOKEN_TYPES):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.token_type has {shown(next(iter(other)))}, expected 0 to {TOKEN_TYPES[-1]}; "
            f"{AGAIN}"
        )
    return types


def _token(facts: Mapping[str, Any], name: str, tokens: Sequence[str], where: object) -> int | None:
    """Id of a named token; None if the file has none."""
    value = facts.get(f"{name}_token_id")
    if value is None or value in NO_TOKEN:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        words = f"{name}_token_id is {shown(value)}, expected one of {len(tokens)} tokens"
        raise CheckpointError(f"{where}: {words}; {AGAIN}")
    return value


def _added(index: int, token: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": kind != USER_DEFINED}


def _around(first: int | None, last: int | None, tokens: Sequence[str]) -> dict[str, Any]:
    """Post-processor that puts the tokens `first` and `last` around a text."""
    named = [
        None if index is None else {"SpecialToken": {"id": tokens[index], "type_id": 0}} for index in (first, last)
    ]
    single: list[Any] = [named[0], {"Sequence": {"id": "A", "type_id": 0}}, named[1]]
    pair = [*single[:2], {"Sequence": {"id": "B", "type_id": 1}}, single[2]]
    special = {
        tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
        for index in (first, last)
        if index is not None
    }
    kept = [[each for each in steps if each is not None] for steps in (single, pair)]
    return {"type": "TemplateProcessing", "single": kept[0], "pair": kept[1], "special_tokens": special}


def _byte_pairs(facts: Mapping[str, Any], tokens: Sequence[str], where: object) -> dict[str, Any]:
    """Parts of tokenizer.json for byte-level BPE."""
    kind = facts.get("pre")
    if kind not in SPLITS:
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.pre is {shown(kind)}, which is not supported, expected one of {', '.join(SPLITS)}"
        )
    expressions = SPLITS[kind]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": expressions in ((), ("digits",)),
    }
    splits = [_split(expression) for expression in expressions]
    return {
        "normalizer": {"type": "NFC"} if kind in NORMALISED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": kind in WHOLE_WORDS, "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges(facts, tokens, where),
        },
    }  # fmt: skip


def _split(expression: str) -> dict[str, Any]:
    if expression == "digits":
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _texts(facts: Mapping[str, Any], name: str, where: object) -> list[str]:
    values = _list(facts, name, where)
    other = next((each for each in values if not isinstance(each, str)), None)
    if other is not None:
        raise CheckpointError(f"{where}: tokenizer.ggml.{name} has {shown(other)}, expected texts")
    return values


def _merges(facts: Mapping[str, Any], tokens: Sequence[str], where: object) -> list[list[str]]:
    """Merges in order; each joins two tokens to a third."""
    pairs, known = [_pair(merge, where) for merge in _texts(facts, "merges", where)], set(tokens)
    if not pairs and len(tokens) > BYTES:
        raise CheckpointError(f"{where}: no merges (tokenizer.ggml.merges) for {len(tokens)} tokens; {AGAIN}")
    for first, second in pairs:
        if first not in known or second not in known or first + second not in known:
            words = f"{where}: the merge of {shown(first)} and {shown(second)} has a part or a result that is no token"
            raise CheckpointError(f"{words}; {AGAIN}")
    return pairs


def _pair(merge: str, where: object) -> list[str]:
    first, space, second = merge.partition(" ")
    if not (first and space and second) or " " in second:
        raise CheckpointError(f"{where}: the merge {shown(merge)}, expected two parts")
    return [first, second]


def _pieces(facts: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: object) -> dict[str, Any]:
    """Parts of tokenizer.json for SentencePiece's BPE, which merges the pair with the highest score first."""
    scores, vocab = _list(facts, "scores", where), {token: i for i, token in enumerate(tokens)}
    if len(scores) != len(tokens):
        raise CheckpointError(f"{where}: {len(scores)} scores for {len(tokens)} tokens, expected one each")
    merges = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            continue
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, pair) for pair in splits]
    merges.sort(key=lambda found: (found[0], len(found[1][0]), len(found[1][1])), reverse=True)
    prefix = facts.get("add_space_prefix", True)
    unknown = _token(facts, "unknown", tokens, where)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {
            "type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if prefix else []), replaced]
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
            "ignore_merges": False, "vocab": vocab, "merges": [list(pair) for _, pair in merges],
        },
    }  # fmt: skip
