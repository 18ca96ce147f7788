"""Writer of GGUF files: metadata, tokenizer, names and order of rows; the reverse of `config` and `container`.

The tokenizer of the metadata is read again, and must split texts like that of the checkpoint.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from sametoken.checkpoint.gguf.blocks import UNQUANTISED_TYPES
from sametoken.checkpoint.gguf.config import INSIDE, OUTSIDE
from sametoken.checkpoint.gguf.container import ARRAY, MAGIC, STRING, TYPES
from sametoken.checkpoint.gguf.families import FAMILIES
from sametoken.checkpoint.gguf.tokenizer import CONTROL, UNKNOWN, USER_DEFINED, tokenizer_files
from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.tokenizer import BYTE_TOKEN
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.errors import CheckpointError, UnsupportedModelError
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Code, Coded

NORMAL, UNUSED, BYTE = 1, 5, 6
TOKENIZER = "tokenizer.ggml."
# Values of tokenizer.ggml.pre that split texts differently, the frequent ones first; a file must have one.
KINDS = (
    "llama-bpe", "qwen2", "gpt-2", "tekken", "smollm", "smaug-bpe", "falcon3", "gpt-4o", "deepseek-v3", "qwen35",
    "glm4",
)  # fmt: skip
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ALIGNMENT = 32
ARCHITECTURES = ("llama", "qwen2", "qwen3")
NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
FILE_TYPES = {"gguf-q8_0": 7, "gguf-q4_0": 2}  # of llama.cpp's general.file_type
UINT32, FLOAT32, BOOL, INT32 = 4, 6, 7, 5


def architecture_of(config: ModelConfig) -> str:
    """Name of a model's architecture in llama.cpp.

    Raises:
        UnsupportedModelError: the architecture cannot be written, or GGUF cannot state its RoPE, windows or biases.
    """
    found = next((name for name in ARCHITECTURES if FAMILIES[name].name == config.architecture), None)
    if found is None or config.experts is not None:
        raise UnsupportedModelError(
            f"{config.architecture} cannot be written as GGUF, expected one of "
            f"{', '.join(FAMILIES[name].name for name in ARCHITECTURES)}; use another --format"
        )
    if config.rope.kind not in ("default", "linear"):
        raise UnsupportedModelError(f"RoPE of kind {config.rope.kind} cannot be written as GGUF; use another --format")
    if config.activation != "silu" or any(window is not None for window in config.sliding_windows) or config.mlp_bias:
        raise UnsupportedModelError(
            "another activation than silu, sliding windows and biases of the MLP cannot be written as GGUF; use "
            "another --format"
        )
    return found


def facts(config: ModelConfig, name: str, format: str) -> dict[str, Any]:
    """Metadata of a model, without its tokenizer."""
    architecture = architecture_of(config)
    stated: dict[str, Any] = {
        "context_length": config.max_position, "embedding_length": config.hidden_size,
        "block_count": config.num_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps), "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta), "vocab_size": config.vocab_size,
    }  # fmt: skip
    if config.rope.kind == "linear":
        stated |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope.factor)}
    general = {"architecture": architecture, "name": name, "file_type": FILE_TYPES[format], "quantization_version": 2}
    return {f"general.{key}": value for key, value in general.items()} | {
        f"{architecture}.{key}": value for key, value in stated.items()
    }


class GgufWriter:
    """Writer of a GGUF file, tensor by tensor; until `finish`, the data are in a second file next to it.

    Args:
        file: path of the GGUF file.
        config: configuration of a model that `architecture_of` accepts.
    """

    def __init__(self, file: Path, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self._data = file.with_suffix(".data")
        self._paired = FAMILIES[architecture_of(config)].paired
        self._infos: list[tuple[str, tuple[int, ...], int, int]] = []  # name, shape, type, start of the data
        self._at = 0
        self._data.touch()

    def add(self, name: str, value: Tensor | Coded) -> None:
        """Add a tensor under its name in a Hugging Face checkpoint; vectors become float32.

        Raises:
            UnsupportedModelError: llama.cpp has no name for the tensor.
        """
        ours = written_name(name)
        if (self._paired and ".attn_q." in ours) or (self._paired and ".attn_k." in ours):
            heads = self._config.num_heads if ".attn_q." in ours else self._config.num_kv_heads
            order = torch.arange(value.shape[0]).view(heads, 2, -1).transpose(1, 2).flatten()
            value = value.outputs(order) if isinstance(value, Coded) else value[order]
        if isinstance(value, Coded):
            kind, data = ("Q8_0", _q8_0(value)) if value.code is Code.INT8 else ("Q4_0", _q4_0(value))
        else:
            value = value.to(torch.float32) if value.dim() == 1 else value
            kind = next(kind for kind, dtype in UNQUANTISED_TYPES.items() if dtype == value.dtype)
            data = value.contiguous().view(torch.uint8)
        self._infos.append((ours, tuple(value.shape), NUMBERS[kind], self._at))
        with self._data.open("ab") as opened:
            size = opened.write(data.flatten().numpy().data)
            self._at += size + opened.write(bytes(-size % ALIGNMENT))

    def finish(self, metadata: Mapping[str, Any]) -> int:
        """Write the file, and return its size in bytes."""
        head = [MAGIC, struct.pack("<IQQ", 3, len(self._infos), len(metadata))]
        head += [_text(key) + _value(value) for key, value in metadata.items()]
        for name, shape, kind, start in self._infos:
            sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            head.append(_text(name) + sizes + struct.pack("<IQ", kind, start))
        whole = b"".join(head)
        with self._file.open("wb") as target, self._data.open("rb") as data:
            target.write(whole + bytes(-len(whole) % ALIGNMENT))
            shutil.copyfileobj(data, target, 1 << 24)
        self._data.unlink()
        return self._file.stat().st_size


def written_name(name: str) -> str:
    """Name in llama.cpp of a tensor of a Hugging Face checkpoint.

    Raises:
        UnsupportedModelError: GGUF files have no name for the tensor.
    """
    module, _, kind = name.rpartition(".")
    for ours, theirs in OUTSIDE.items():
        if module == theirs:
            return f"{ours}.{kind}"
    parts = module.split(".", 3)
    found = next((ours for ours, theirs in INSIDE.items() if parts[-1] == theirs), None)
    if found is None or len(parts) != 4 or parts[:2] != ["model", "layers"]:
        raise UnsupportedModelError(f"{name} has no name in GGUF files; use another --format")
    return f"blk.{parts[2]}.{found}.{kind}"


def _q8_0(weight: Coded) -> Tensor:
    """[out, blocks, 34] bytes: a float16 scale, then 32 codes."""
    scale = weight.scale.contiguous().unsqueeze(2).view(torch.uint8)
    return torch.cat([scale, weight.codes.contiguous().view(torch.uint8).view(len(weight.codes), -1, 32)], 2)


def _q4_0(weight: Coded) -> Tensor:
    """[out, blocks, 18] bytes: a float16 scale, then 16 codes in the low four bits and 16 above them."""
    nibbles = torch.stack([weight.codes & 15, weight.codes >> 4], 2).view(len(weight.codes), -1, 32)
    scale = weight.scale.contiguous().unsqueeze(2).view(torch.uint8)
    return torch.cat([scale, nibbles[..., :16] | nibbles[..., 16:] << 4], 2)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """Bytes of a metadata value, after its type; a list has the type of its first item, an empty one that of texts."""
    if isinstance(value, list):
        kind, item = _kind(value[0] if value else "")
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(map(item, value))
    kind, item = _kind(value)
    return struct.pack("<I", kind) + item(value)


def _kind(value: Any) -> tuple[int, Callable[[Any], bytes]]:
    if isinstance(value, str):
        return STRING, _text
    if isinstance(value, bool):
        return BOOL, struct.Struct("<?").pack
    if isinstance(value, float):
        return FLOAT32, struct.Struct("<f").pack
    return (UINT32, struct.Struct("<I").pack) if value >= 0 else (INT32, struct.Struct("<i").pack)


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
