"""Prepared samples: what is written is what was said, what is read is whole, and what does not fit is refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chat_templates import STOCK
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.errors import DataError
from sametoken.files import write_json
from sametoken.train.dataset.preparation import data_digest, prepare
from sametoken.train.dataset.prepared import MANIFEST, SAMPLES, Origin, Prepared
from sametoken.train.dataset.vocabulary import choose_vocabulary, count_tokens
from sametoken.train.schedule import pack
from speakers import speaker, turns

VOCAB = 450
ANSWERS = ["The quick fox", "jumps over the dog", "fox fox fox", "The dog barks"]


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


@pytest.fixture
def tokenizer() -> Tokenizer:
    return speaker(STOCK["chatml"], ends=("<|im_end|>",))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"id": f"c{i}", "messages": turns(f"Question {i}", answer)} for i, answer in enumerate(ANSWERS)]
    return write(tmp_path / "data.jsonl", rows)


def origin_of(data: Path, tokenizer: Tokenizer, **options: Any) -> Origin:
    return Origin("tiny", "0" * 64, tokenizer.digest(), data_digest([data]), VOCAB, **options)


def made(data: Path, tokenizer: Tokenizer, **options: Any) -> Prepared:
    return prepare([data], data.parent / "out", tokenizer, origin_of(data, tokenizer, **options))


def test_samples_come_back(data: Path, tokenizer: Tokenizer) -> None:
    prepared = made(data, tokenizer)
    assert [prepared[i].id for i in range(len(prepared))] == ["c0", "c1", "c2", "c3"]
    for i, answer in enumerate(ANSWERS):
        sample = prepared[i]
        assert sample.tokens.dtype == torch.int64
        assert len(sample.tokens) == len(sample.mask) == prepared.lengths()[i]
        said = tokenizer.decode(sample.tokens[sample.mask].tolist(), skip_special_tokens=False)
        assert said == answer + "<|im_end|>"
    counts = prepared.manifest.counts
    assert counts.tokens == sum(prepared.lengths())
    assert counts.masked == sum(int(prepared[i].mask.sum()) for i in range(4))
    assert counts.distinct == len({int(t) for i in range(4) for t in prepared[i].tokens[prepared[i].mask]})
    assert prepared.draft_vocabulary is prepared.features(0) is None
    with pytest.raises(IndexError):
        prepared[4]


def test_the_same_input_gives_the_same_bytes_and_is_not_made_again(data: Path, tokenizer: Tokenizer) -> None:
    first = made(data, tokenizer, draft_vocab_size=24)
    files = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in first.directory.iterdir()}
    again = made(data, tokenizer, draft_vocab_size=24)
    assert again.manifest == first.manifest
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in first.directory.iterdir()} == files
    other = prepare([data], data.parent / "other", tokenizer, origin_of(data, tokenizer, draft_vocab_size=24))
    assert (other.directory / SAMPLES).read_bytes() == (first.directory / SAMPLES).read_bytes()


def test_options_change_what_counts(tmp_path: Path, data: Path, tokenizer: Tokenizer) -> None:
    def masked(**options: Any) -> int:
        name = "-".join(map(str, options))
        return prepare([data], tmp_path / name, tokenizer, origin_of(data, tokenizer, **options)).manifest.counts.masked

    assert masked(end_of_turn=True) == masked(end_of_turn=False, max_len=99) + len(ANSWERS)
    everything = prepare([data], tmp_path / "all", tokenizer, origin_of(data, tokenizer, all_tokens=True))
    assert everything.manifest.counts.masked == everything.manifest.counts.tokens


def test_long_samples_keep_their_head_or_are_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"id": "long answer", "messages": turns("Hi", "fox " * 50)},
        {"id": "long question", "messages": turns("fox " * 50, "Hi")},
        {"id": "short", "messages": turns("Hi", "Hi")},
    ]
    prepared = made(write(tmp_path / "data.jsonl", rows), tokenizer, max_len=30)
    assert [prepared[i].id for i in range(len(prepared))] == ["long answer", "short"]
    assert prepared.lengths()[0] == 30
    assert (prepared.manifest.counts.truncated, prepared.manifest.counts.dropped) == (2, 1)
    with pytest.raises(DataError, match=r"of all 3 nothing counts in the first 2 tokens; raise --max-len"):
        prepare(
            [tmp_path / "data.jsonl"],
            tmp_path / "x",
            tokenizer,
            origin_of(tmp_path / "data.jsonl", tokenizer, max_len=2),
        )


def test_rows_of_text_cut_answers_and_tools(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"text": "The fox"}, {"messages": turns("Hi", "fox"), "truncated": True}, {"id": "nothing said"}]
    prepared = made(write(tmp_path / "data.jsonl", rows), tokenizer)
    assert [prepared[i].id for i in range(len(prepared))] == ["1", "2"]
    assert prepared[0].mask.all()
    assert tokenizer.decode(prepared[1].tokens[prepared[1].mask].tolist(), skip_special_tokens=False) == "fox"
    listing = speaker("{{ tools }}{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    rows = [{"messages": turns("Hi", "fox"), "tools": [{"name": "dog"}]}]
    told = prepare([write(tmp_path / "t", rows)], tmp_path / "tools", listing, origin_of(tmp_path / "t", listing))
    assert "dog" in listing.decode(told[0].tokens.tolist())


def test_a_conversation_goes_before_a_text_beside_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    beside = [{"text": "The dog", "messages": turns("Hi", "fox")}, {"text": "The dog", "conversations": []}]
    prepared = made(write(tmp_path / "data.jsonl", beside), tokenizer)
    said = [tokenizer.decode(sample.tokens[sample.mask].tolist()) for sample in (prepared[0], prepared[1])]
    assert [text.strip() for text in said] == ["fox", "The dog"]
    assert not prepared[0].mask.all()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "c7", "messages": turns("Hi")}, r"line 1 \(conversation c7\): no token counts: there is no assistant"),
        ({"id": "c7", "messages": turns("Hi", "")}, r"c7\): no token counts: every assistant turn is empty"),
        ({"id": "c7", "text": ""}, r"conversation c7\): no token counts: the text is empty"),
        ({"messages": "Hi"}, r"line 1: messages is Hi"),
        ({"finished": True}, "no conversations"),
    ],
)  # fmt: skip
def test_bad_rows(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        made(write(tmp_path / "data.jsonl", [row]), tokenizer)
    assert not (tmp_path / "out").exists()


def test_other_bad_input(tmp_path: Path, data: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="No such file"):
        data_digest([tmp_path / "absent"])
    with pytest.raises(DataError, match=r"holds token \d+, but tiny has 5 tokens"):
        prepare([data], tmp_path / "x", tokenizer, replace(origin_of(data, tokenizer), vocab_size=5))
    with pytest.raises(DataError, match=r"conversation c0\): the model has no chat template"):
        made(data, speaker(None))
    with pytest.raises(DataError, match="cannot be made"):
        prepare([data], data / "out", tokenizer, origin_of(data, tokenizer))


@pytest.mark.parametrize("change", [{"max_len": 99}, {"end_of_turn": False}, {"target_digest": "1" * 64},
                                    {"template": {"a": 1}}, {"data_sha256": "2" * 64}])  # fmt: skip
def test_another_origin_is_refused_and_nothing_overwritten(
    data: Path, tokenizer: Tokenizer, change: dict[str, Any]
) -> None:
    prepared = made(data, tokenizer)
    before = (prepared.directory / MANIFEST).read_bytes()
    ((name, value),) = change.items()
    with pytest.raises(DataError, match=rf"manifest.json: found {name} .*, expected {value}"):
        prepare([data], prepared.directory, tokenizer, replace(origin_of(data, tokenizer), **change))
    assert (prepared.directory / MANIFEST).read_bytes() == before


def test_damaged_files_are_named(data: Path, tokenizer: Tokenizer) -> None:
    directory = made(data, tokenizer).directory
    file, whole = directory / SAMPLES, (directory / SAMPLES).read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"samples.safetensors: found {len(whole) - 1} bytes, expected {len(whole)}"):
        Prepared.open(directory)
    file.write_bytes(whole[:-1] + b"\x07")
    with pytest.raises(DataError, match=r"samples.safetensors: found SHA-256 .* expected"):
        Prepared.open(directory)
    file.unlink()
    with pytest.raises(DataError, match="No such file"):
        Prepared.open(directory)
    for content in ("{", "[]", "{}", '{"format": 1}', '{"format": 9}'):
        (directory / MANIFEST).write_text(content)
        with pytest.raises(DataError, match=r"manifest.json"):
            Prepared.open(directory)
    with pytest.raises(DataError, match=r"manifest.json: No such file"):
        Prepared.open(data.parent / "absent")


def test_a_full_disk_leaves_nothing_half_written(data: Path, tokenizer: Tokenizer) -> None:
    """The size of files is limited instead of the disk; both fail in the middle of a write."""
    program = (
        "import resource, signal, sys; from pathlib import Path; import torch\n"
        "from sametoken.files import write_tensors; from sametoken.errors import DataError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write_tensors(Path(sys.argv[1]), {'x': torch.zeros(100000)})\n"
        "except DataError as error: sys.exit(7 if 'cannot be written' in str(error) else 8)\n"
    )
    assert hasattr(resource, "RLIMIT_FSIZE")
    file = write(data.parent / "file", [{"kept": 1}])
    ended = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=False)
    assert ended.returncode == 7, ended.stderr
    assert json.loads(file.read_text()) == {"kept": 1}
    assert sorted(path.name for path in data.parent.iterdir()) == ["data.jsonl", "file"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_json(tmp_path / "file", {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_targets_are_told_apart(tiny_llm_dir: Path, tmp_path: Path, data: Path) -> None:
    tokenizer = load_tokenizer(tiny_llm_dir)
    rows = [{"messages": turns("Hi", "fox")}]
    file = write(tmp_path / "data.jsonl", rows)
    origin = replace(origin_of(file, tokenizer), target_digest=model_digest(tiny_llm_dir))
    prepared = prepare([file], tmp_path / "out", tokenizer, origin)
    prepared.check_target(tiny_llm_dir)
    draft = tiny_llm_dir.parent / "draft"  # of the same shape, with other numbers
    with pytest.raises(DataError, match=r"manifest.json: prepared for tiny .*, found .*draft"):
        prepared.check_target(draft)


def test_draft_vocabulary(data: Path, tokenizer: Tokenizer) -> None:
    prepared = made(data, tokenizer, draft_vocab_size=24)
    vocabulary = prepared.draft_vocabulary
    assert vocabulary is not None
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for i in range(len(prepared)):
        counts += count_tokens(*prepared[i][1:], VOCAB)
    forced = tokenizer.special_ids | set(tokenizer.eos_ids)
    rest = sorted((i for i in range(VOCAB) if i not in forced), key=lambda i: (-int(counts[i]), i))
    expected = sorted([*forced, *rest[: 24 - len(forced)]])
    assert vocabulary.ids.tolist() == expected
    assert vocabulary.d2t.dtype == torch.int64
    assert vocabulary.d2t.tolist() == [token - i for i, token in enumerate(expected)]
    assert vocabulary.t2d.nonzero().flatten().tolist() == expected
    share = sum(int(counts[i]) for i in expected) / int(counts.sum())
    assert prepared.manifest.counts.coverage == pytest.approx(share) != 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_any_vocabulary(counts: list[int], draw: st.DataObject) -> None:
    size = draw.draw(st.integers(1, len(counts)))
    vocabulary = choose_vocabulary(torch.tensor(counts), size, [], fill=True)
    ids = vocabulary.ids.tolist()
    assert len(ids) == len(set(ids)) == size
    assert ids == sorted(ids)
    assert sum(counts[i] for i in ids) == sum(sorted(counts)[-size:])
    whole = choose_vocabulary(torch.tensor(counts), len(counts), [], fill=True)
    assert whole.t2d.all()
    assert not whole.d2t.any()


def test_vocabularies_that_cannot_be(data: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"of 400 tokens was asked for, but only \d+ different tokens occur"):
        made(data, tokenizer, draft_vocab_size=400)
    with pytest.raises(DataError, match=r"of 3 tokens was asked for, but \d+ special tokens must be in it"):
        made(data, tokenizer, draft_vocab_size=3)
    with pytest.raises(DataError, match=rf"of 999 tokens was asked for, expected 1 to the target's {VOCAB}"):
        made(data, tokenizer, draft_vocab_size=999)
    filled = made(data, tokenizer, draft_vocab_size=400, fill_vocabulary=True)
    assert filled.draft_vocabulary is not None
    assert len(filled.draft_vocabulary.ids) == 400
    assert filled.manifest.counts.coverage == 1


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(0, 3), st.integers(1, 20))
def test_packing(lengths: list[int], epoch: int, window: int) -> None:
    rows = pack(lengths, 50, seed=1, epoch=epoch, window=window)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 50 for row in rows)
    assert rows == pack(lengths, 50, seed=1, epoch=epoch, window=window)


def test_packing_fills_rows_and_mixes_epochs() -> None:
    lengths = [1 + i * 37 % 500 for i in range(2000)]
    rows = pack(lengths, 1000)
    assert sum(lengths) / (1000 * len(rows)) > 0.98
    assert rows != pack(lengths, 1000, epoch=1) != pack(lengths, 1000, seed=1, epoch=1)
    with pytest.raises(DataError, match=r"sample 0 has 9 tokens, a row only 8"):
        pack([9], 8)
