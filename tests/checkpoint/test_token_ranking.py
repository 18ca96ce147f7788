"""Tokens that a narrowed draft guesses: special ones, then by the tokenizer's order or a file of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models

from engine_checks import speak_bytes
from sametoken import embedded
from sametoken.checkpoint import tokenizer as tokenizers
from sametoken.checkpoint.token_ranking import draft_tokens, read_tokens
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.errors import ConfigError
from sametoken.options.speculation import SpeculativeConfig


def made(names: list[str], added: list[AddedToken]) -> tokenizers.Tokenizer:
    backend = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.add_tokens(added)
    return tokenizers.Tokenizer(backend, {}, {}, eos_ids=(5,))


def chosen(given: tokenizers.Tokenizer, size: int | None, file: str | None = None, rows: int = 200) -> list[int]:
    found = draft_tokens(given, rows, SpeculativeConfig(draft_vocab_size=size, draft_token_map=file))
    assert found is not None
    return list(found.tolist())


BYTE_LEVEL = made([*"abcdefgh", *(f"m{i}" for i in range(50))], [AddedToken("<tool>", special=False)])
PIECES = made([*(f"m{i}" for i in range(50)), "▁", *"etaoi"], [AddedToken("<end>", special=True)])


def test_merges_in_their_order_after_special_tokens() -> None:
    """Added tokens and ends of texts come first; the model may have rows beyond the vocabulary."""
    assert chosen(BYTE_LEVEL, 12) == [5, 58, *range(5), *range(6, 11)]
    for size in (200, 10**9):
        assert draft_tokens(BYTE_LEVEL, 200, SpeculativeConfig(draft_vocab_size=size)) is None
    assert chosen(BYTE_LEVEL, 199) == [5, 58, *range(5), *range(6, 58)]  # nothing but tokens


def test_single_characters_behind_the_merges_are_spread() -> None:
    found = chosen(PIECES, 20)
    assert found[:2] == [5, 56]
    assert {50, 51} <= set(found)
    assert 55 not in found
    assert found[2] == 0


def test_bytes_are_kept(tmp_path: Path) -> None:
    speak_bytes(tmp_path)
    with pytest.raises(
        ConfigError, match=r"draft_vocab_size 200: .* among 200 tokens, of which 259 .* expected 518 at"
    ):
        chosen(load_tokenizer(tmp_path), 200, rows=1000)
    given = load_tokenizer(Path(embedded.target("embedded")))
    found = chosen(given, 600, rows=given.vocab_size)
    assert len(set(found)) == 600
    assert {given.eos_ids[0], given.token_id("<0x0A>"), given.token_id("<0xFF>")} <= set(found[:300])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.json", [9, 7, 5, 30, 8]),
        ("counts.json", {"30": 2, "9": 40, "8": 1, "7": 4, "5": 3}),
        ("ids.pt", torch.tensor([9, 7, 5, 30, 8])),
        ("hot.pt", [9, 7, 5, 30, 8]),
    ],
)
def test_files(tmp_path: Path, name: str, content: Any) -> None:
    file = tmp_path / name
    if file.suffix == ".pt":
        torch.save(content, file)
    else:
        file.write_text(json.dumps(content))
    assert read_tokens(str(file), 200) == [9, 7, 5, 30, 8]
    assert chosen(BYTE_LEVEL, None, str(file)) == [5, 58, 9, 7, 30, 8]
    assert chosen(BYTE_LEVEL, 5, str(file)) == [5, 58, 9, 7, 30]


def test_offsets_of_a_head(tmp_path: Path) -> None:
    ids = torch.tensor([0, 1, 2, 7, 9, 30])
    torch.save(ids - torch.arange(6), tmp_path / "d2t.pt")
    assert read_tokens(str(tmp_path / "d2t.pt"), 200) == ids.tolist()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", "[1, 2", "expected a list of token ids"),
        ("x.json", '["a", 3]', "got 'a'; expected a list of token ids"),
        ("x.json", "[1, true]", "got True; expected a list of token ids"),
        ("x.json", '{"a": 3}', "expected a list of token ids"),
        ("x.json", "3", "expected a list of token ids"),
        ("x.json", "[]", "got 0 tokens, 0 different ones, expected different ids from 0 to 199"),
        ("x.json", "[3, 200]", "got token 200, expected different ids from 0 to 199"),
        ("x.json", "[-1, 2]", "got token -1, expected different ids from 0 to 199"),
        ("x.json", "[5, 4, 4, 2]", "got 4 tokens, 2 different ones"),
        ("x.pt", "no tensor", "expected a list of token ids"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"draft_token_map .*{name}: .*{words}"):
        read_tokens(str(tmp_path / name), 200)


def test_floats_are_no_ids(tmp_path: Path) -> None:
    torch.save(torch.rand(4), tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"got 0.* expected a list of token ids"):
        read_tokens(str(tmp_path / "x.pt"), 200)
