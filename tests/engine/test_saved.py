"""Sequences in files: what was read once is not read again, and a file that does not fit is refused by name."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import pytest

from cli_checks import Pair
from sametoken import LLM, SamplingParams
from sametoken.engine.saved import DIGEST, give, keep, read, write
from sametoken.errors import DataError

PROMPT = list(range(5, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def engine_of(pair: Pair, **options: object) -> LLM:
    return LLM(pair.target, kv_cache={"tokens_per_block": 8, **options})  # type: ignore[arg-type]


def saved(llm: LLM, file: Path) -> list[int]:
    """Writes what a request leaves behind, and returns its tokens."""
    (done,) = llm.generate([PROMPT], GREEDY)
    write(keep(llm.engine, PROMPT + done.token_ids), file, llm.fingerprint())
    return done.token_ids


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("drafted", [False, True])
def test_another_process_goes_on_where_one_ended(
    tiny_pair: Pair, tmp_path: Path, one_thread: None, dtype: str, drafted: bool
) -> None:
    file, draft = tmp_path / "s.bin", tiny_pair.draft if drafted else None
    llms = [LLM(tiny_pair.target, draft, kv_cache={"tokens_per_block": 8, "dtype": dtype}) for _ in range(2)]
    told = saved(llms[0], file)
    kept, size = read(llms[1].engine, file, llms[1].fingerprint())
    assert size == file.stat().st_size
    give(llms[1].engine, kept)
    blocks = llms[1].engine.scheduler.blocks
    blocks.check()
    assert blocks.idle == kept.pages == (len(PROMPT) + 5) // 8
    (done,) = llms[1].generate([PROMPT], GREEDY)
    assert done.token_ids == told
    assert done.cached_tokens == len(PROMPT) // 8 * 8
    give(llms[1].engine, kept)  # what is there already is not kept twice
    assert blocks.idle == kept.pages
    assert blocks.erase(kept.tokens) == kept.pages * 8
    assert blocks.idle == 0
    blocks.check()


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8"])
def test_a_sequence_of_less_than_a_page_is_an_empty_one(tiny_pair: Pair, tmp_path: Path, dtype: str) -> None:
    llm, file = engine_of(tiny_pair, dtype=dtype), tmp_path / "s.bin"
    llm.generate([PROMPT[:4]], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    write(keep(llm.engine, PROMPT[:5]), file, llm.fingerprint())
    kept, _ = read(llm.engine, file, llm.fingerprint())
    give(llm.engine, kept)
    assert (kept.pages, kept.tokens) == (0, PROMPT[:1])


def test_files_that_do_not_fit_are_refused(tiny_pair: Pair, tmp_path: Path, one_thread: None) -> None:
    llm, file = engine_of(tiny_pair), tmp_path / "s.bin"
    saved(llm, file)
    whole, mine = file.read_bytes(), llm.fingerprint()
    for words, content in (
        ("truncated or altered", whole[:-40]),
        ("truncated or altered", whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]),
        ("truncated or altered", b""),
        ("truncated or altered", b"x" * 300),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=f"s.bin: {words}"):
            read(llm.engine, file, mine)
    file.write_bytes(whole)
    other = engine_of(tiny_pair, dtype="int8")
    with pytest.raises(DataError, match="another model, draft, number format"):
        read(other.engine, file, other.fingerprint())
    with pytest.raises(DataError, match="No such file"):
        read(llm.engine, tmp_path / "none.bin", mine)
    with pytest.raises(DataError, match="not a regular file"):
        read(llm.engine, Path("/dev/zero"), mine)


def sealed(content: bytes) -> bytes:
    """Content of a file with the digest of whoever altered it."""
    return content + blake2b(content, digest_size=DIGEST).digest()


@pytest.mark.parametrize(
    "altered",
    [
        {"drafts": -1}, {"drafts": "x"}, {"drafts": [1]}, {"drafts": {"ngram": 10**9}}, {"drafts": {"ngram": None}},
        {"tokens": None}, {"tokens": "x"}, {"tokens": -1}, {"pages": {}}, {"pages": -1}, {"pages": 1.5},
    ],
)  # fmt: skip
def test_a_header_that_was_altered_with_its_digest_is_refused(
    tiny_pair: Pair, tmp_path: Path, one_thread: None, altered: dict[str, object]
) -> None:
    llm, file = engine_of(tiny_pair), tmp_path / "s.bin"
    saved(llm, file)
    line, _, rest = file.read_bytes()[:-DIGEST].partition(b"\n")
    file.write_bytes(sealed(json.dumps({**json.loads(line), **altered}).encode() + b"\n" + rest))
    with pytest.raises(DataError, match="its header does not match"):
        read(llm.engine, file, llm.fingerprint())


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a":' * 100_000, b"{}", b"\xff"])
def test_a_header_that_is_no_object_is_refused(
    tiny_pair: Pair, tmp_path: Path, one_thread: None, header: bytes
) -> None:
    llm, file = engine_of(tiny_pair), tmp_path / "s.bin"
    file.write_bytes(sealed(header + b"\n"))
    with pytest.raises(DataError, match="no sequence of this version"):
        read(llm.engine, file, llm.fingerprint())


def test_a_file_that_no_cache_can_hold_is_not_read(tiny_pair: Pair, tmp_path: Path, one_thread: None) -> None:
    llm, file = engine_of(tiny_pair, max_tokens=32), tmp_path / "s.bin"
    with file.open("wb") as stream:
        stream.truncate(2**38)  # without blocks on the disk
    with pytest.raises(DataError, match=f"got {2**38} bytes, expected at most"):
        read(llm.engine, file, llm.fingerprint())


def test_a_cache_that_is_too_small_says_so(tiny_pair: Pair, tmp_path: Path, one_thread: None) -> None:
    llm, file = engine_of(tiny_pair), tmp_path / "s.bin"
    saved(llm, file)
    small = engine_of(tiny_pair, max_tokens=32)
    kept, _ = read(small.engine, file, small.fingerprint())
    with pytest.raises(DataError, match="raise kv_cache_max_tokens"):
        give(small.engine, kept)
