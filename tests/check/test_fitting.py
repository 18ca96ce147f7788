"""Which heads `sametoken doctor MODEL` names: those whose files fit the model, and published ones, marked as such."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sametoken.train
import tiny_models
from cli_checks import speak
from sametoken.check.fitting import PUBLISHED, fitting_heads


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitting") / "target"
    tiny_models.save("llama-2", folder)
    speak(folder)
    return folder


def head(place: Path, mode: str = "medusa", **changes: Any) -> Path:
    """A head of a tiny model."""
    model = tiny_models.build("llama-2", **changes)
    sametoken.train.convert(model, [(mode, {"medusa_num_heads": 2} if mode == "medusa" else {})])
    model.save_pretrained(place / "whole")
    (place / "whole" / "head").rename(place / "head")
    return place / "head"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the target, one of a wider model, one whose weights are cut, and the whole model beside them."""
    root = tmp_path_factory.mktemp("folders")
    shutil.copytree(head(root / "made"), root / "fits")
    shutil.copytree(head(root / "wide", hidden_size=128), root / "wider")
    damaged = shutil.copytree(root / "fits", root / "damaged")
    for file in damaged.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:40])
    return root


@pytest.fixture
def cache(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with the same head under a name of the Hub."""
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123"
    shutil.copytree(folders / "fits", snapshot)
    monkeypatch.setattr("sametoken.check.fitting.cache_directory", lambda: tmp_path / "hub")
    return snapshot


def test_files_say_what_fits(target: Path, folders: Path, cache: Path) -> None:
    found = fitting_heads(target, str(target), [folders])
    names = [str(folders / "fits"), str(folders / "made" / "head"), str(cache)]  # that of a training run too
    assert [(each.name, each.found) for each in found] == [(name, "files") for name in names]
    assert {each.kind for each in found} == {"Medusa"}
    assert [each.name for each in fitting_heads(target, str(target))] == [str(cache)]
    assert fitting_heads(target, str(target), [folders / "wider"])[0].name == str(cache)


@pytest.mark.parametrize("name", ["openai/gpt-oss-120b", "models/gpt-oss-120b-FP4", "x/GPT-OSS-120B-GGUF:Q4_K_M"])
def test_a_name_says_what_was_published(target: Path, cache: Path, name: str) -> None:
    found = [each for each in fitting_heads(target, name) if each.found == "published"]
    assert [each.name for each in found] == ["nvidia/gpt-oss-120b-Eagle3-long-context"]
    assert found[0].words == "published for gpt-oss-120b; not verified here"


def test_a_model_is_no_draft_of_itself(target: Path, cache: Path) -> None:
    drafts = [name for name, (kind, _) in PUBLISHED.items() if kind == "draft model"]
    assert drafts
    for name in drafts:
        assert name not in [each.name for each in fitting_heads(target, name)]


def test_doctor_names_them(run: Callable[..., Any], target: Path, folders: Path, cache: Path) -> None:
    shown = run("doctor", str(target), "--device=cpu", f"--heads={folders}")
    assert shown.code == 0, shown.err
    lines = [line for line in shown.out.splitlines() if line.startswith("head that fits")]
    assert [line.split()[3].rstrip(":") for line in lines] == [
        str(folders / "fits"), str(folders / "made" / "head"), str(cache)
    ]  # fmt: skip
    found = json.loads(run("doctor", str(target), "--device=cpu", "--json").out)
    assert [(each["name"], each["kind"]) for each in found["heads"]] == [(str(cache), "Medusa")]
    drafted = json.loads(run("doctor", str(target), "--device=cpu", "--json", f"--draft={cache}").out)
    assert drafted["heads"] == []
    assert "is no directory; expected a head" in run("doctor", str(target), "--heads=nowhere").err
