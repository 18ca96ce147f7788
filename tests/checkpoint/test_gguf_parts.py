"""Models in several GGUF files, as the library gguf cuts them: all parts are one model, and wrong parts are named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")

import torch  # noqa: E402
from gguf import GGMLQuantizationType as Type  # noqa: E402
from test_hub import hub as published_hub  # noqa: E402

from gguf_makers import embedded_gguf  # noqa: E402
from hub_server import Hub, Repository  # noqa: E402
from sametoken import LLM, SamplingParams  # noqa: E402
from sametoken.checkpoint import hub as room  # noqa: E402
from sametoken.checkpoint.gguf import LINK  # noqa: E402
from sametoken.checkpoint.gguf.container import read_container  # noqa: E402
from sametoken.checkpoint.hub import resolve  # noqa: E402
from sametoken.checkpoint.identity import model_digest  # noqa: E402
from sametoken.checkpoint.planned import planned_bytes  # noqa: E402
from sametoken.errors import CheckpointError, HubError  # noqa: E402

hub = published_hub
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def cut(folder: Path, file: Path, tensors: int, name: str = "m") -> list[Path]:
    """The parts of a file, each with at most so many tensors, as the library writes them."""
    folder.mkdir(exist_ok=True)
    read = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(None, "llama", split_max_tensors=tensors)
    for field in read.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            array = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], array)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(folder / f"{name}.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{name}-*.gguf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_gguf(tmp_path_factory.mktemp("whole"), "embedded", Type.Q8_0)[0]


@pytest.fixture
def parts(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A model in several files, whose directories are kept apart."""
    monkeypatch.setattr(room, "opened_directory", lambda: tmp_path / "opened")
    count = len(read_container(whole).entries)
    found = cut(tmp_path / "parts", whole, count // 3 + 1)
    assert len(found) == 3
    return found


def test_any_part_and_the_directory_stand_for_the_model(parts: list[Path], whole: Path) -> None:
    expected, found = read_container(whole), read_container(parts[1])
    assert {name: entry.shape for name, entry in found.entries.items()} == {
        name: entry.shape for name, entry in expected.entries.items()
    }
    assert found.metadata["tokenizer.ggml.tokens"] == expected.metadata["tokenizer.ggml.tokens"]
    for name in expected.entries:
        assert found.read(name).equal(expected.read(name))
    directories = {resolve(given) for given in (*parts, parts[0].parent)}
    assert len(directories) == 1
    said = [LLM(str(given)).generate("Once upon a time", GREEDY)[0].token_ids for given in (whole, parts[2])]
    assert said[0] == said[1]


def test_a_link_to_a_part_stands_for_the_model(parts: list[Path], tmp_path: Path) -> None:
    for target in (parts[1], Path(os.path.relpath(parts[1], tmp_path))):
        link = tmp_path / "link.gguf"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert set(read_container(link).entries) == set(read_container(parts[0]).entries)


def test_every_part_counts_in_hashes_and_plans(parts: list[Path], whole: Path) -> None:
    directory = resolve(parts[0])
    before = model_digest(directory)
    assert planned_bytes(directory, torch.bfloat16) == planned_bytes(resolve(whole), torch.bfloat16)
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert model_digest(directory) != before
    assert resolve(parts[0]) != directory, "a changed part is another model"


def changed(parts: list[Path], case: str, other: Path) -> Path:
    """Parts with something wrong; the file that is given."""
    match case:
        case "missing":
            parts[1].unlink()
        case "doubled":
            shutil.copyfile(parts[1], parts[2])
        case "foreign":
            shutil.copyfile(other, parts[2])
        case "whole":
            shutil.copyfile(other.parent.parent / "whole.gguf", parts[2])
        case "renamed":
            parts[1].rename(parts[1].with_name("second.gguf"))
            return parts[1].with_name("second.gguf")
        case "cut":
            parts[1].write_bytes(parts[1].read_bytes()[:-5000])
    return parts[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", r"m-00001-of-00003.gguf: one of 3 parts of a model, of which 1 are missing: m-00002-of-00003"),
        ("doubled", r"m-00003-of-00003.gguf: holds part 2 of 3, its name states part 3 of 3"),
        ("foreign", r"m-00001-of-00003.gguf: its model has \d+ tensors, the 3 parts together \d+: parts of diff"),
        ("whole", r"m-00003-of-00003.gguf: holds part 1 of 1, its name states part 3 of 3"),
        ("renamed", r"second.gguf: part 2 of 3 of a model, expected a name such as MODEL-00001-of-00003.gguf"),
        ("cut", r"m-00002-of-00003.gguf: truncated: .* ends at byte"),
    ],
)
def test_wrong_parts_are_named_in_one_line(
    parts: list[Path], whole: Path, tmp_path: Path, case: str, words: str
) -> None:
    shutil.copyfile(whole, tmp_path / "whole.gguf")
    other = cut(tmp_path / "other", whole, len(read_container(whole).entries) // 3 + 3, "o")
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve(changed(parts, case, other[2]))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "opened").glob("*")), "nothing is kept of a model that was refused"


def test_a_kind_of_the_hub_in_parts_brings_all_of_them(hub: Hub, parts: list[Path], whole: Path) -> None:
    named: dict[str, Any] = {
        f"Q8_0/tiny-Q8_0-0000{i}-of-00003.gguf": part.read_bytes() for i, part in enumerate(parts, 1)
    }
    hub.repositories["owner/tiny-GGUF"] = Repository({**named, "tiny-Q2_K.gguf": b"x", "README.md": b"words"})
    directory = resolve("owner/tiny-GGUF:Q8_0", quiet=True)
    assert {path.rpartition("/")[2] for _, path, _ in hub.requests if path.endswith(".gguf")} == {
        name.rpartition("/")[2] for name in named
    }
    said = [LLM(given).generate("Once upon a time", GREEDY)[0].token_ids for given in (str(whole), str(directory))]
    assert said[0] == said[1]
    assert resolve("owner/tiny-GGUF", quiet=True) == directory, "no kind: Q4_K_M, else Q8_0, else the first"
    hub.down = True
    for kind in (":q8_0", ":tiny-Q8_0-00002-of-00003.gguf", ""):
        assert resolve(f"owner/tiny-GGUF{kind}", offline=True, quiet=True) == directory
    hub.down = False
    del hub.repositories["owner/tiny-GGUF"].files["Q8_0/tiny-Q8_0-00002-of-00003.gguf"]
    with pytest.raises(HubError, match=r"has only parts of Q8_0/tiny-Q8_0-00001-of-00003\.gguf: .*-00002-of-00003"):
        resolve("owner/tiny-GGUF:Q8_0", quiet=True)
    assert (directory / LINK).exists()
