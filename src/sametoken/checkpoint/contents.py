"""Descriptions of paths that are no checkpoint, from the names of their files: tables, and their lookups.

Only names are needed, so that a repository of the Hub is refused before its weights are downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

RUN_PARTS = ("head", "draft")  # directories of a trained head or draft, in the output of `sametoken train`
CONVERTED = "sametoken.json"  # in the directory of a whole model that transformers' Trainer saved with a head

GGUF = (
    "weights in GGUF, the format of llama.cpp; give the path of one .gguf file, a Hub id with the kind of the file "
    "(owner/name:Q4_K_M), or the original checkpoint with its safetensors files"
)
BESIDE = "expected the directory that holds it beside config.json and the tokenizer"
FILES: dict[str, str] = {
    ".gguf": GGUF,
    ".safetensors": f"weights alone; {BESIDE}",
    ".bin": f"weights alone; {BESIDE}",
    ".pt": f"weights alone; {BESIDE}",
    ".pth": f"weights alone; {BESIDE}",
    ".json": "one file of a checkpoint, or data; expected the directory of a checkpoint",
    ".jsonl": "data, no model; expected the directory of a checkpoint",
    ".parquet": "data, no model; expected the directory of a checkpoint",
    ".onnx": "a model in ONNX, which is not supported; give the original checkpoint",
    ".zip": "an archive; unpack it and give the directory",
    ".tar": "an archive; unpack it and give the directory",
    ".gz": "an archive; unpack it and give the directory",
}
# Descriptions of a directory without config.json or weights by patterns of file names; the first match counts.
DIRECTORIES: dict[str, str] = {
    "adapter_config.json": "a LoRA adapter, which is not supported yet; merge it into its base model (peft's "
    "merge_and_unload), save that and give the result",
    "*.gguf": GGUF,
    "model_index.json": "a diffusion pipeline, which writes no text; give a causal language model",
    "params.json": "weights in the original layout of Meta or Mistral; give the Hugging Face version of the model",
    "consolidated*": "weights in the original layout of Meta or Mistral; give the Hugging Face version of the model",
    "checkpoint-*": "a training run without a finished head or draft; go on with `sametoken train`, or give a model",
    "samples.safetensors": "samples of `sametoken prepare`, no model; give the model, and this to `train --data`",
    "dataset_info*.json": "a data set, no model; give a model",
    "*.parquet": "a data set, no model; give a model",
    "*.arrow": "a data set, no model; give a model",
    "*.jsonl": "a data set, no model; give a model",
    "*.onnx": "a model in ONNX, which is not supported; give the original checkpoint",
    "*.h5": "weights of TensorFlow, which are not supported; give a checkpoint with safetensors files",
    "*.msgpack": "weights of Flax, which are not supported; give a checkpoint with safetensors files",
    "*.engine": "an engine of TensorRT-LLM, which is not supported; give the checkpoint that it was built from",
    "*.safetensors": "weights without their config.json; copy it and the tokenizer beside them",
    "*.bin": "weights without their config.json; copy it and the tokenizer beside them",
    "tokenizer*": "a tokenizer without a model; give the directory of the whole checkpoint",
}
NAMES_SHOWN = 8  # names in an error


def of_file(file: Path) -> str:
    """Describe a file that was given in place of a directory, with a remedy."""
    return FILES.get(file.suffix.lower(), "not a checkpoint; expected a directory with config.json and weights")


def of_names(names: Iterable[str]) -> str:
    """Describe a directory by the names in it, as the end of an error message."""
    names = sorted(name for name in names if not name.startswith("."))
    if not names:
        return "it is empty; expected a Hugging Face checkpoint"
    found = ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )
    known = (words for pattern, words in DIRECTORIES.items() if any(fnmatch(name, pattern) for name in names))
    words = next(known, None)
    return f"found {found}: {words}" if words else f"found {found}; expected a Hugging Face checkpoint"


def of_directory(directory: Path) -> str:
    """Describe a directory on disk as `of_names`, and name a checkpoint within it."""
    try:
        names = [path.name for path in directory.iterdir()]
        inside = sorted(path.name for path in directory.iterdir() if (path / "config.json").is_file())
    except OSError as error:
        return f"it cannot be listed ({error.strerror}); check its permissions"
    words = of_names(names)
    return f"{words}; there is one in {directory / inside[0]}" if inside else words


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Names of architectures in a config.json; empty if it has no list of them."""
    stated = config.get("architectures")
    return [str(name) for name in stated] if isinstance(stated, list) else []


def trained_part(directory: Path) -> Path | None:
    """Head or draft in the output directory of a training run; None for another directory or before one is saved."""
    if (directory / "config.json").exists() and not (directory / CONVERTED).exists():
        return None
    parts = (directory / part for part in RUN_PARTS)
    return next((part for part in parts if (part / "config.json").is_file()), None)
