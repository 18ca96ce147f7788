"""Weight files in four layouts are read whole, and what is damaged, absent or foreign is refused by name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sametoken.checkpoint.tensors import read_tensors
from sametoken.errors import CheckpointError


def tensors() -> dict[str, Tensor]:
    """A few tensors of different shapes."""
    torch.manual_seed(0)
    return {f"model.layers.{i}.weight": torch.randn(i + 1, 8) for i in range(6)} | {"norm": torch.randn(5).half()}


def write(directory: Path, found: dict[str, Tensor], layout: str) -> None:
    """Save tensors in one of the four layouts."""
    suffix = "safetensors" if "safetensors" in layout else "bin"
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    save = save_file if suffix == "safetensors" else torch.save
    if "sharded" not in layout:
        save(found, directory / f"{stem}.{suffix}")
        return
    names = sorted(found)
    files = {name: f"{stem}-0000{1 + (i >= len(names) // 2)}-of-00002.{suffix}" for i, name in enumerate(names)}
    for file in set(files.values()):
        save({name: found[name] for name in names if files[name] == file}, directory / file)
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


LAYOUTS = ["safetensors", "sharded safetensors", "bin", "sharded bin"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_whole(tmp_path: Path, layout: str) -> None:
    found = tensors()
    write(tmp_path, found, layout)
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    got = list(read_tensors(tmp_path))
    assert sorted(item.name for item in got) == sorted(found)
    assert all(torch.equal(item.tensor, found[item.name]) for item in got)
    assert all(item.file.parent == tmp_path and item.file.exists() for item in got)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed in /proc")
@pytest.mark.parametrize("layout", ["safetensors", "sharded safetensors"])
def test_a_reader_that_is_left_half_way_has_no_file_open(tmp_path: Path, layout: str) -> None:
    write(tmp_path, tensors(), layout)
    stored = read_tensors(tmp_path)
    assert next(stored).tensor.numel()
    opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert not [each for each in opened if Path(each).parent == tmp_path.resolve()]


def test_safetensors_come_before_bin_and_index_before_whole(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(1)}, "bin")
    write(tmp_path, {"b": torch.ones(1)}, "safetensors")
    assert [item.name for item in read_tensors(tmp_path)] == ["b"]
    write(tmp_path, {"c": torch.ones(1), "d": torch.ones(1)}, "sharded safetensors")
    assert sorted(item.name for item in read_tensors(tmp_path)) == ["c", "d"]


def unreadable(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        list(read_tensors(directory))
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", [0, 3, 100, -20])
def test_truncated_file_is_named(tmp_path: Path, layout: str, keep: int) -> None:
    write(tmp_path, tensors(), layout)
    file = sorted(p for p in tmp_path.iterdir() if p.suffix != ".json")[-1]
    file.write_bytes(file.read_bytes()[:keep])
    message = unreadable(tmp_path)
    assert str(file) in message
    assert "damaged" in message


@pytest.mark.parametrize("layout", ["sharded safetensors", "sharded bin"])
def test_index_that_names_an_absent_file(tmp_path: Path, layout: str) -> None:
    write(tmp_path, tensors(), layout)
    absent = next(tmp_path.glob("*-00002-of-00002.*"))
    absent.unlink()
    assert f"1 of 2 files are missing: {absent.name}" in unreadable(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    message = unreadable(tmp_path)
    assert "model.safetensors.index.json" in message
    assert message.endswith("download it again, or copy it again from where it is whole")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/hostname", 7, "config.json", "model.safetensors.index.json", "weights"]
)
def test_index_that_points_elsewhere(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert f"names {name!r}, expected names of .safetensors or .bin files" in unreadable(tmp_path)


def test_no_weights_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    message = unreadable(tmp_path)
    assert "expected one of model.safetensors" in message
    assert "found model.gguf" in message


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert "git lfs pull" in unreadable(tmp_path)


class Mischief:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def test_pickle_with_code_is_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": Mischief()}, tmp_path / "pytorch_model.bin")
    assert "was not executed" in unreadable(tmp_path)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [{"model": {"a": torch.ones(1)}}, {1: torch.ones(1)}, [torch.ones(1)]], ids=str)
def test_pickle_of_something_else(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert "holds something else than a dictionary of tensors" in unreadable(tmp_path)
