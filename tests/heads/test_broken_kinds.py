"""Kinds of other distributions that break: nobody who did not ask for them notices more than one warning.

Beside them the distribution has a kind of draft model that works, which its name or a mark in config.json chooses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from matrix import mark
from sametoken import embedded

ROOT = Path(__file__).parents[2]
RECORDS = """
from sametoken.kinds import Kind

def kind(name, drafts, **more):
    return Kind(name=name, title=name, what=f"a draft of {name}", drafts=drafts, **more)

ABSENT = kind("absent", "no_such_module:build")
FAILS = kind("fails", "breaking_code:fail")
SHAPELESS = kind("shapeless", "breaking_code:shapeless")
ABSENT_HEAD = kind("absent_head", "breaking_code:NOTHING", weights="head", marks=("absent_head_size",))
ABSTRACT_HEAD = kind("abstract_head", "breaking_code:Abstract", weights="head", objective="breaking_code:TRAINING",
                     aliases={"train": ("abstract",)})
CURIOUS_HEAD = kind("curious_head", "breaking_code:Curious", weights="head")
MODEL = kind("other_model", "breaking_code:OtherModel", weights="model", marks=("other_model_mark",))
"""
CODE = """
from sametoken.heads.draft_model.drafts import DraftModel
from sametoken.heads.kind import HeadKind
from sametoken.heads.medusa.drafts import Medusa

def fail(config):
    raise KeyError("a setting")

def shapeless(config):
    return "a text"

TRAINING = "a text"

class Abstract(HeadKind):
    pass

class Curious(Medusa):
    def recognises(self, files):
        return files.config["no such key"]

class OtherModel(DraftModel):
    def build(self, config, module, target, cache_for):
        print("built by the other kind")
        return super().build(config, module, target, cache_for)
"""
EXITS = "import sys\nsys.exit(3)\n"
POINTS = ("ABSENT", "FAILS", "SHAPELESS", "ABSENT_HEAD", "ABSTRACT_HEAD", "CURIOUS_HEAD", "MODEL")
SHORT = ("--prompt", "1 2 3", "--max-tokens", "8", "--temperature", "0")


BROKEN = ("absent", "fails", "absent_head")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the distribution is installed."""
    root = tmp_path_factory.mktemp("site")
    for name, text in {"breaking": RECORDS, "breaking_code": CODE, "breaking_exits": EXITS}.items():
        (root / f"{name}.py").write_text(text)
    metadata = root / "breaking-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: breaking\nVersion: 1.5\n")
    points = [f"{name.lower()} = breaking:{name}" for name in POINTS]
    text = "\n".join(["[sametoken.drafters]", *points, "exits = breaking_exits:KIND"])
    (metadata / "entry_points.txt").write_text(text)
    return root


def call(site: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command that ends with `code` where the distribution is installed."""
    paths = os.pathsep.join([str(site), str(ROOT / "src")])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sametoken.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def left_out(text: str) -> list[str]:
    """The kinds that a command warned of, in order."""
    return sorted(re.findall(r"drafter '(\w+)'", "\n".join(line for line in text.splitlines() if "left out" in line)))


@pytest.mark.thorough
def test_broken_kinds_cost_one_warning_each(site: Path) -> None:
    plain = call(site, "generate", "embedded", "--method", "none", *SHORT)
    assert plain.stdout.strip()
    assert left_out(plain.stderr) == ["absent", "exits", "fails", "shapeless"]
    assert "SystemExit: 3" in plain.stderr
    assert "of breaking 1.5 cannot be built (KeyError: 'a setting')" in plain.stderr
    assert "made 'a text', not a drafter: it has no 'taps'; update or uninstall breaking 1.5" in plain.stderr

    drafted = call(site, "generate", "embedded", "--draft", embedded.NAME, *SHORT)
    assert drafted.stdout == plain.stdout
    heads = ["absent_head", "abstract_head", "curious_head"]
    assert left_out(drafted.stderr) == sorted(["absent", "exits", "fails", "shapeless", *heads])


@pytest.mark.parametrize("method", [pytest.param(name, marks=mark(name == "fails")) for name in BROKEN])
def test_a_broken_kind_that_is_named_is_an_error(site: Path, method: str) -> None:
    drafts = ("--draft", embedded.HEAD_NAME) if "head" in method else ()
    done = call(site, "generate", "embedded", "--method", method, *drafts, *SHORT, code=2)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert f"drafter '{method}' of breaking 1.5 cannot be" in error
    assert "update or uninstall breaking 1.5" in error


def test_a_kind_whose_training_is_broken_has_no_mode(site: Path) -> None:
    done = call(site, "train", "embedded", "--mode", "abstract", "--data", "none.jsonl", code=2)
    assert "breaking_code:TRAINING is 'a text', expected a Training; update or uninstall breaking 1.5" in done.stderr
    assert "mode = 'abstract': expected" in done.stderr


@pytest.mark.thorough
def test_a_head_of_a_broken_kind_says_whose_it_is(site: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"absent_head_size": 3}))
    save_file({"only_here.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    done = call(site, "generate", "embedded", "--draft", str(tmp_path), *SHORT, code=2)
    assert "error: drafter 'absent_head' of breaking 1.5 cannot be loaded from breaking_code:NOTHING" in done.stderr


@pytest.mark.thorough
def test_a_model_drafts_by_the_kind_that_is_named_or_marked(site: Path, tmp_path: Path) -> None:
    usual = call(site, "generate", "embedded", "--draft", embedded.NAME, *SHORT).stdout
    named = call(site, "generate", "embedded", "--draft", embedded.NAME, "--method", "other_model", *SHORT).stdout
    marked = tmp_path / "marked"
    shutil.copytree(embedded.draft(embedded.NAME), marked)
    config = json.loads((marked / "config.json").read_text())
    (marked / "config.json").write_text(json.dumps({**config, "other_model_mark": 1}))
    found = call(site, "generate", "embedded", "--draft", str(marked), *SHORT).stdout
    assert named == found == f"built by the other kind\n{usual}"
