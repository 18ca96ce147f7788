"""Every kind of splitting that GGUF files name: its expressions are valid, lose nothing, and cut as they say.

llama.cpp's vocabularies of these kinds lie in its repository with texts and their tokens; ours are equal for all.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from sametoken.checkpoint.gguf.splitting import SPLITS
from sametoken.checkpoint.gguf.tokenizer import tokenizer_files
from sametoken.checkpoint.tokenizer import _byte_signs
from sametoken.errors import UnsupportedModelError

SIGNS = sorted(_byte_signs())
TEXT = (
    "Hello World's 1234567 tests, I'LL see:\n\n  na\u00efve  \u6211\u4eec\u5728 "
    "\u0434\u043e\u043c\u0430 \uc548\ub155 x=3.14;\t/path\r\n!!! "
)


def tokenizer(kind: str | None) -> tokenizers.Tokenizer:
    """A vocabulary of single bytes with a kind of splitting."""
    facts = {"model": "gpt2", "pre": kind, "tokens": SIGNS, "merges": []}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in facts.items()}
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(metadata, Path("a.gguf"))["tokenizer.json"]))


def pieces(kind: str, text: str) -> list[str]:
    found = tokenizer(kind).pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


@pytest.mark.parametrize("kind", SPLITS)
def test_every_kind_of_splitting_loses_nothing(kind: str) -> None:
    read = tokenizer(kind)
    assert read.decode(read.encode(TEXT).ids) == TEXT
    assert len(pieces(kind, TEXT)) > 10


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("deepseek-llm", "ab\u6211\u4eec12 3", ["ab", "\u6211\u4eec", "12", " ", "3"]),
        ("deepseek-coder", "x1234", ["x", "1", "2", "3", "4"]),
        ("falcon", "a1234", ["a", "123", "4"]),
        ("default", "a+b", ["a", "+", "b"]),
        ("seed-coder", "a!\nb", ["a", "!", "\n", "b"]),
        ("bailingmoe", "a\n\nb12", ["a", "\n\n", "b", "1", "2"]),
        ("kimi-k2", "\u6211\u4eecAbcDef", ["\u6211\u4eec", "Abc", "Def"]),
        ("kimi-k2", "a/\nb", ["a", "/\n", "b"]),
        ("minimax-m2", "AbcDef's 12345", ["Abc", "Def's", " ", "123", "45"]),
        ("minicpm5", "12345 a", ["123", "45", " a"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("qwen2", "12'LL", ["1", "2", "'LL"]),
        ("glm5", "12345", ["123", "45"]),
        ("smollm", "a12", ["a", "1", "2"]),
    ],
)
def test_a_kind_cuts_where_its_family_does(kind: str, text: str, expected: list[str]) -> None:
    assert pieces(kind, text) == expected


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre is 'afmoe', which is not supported"):
        tokenizer("afmoe")
