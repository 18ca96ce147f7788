"""Tokenizers of GGUF files compared with the token ids that llama.cpp publishes beside its vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from conformance import results
from conformance.results import Result
from sametoken.checkpoint.gguf.container import read_container
from sametoken.checkpoint.gguf.tokenizer import tokenizer_files
from sametoken.errors import UnsupportedModelError

BETWEEN = "\n__ggml_vocab_test__\n"


def compare(peer: str, models: Path) -> list[Result]:
    """A result for every vocabulary with published texts and ids (`models/*.gguf.inp` and `*.gguf.out`)."""
    return [_compared(peer, file.with_suffix("")) for file in sorted(models.glob("*.gguf.inp"))]


def _compared(peer: str, file: Path) -> Result:
    name = file.stem.removeprefix("ggml-vocab-")
    try:
        content = tokenizer_files(read_container(file).metadata, file.name)["tokenizer.json"]
    except UnsupportedModelError as error:
        reason = str(error).removeprefix(f"{file.name}: ").partition(", expected")[0]
        return results.judged(peer, f"vocabulary {name}", "token ids", f"refused: {reason}", True, known=True)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    texts = file.with_name(f"{file.name}.inp").read_bytes().decode().split(BETWEEN)  # line ends as they are
    lines = file.with_name(f"{file.name}.out").read_text().split("\n")
    same = sum(
        tokenizer.encode(text, add_special_tokens=False).ids == list(map(int, line.split()))
        for text, line in zip(texts, lines, strict=False)
    )
    return results.judged(
        peer, f"vocabulary {name}", "token ids of texts", f"{same} of {len(texts)} equal", same == len(texts)
    )
