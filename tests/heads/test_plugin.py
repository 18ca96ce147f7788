"""A kind of drafter from another distribution: installed by pip, then listed, trained, evaluated, exported, served.

The distribution is `tests/plugin`; nothing in sametoken names it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from training_checks import write_conversations

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "plugin"
KIND, MODE = "next_feature", "next-feature"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The plug-in as pip installs it, without network, beside a directory for what is made."""
    base = tmp_path_factory.mktemp("plugin")
    source = base / "source"  # setuptools writes beside what it builds
    source.mkdir()
    for file in PLUGIN.rglob("*"):
        if file.suffix in (".py", ".toml"):
            (source / file.relative_to(PLUGIN)).parent.mkdir(parents=True, exist_ok=True)
            (source / file.relative_to(PLUGIN)).write_bytes(file.read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(base / "site"), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return base


def environment(place: Path) -> dict[str, str]:
    """Variables with which the plug-in is installed."""
    paths = [str(place / "site"), os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}


def call(place: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command that ends with `code`, run where the plug-in is installed."""
    command = [sys.executable, "-m", "sametoken.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(place), cwd=place)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def answers(place: Path, *arguments: str, body: dict[str, object]) -> list[dict[str, Any]]:
    """Replies of a server to the same completion, asked for with drafts and without."""
    command = [sys.executable, "-m", "sametoken.cli", "serve", *arguments, "--port", "0", "--threads", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, text=True, env=environment(place), cwd=place) as server:
        try:
            assert server.stderr is not None
            url = next(found[1] for line in server.stderr if (found := re.search(r"ready: (\S+),", line)))
            asked = [body, {**body, "speculative": {"method": "none"}}]
            return [httpx.post(f"{url}/v1/completions", json=each, timeout=60).json() for each in asked]
        finally:
            server.kill()


@pytest.mark.thorough
def test_an_installed_kind_goes_the_whole_way(place, pair):
    listed = json.loads(call(place, "doctor", "--json").stdout)["drafters"]
    assert listed[KIND] == "sametoken-next-feature 0.1"
    data = write_conversations(place / "chat.jsonl")
    run = ("--mode", MODE, "--next-feature-inner-size", "24", "--max-steps", "30", "--num-epochs", "40", "--lr", "3e-3",
           "--logging-steps", "1")  # fmt: skip
    told = call(place, "train", pair.target, *run, "--data", str(data), "--output-dir", "run", "--threads", "1")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", told.stderr)]
    assert losses[-1] < 0.8 * losses[0]
    assert json.loads((place / "run/head/config.json").read_text())["next_feature_inner_size"] == 24

    judged = ("--target", pair.target, "--data", str(data), "--num-samples", "4", "--osl", "24", "--json")
    found = json.loads(call(place, "evaluate", "run", *judged).stdout)
    assert found["acceptance_length"] >= 1
    assert found["drafts"] > 0
    assert "next-feature" in call(place, "doctor", "run/head", "--target", pair.target, "--no-measure").stdout

    call(place, "export", "run/head", "--to", "hf", "--output", "exported", "--target", pair.target)
    refused = call(place, "export", "run/head", "--to", "vllm", "--output", "x", "--target", pair.target, code=2)
    assert "vLLM has no next-feature drafts, so it cannot run this head" in refused.stderr
    small = ("--max-tokens", "16", "--num-prompts", "2", "--temperatures", "0,0.8")
    proof = call(place, "verify", pair.target, "--draft", "exported", "--method", KIND, *small)
    assert "equal" in proof.stdout
    assert "different" not in proof.stdout

    served = (pair.target, "--draft", "exported", "--method", KIND, "--no-adaptive")
    drafted, plain = answers(place, *served, body={"prompt": "say 1", "max_tokens": 24, "temperature": 0.7, "seed": 5})
    assert drafted["choices"] == plain["choices"]


def test_the_documentation_shows_the_code_of_the_plug_in():
    """Every block of Python and TOML is a part of one of its files, and every file is shown."""
    page = (ROOT / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", page, flags=re.DOTALL)
    sources = {file.name: file.read_text() for file in PLUGIN.rglob("*") if file.suffix in (".py", ".toml")}
    owners = [[name for name, text in sources.items() if block in text] for block in shown]
    assert all(owners), shown[[bool(names) for names in owners].index(False)]
    assert {name for names in owners for name in names} == set(sources)
