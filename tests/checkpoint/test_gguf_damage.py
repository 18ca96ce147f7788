"""GGUF files that are truncated, altered or contradict themselves: one line at load, never a crash or a wrong token."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")

import torch  # noqa: E402
from gguf import GGMLQuantizationType as Type  # noqa: E402
from test_gguf import TYPES, written  # noqa: E402

from gguf_makers import embedded_gguf  # noqa: E402
from sametoken import LLM, SamplingParams, embedded  # noqa: E402
from sametoken.checkpoint.gguf.blocks import read_tensor  # noqa: E402
from sametoken.checkpoint.gguf.container import read_container  # noqa: E402
from sametoken.checkpoint.gguf.tokenizer import tokenizer_files  # noqa: E402
from sametoken.checkpoint.hub import resolve  # noqa: E402
from sametoken.errors import CheckpointError, SametokenError, UnsupportedModelError  # noqa: E402
from sametoken.model.formats.coded import Coded  # noqa: E402


def refusal(call: Callable[[], Any]) -> str:
    """The one line that is said of a file."""
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


BYTE_PAIRS: dict[str, Any] = {
    "model": "gpt2", "pre": "llama-bpe", "tokens": ["a", "b", "ab", "<s>"], "token_type": [1, 1, 1, 3],
    "merges": ["a b"], "eos_token_id": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_type": [1, 1, 99, 3]}, "token_type has 99, expected 0 to 6"),
        ({"token_type": [1, 1, -1, 3]}, "token_type has -1, expected 0 to 6"),
        ({"eos_token_id": 10**9}, "eos_token_id is 1000000000, expected one of 4 tokens"),
        ({"bos_token_id": 4}, "bos_token_id is 4, expected one of 4 tokens"),
        ({"fim_pre_token_id": 70}, "fim_pre_token_id is 70, expected one of 4 tokens"),
        ({"eos_token_id": True}, "eos_token_id is True, expected one of 4 tokens"),
        ({"merges": ["a c"]}, "the merge of 'a' and 'c' has a part or a result that is no token"),
        ({"merges": ["b a"]}, "the merge of 'b' and 'a' has a part or a result that is no token"),
        ({"merges": None}, "tokenizer.ggml.merges is None, expected a list"),
        (
            {"tokens": [str(i) for i in range(9000)], "token_type": [1] * 9000, "merges": []},
            "no merges (tokenizer.ggml.merges) for 9000 tokens",
        ),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_named(changes: dict[str, Any], words: str) -> None:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**BYTE_PAIRS, **changes}.items()}
    assert words in refusal(lambda: tokenizer_files(metadata, Path("a.gguf")))


def test_ids_that_stand_for_none_are_none() -> None:
    for none in (2**32 - 1, -1):
        metadata = {f"tokenizer.ggml.{key}": value for key, value in {**BYTE_PAIRS, "bos_token_id": none}.items()}
        assert "bos_token" not in tokenizer_files(metadata, Path("a.gguf"))["tokenizer_config.json"]


def two_tensors(file: Path) -> bytes:
    """A file with the tensors x and y of 32 numbers each; the second begins 128 bytes after the first."""
    writer = gguf.GGUFWriter(file, "llama")
    for name in ("x", "y"):
        writer.add_tensor(name, torch.zeros(1, 32).numpy(), raw_dtype=Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.replace(struct.pack("<IQ", 0, 128), struct.pack("<IQ", 0, 64)), "'y' begins at byte"),
        (lambda data: data.replace(struct.pack("<IQ", 0, 128), struct.pack("<IQ", 0, 0)), ", within 'x', which ends"),
        (lambda data: data.replace(b"y" + struct.pack("<I", 2), b"x" + struct.pack("<I", 2)), "names of tensors"),
        (lambda data: data.replace(struct.pack("<IQ", 0, 128), struct.pack("<IQ", 0, 1 << 60)), "truncated: y ends"),
        (lambda data: data.replace(struct.pack("<IQ", 0, 128), struct.pack("<IQ", 36, 128)), "stored as"),
    ],
)
def test_tensors_that_overlap_or_are_there_twice_are_named(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    data = two_tensors(tmp_path / "x.gguf")
    changed = change(data)
    assert changed != data
    (tmp_path / "x.gguf").write_bytes(changed)
    assert words in refusal(lambda: read_container(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (36, "y is stored as IQ4_NL_4_4, which is not supported; llama-quantize --allow-requantize x.gguf NEW Q4_K_M"),
        (41, "y is stored as Q1_0, which is not supported; llama-quantize --allow-requantize x.gguf NEW Q4_K_M"),
        (99, "y is stored as type 99, which is not supported; llama-quantize --allow-requantize x.gguf NEW Q4_K_M"),
        (99, "NEW Q4_K_M makes it Q5_0 or Q8_0"),
        (26, "y is stored as I32, which is not supported"),
    ],
)
def test_a_type_that_is_not_read_is_named_with_what_it_can_become(tmp_path: Path, kind: int, words: str) -> None:
    data = two_tensors(tmp_path / "x.gguf").replace(struct.pack("<IQ", 0, 128), struct.pack("<IQ", kind, 128))
    (tmp_path / "x.gguf").write_bytes(data)
    assert words in refusal(lambda: read_container(tmp_path / "x.gguf"))


def test_a_key_with_two_values_is_named(tmp_path: Path) -> None:
    data = two_tensors(tmp_path / "x.gguf")
    key = b"general.architecture"
    twice = data[:16] + struct.pack("<Q", 2) + data[24:].replace(
        struct.pack("<Q", len(key)) + key, 2 * (struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 5) + b"llama")
    )[: len(data)]  # fmt: skip
    (tmp_path / "x.gguf").write_bytes(twice)
    assert "a second value of 'general.architecture'" in refusal(lambda: read_container(tmp_path / "x.gguf"))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_cut_and_altered_files_of_every_type_are_read_or_refused(tmp_path: Path, kind: Type) -> None:
    written(tmp_path / "x.gguf", kind, (4, 512))
    data, draws = (tmp_path / "x.gguf").read_bytes(), random.Random(int(kind))
    changed = [data[: draws.randrange(len(data))] for _ in range(30)]
    for _ in range(60):
        at = draws.randrange(len(data))
        changed.append(data[:at] + bytes([draws.randrange(256)]) + data[at + 1 :])
    refusals = []
    for each in changed:
        (tmp_path / "y.gguf").write_bytes(each)
        try:
            container = read_container(tmp_path / "y.gguf")
            for name in container.entries:
                found = read_tensor(container, name)
                numbers = found.dequantize() if isinstance(found, Coded) else found
                assert numbers.shape == container.entries[name].shape
        except SametokenError as error:
            refusals.append(str(error))
    assert len(refusals) >= 30
    assert not any("\n" in words for words in refusals)


def test_more_tokens_than_rows_are_named(tmp_path: Path) -> None:
    file, _ = embedded_gguf(tmp_path, "embedded", Type.Q8_0)
    data = file.read_bytes()
    rows = struct.pack("<QQI", *read_container(file).entries["token_embd.weight"].shape[::-1], int(Type.Q8_0))
    fewer = struct.pack("<QQI", *struct.unpack("<QQ", rows[:16])[:1], 96, int(Type.Q8_0))
    assert data.count(rows) >= 1
    file.write_bytes(data.replace(rows, fewer))
    assert "and 96 rows in token_embd.weight, expected a row for each token" in refusal(lambda: resolve(file))


def with_vocabulary(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The embedded target with a changed tokenizer.json."""
    shutil.copytree(embedded.target("embedded"), folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_tokens_of_texts_beyond_the_model_are_named_at_load_and_marks_are_not(tmp_path: Path) -> None:
    words = "tokenizer.json gives 'beyond' the id 999999, the model has"
    wrong = with_vocabulary(tmp_path / "wrong", lambda content: content["model"]["vocab"].update(beyond=999999))
    assert words in refusal(lambda: LLM(str(wrong)))
    mark = {"id": 999999, "content": "<image>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    fine = with_vocabulary(tmp_path / "fine", lambda content: content["added_tokens"].append({**mark, **flags}))
    assert LLM(str(fine)).generate("Once", SamplingParams(temperature=0, max_tokens=2))[0].token_ids
